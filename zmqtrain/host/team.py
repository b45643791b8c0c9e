"""Processes of one host that work on the same memory, and wait for each other by words in it.

Every wait ends: when all have arrived, when one is lost (its process has ended, or has left the team), when this process gives up,
or after the time-out. Nothing here uses an event loop: only threads wait.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from enum import IntEnum

from zmqtrain.arena.arena import FIRST_FREE, PROCESS, WORDS, Arena, Block, Place
from zmqtrain.arena.words import Words
from zmqtrain.death import open_pidfd
from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.net.endpoint import PeerId

#: How long a wait sleeps, in seconds, before it checks whether the processes it waits for are alive. A loss is noticed within this
#: time; setting a word wakes waiters at once.
LOOK_S = 0.1


class Word(IntEnum):
    """A member's words, each a counter of operations unless stated otherwise."""

    ARRIVED = 0
    """Its own content is in memory."""
    DONE = 1
    """Its share of the work is done."""
    TAKEN = 2
    """It has read the result, and no longer needs it."""
    LEFT = 3
    """Not 0: it has left the team."""
    TABLE_LOW = 4
    """The position of the team's table of places, in cache lines; the lower 32 bits."""
    TABLE_HIGH = 5


WORDS_A_TEAM = len(Word)
MOST_TEAMS = (WORDS - FIRST_FREE) // WORDS_A_TEAM
_LINE = 64


class Team:
    """One member's view of a team. Members make it in any order; `join` waits until all have."""

    def __init__(
        self,
        arena: Arena,
        slots: Sequence[int],
        rank: int,
        *,
        names: Sequence[PeerId],
        number: int = 0,
        timeout_s: float = 60.0,
        setting: str = "[job] timeout",
    ) -> None:
        """
        Args:
            slots: those of the members, in the order of their ranks.
            names: names of the members, for errors.
            number: the number of the team, the same for all members, which no other team of theirs has.
            setting: the setting of ``timeout_s``, for errors.
        """
        if arena.slot != slots[rank]:
            raise ValueError(f"rank {rank} of the team has slot {slots[rank]}, but this process has slot {arena.slot}")
        if not 0 <= number < MOST_TEAMS:
            raise ValueError(f"team {number}: a host has at most {MOST_TEAMS} teams")
        self.arena, self.rank, self.names = arena, rank, tuple(names)
        self.timeout_s, self.setting = timeout_s, setting
        self._first = FIRST_FREE + number * WORDS_A_TEAM
        self._words = [arena.words(slot) for slot in slots]
        self._mine = self._words[rank]
        self._processes: dict[int, int] = {}  # rank -> a file that becomes readable when the process ends
        self._table: Block | None = None
        self._error: BaseException | None = None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self._words)

    def join(self, places: Sequence[Place] = ()) -> list[list[Place]]:
        """Tell the others where this member's memory is, and wait until all have done so. Returns the places of each member."""
        table = self.arena.allocate(16 * (len(places) + 1), "a team's table")
        self._table = table
        rows = table.memory.cast("Q")
        rows[0] = len(places)
        for index, place in enumerate(places):
            rows[2 + 2 * index], rows[3 + 2 * index] = place.start, place.nbytes
        self.set(Word.TABLE_HIGH, (table.place.start // _LINE) >> 32)
        self.set(Word.TABLE_LOW, table.place.start // _LINE)
        for word in (Word.DONE, Word.TAKEN, Word.ARRIVED):  # joining is each member's first operation
            self.set(word, 1)
        self.wait(Word.ARRIVED, 1, "the processes of this host to share their memory")
        return [self._places(member) for member in range(self.size)]

    def set(self, word: Word, value: int) -> None:
        """This member's counter ``word`` reaches ``value``."""
        self._mine.set(self._first + word, value)

    def wait(self, word: Word, value: int, what: str, *, members: Sequence[int] | None = None) -> None:
        """Sleep until the counter ``word`` of all ``members`` (default: of all members of the team) has reached ``value``.

        ``what`` is waited for, for the error's text. Raises `PeerLostError`, `PeerTimeoutError`, or the error given to `abort`.
        """
        deadline = None
        for member in range(self.size) if members is None else members:
            words, index = self._words[member], self._first + word
            if words.reached(index, value):
                continue
            now = time.monotonic()
            deadline = deadline or now + self.timeout_s
            while not words.wait(index, value, min(LOOK_S, max(0.0, deadline - now))):
                self.look(what)
                now = time.monotonic()
                if now >= deadline:
                    raise PeerTimeoutError(self.names[member], what, self.timeout_s, self.setting)
        if self._error is not None:
            raise self._error

    def words_of(self, member: int) -> Words:
        """All words of a member's slot."""
        return self._words[member]

    def look(self, what: str, members: Sequence[int] | None = None) -> None:
        """Raise if a wait for these members (default: all) can never succeed. A member whose process has ended is named before
        members that left because of it."""
        if self._error is not None:
            raise self._error
        others = [member for member in (range(self.size) if members is None else members) if member != self.rank]
        for member in others:
            if self._ended(member):
                raise PeerLostError(self.names[member], "its process has ended", waiting_for=what)
        for member in others:
            if self._words[member].get(self._first + Word.LEFT):
                raise PeerLostError(self.names[member], "it has left", waiting_for=what)

    def abort(self, error: BaseException) -> None:
        """Every wait of this process, now and later, raises ``error`` (within `LOOK_S`). May be called in any thread."""
        if self._error is None:
            self._error = error

    def leave(self) -> None:
        """Tell the others that this member will send nothing more: waits for it raise. This member must not wait afterwards."""
        self.set(Word.LEFT, 1)
        for word in (Word.ARRIVED, Word.DONE, Word.TAKEN):
            self._mine.wake(self._first + word)
        for file in self._processes.values():
            os.close(file)
        self._processes.clear()

    def _places(self, member: int) -> list[Place]:
        words = self._words[member]
        start = words.get(self._first + Word.TABLE_HIGH) << 32 | words.get(self._first + Word.TABLE_LOW)
        head = self.arena.memory(Place(start * _LINE, 16)).cast("Q")
        rows = self.arena.memory(Place(start * _LINE, 16 * (head[0] + 1))).cast("Q")
        return [Place(rows[2 * index], rows[2 * index + 1]) for index in range(1, rows[0] + 1)]

    def _ended(self, member: int) -> bool:
        pid = self._words[member].get(PROCESS)
        if not pid:
            return False  # it has not started
        if member not in self._processes:
            try:
                file = open_pidfd(pid)
            except ProcessLookupError:
                return True
            if file is None:  # use its number, although another process may get it
                return not _runs(pid)
            self._processes[member] = file
        poll = select.poll()
        poll.register(self._processes[member], select.POLLIN)
        return bool(poll.poll(0))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, and belongs to another user
        pass
    return True
