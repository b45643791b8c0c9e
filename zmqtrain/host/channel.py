"""Messages from one process of a host to another, through shared memory.

Each pair of processes has a channel in each direction: two chunks in the sender's slot, and counters of chunks written and read.
Messages of one tag keep their order. Those of different tags do not wait for each other: a message for which no receive is posted
is put aside while another one is waited for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zmqtrain.arena.arena import FIRST_FREE, WORDS, Place
from zmqtrain.errors import PeerTimeoutError, ProtocolError
from zmqtrain.host.team import LOOK_S, MOST_TEAMS, WORDS_A_TEAM, Team

CHUNK_BYTES = 512 * 1024
_HEADER = 16  # tag and length, before a message's first chunk
_LINE = 64
_WORDS_A_PEER = 4
_SENT, _LOW, _HIGH, _TAKEN = range(_WORDS_A_PEER)
#: Words that teams do not use and channels may.
_FIRST = FIRST_FREE + WORDS_A_TEAM
MOST_PEERS = (WORDS - _FIRST) // _WORDS_A_PEER
assert MOST_TEAMS > 1

#: ``done(source, error)`` is called once, in any thread: the rank that sent the message, or why there is none.
Done = Callable[[int, Exception | None], None]


@dataclass(eq=False, slots=True)
class _Posted:
    """A receive that waits for its message."""

    sources: tuple[int, ...]
    tag: int
    target: Tensor
    what: str
    done: Done
    deadline: float
    taken: bool = field(default=False)


class Channels:
    """This process's ends of the channels to all members of ``team``, which must be the only team of its region.

    `send` blocks, and calls for one receiver must come from one thread. `post` does not; messages are read in a thread for each
    sender, which is started by the first receive, and ended by `close`.
    """

    def __init__(self, team: Team) -> None:
        if team.size > MOST_PEERS:
            raise ValueError(f"{team.size} processes: at most {MOST_PEERS} on one host can send each other messages")
        self._team = team
        self._mine = team.arena.words(team.arena.slot)
        self._windows: dict[int, list[Tensor]] = {}  # receiver -> the two chunks
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._opening = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._posted: list[_Posted] = []
        self._aside: dict[int, deque[tuple[int, Tensor]]] = {}
        self._readers: dict[int, threading.Thread] = {}
        self._closed = False

    def send(self, to: int, tag: int, content: Tensor, what: str) -> None:
        """Send ``content``, flat bytes. Returns when the last chunk is written. ``what``: the operation, for errors."""
        chunks = self._open(to)
        header = torch.tensor([tag, content.numel()], dtype=torch.int64).view(torch.uint8)
        start, room = 0, CHUNK_BYTES - _HEADER
        while True:
            count = self._sent[to] + 1
            self._wait(to, self._word(self._team.rank, _TAKEN), count - 2, what)
            chunk, piece = chunks[count % 2], content[start : start + room]
            if not start:
                chunk[:_HEADER].copy_(header)
            chunk[_HEADER : _HEADER + piece.numel()].copy_(piece)
            self._sent[to] = count
            self._mine.set(self._word(to, _SENT), count)
            start += room
            if start >= content.numel():
                return

    def post(self, sources: Sequence[int], tag: int, target: Tensor, what: str, done: Done) -> None:
        """Receive the next message with this tag from one of ``sources`` into flat bytes, which belong to the channel until
        ``done`` is called: with a `ProtocolError` if its length differs, and a `PeerLostError` or `PeerTimeoutError` if none comes.
        ``what``: the operation, for errors."""
        posted = _Posted(tuple(sources), tag, target, what, done, time.monotonic() + self._team.timeout_s)
        with self._changed:
            for source in posted.sources:
                content = self._put_aside(source, tag)
                if content is not None:
                    posted.taken = True
                    break
            else:
                self._posted.append(posted)
                for source in posted.sources:
                    self._start(source)
                self._changed.notify_all()
        if posted.taken and content is not None:
            _deliver(posted, source, content)

    def close(self, error: Exception) -> None:
        """Receives that are still waiting end with ``error``."""
        with self._changed:
            self._closed = True
            left = [each for each in self._posted if not each.taken]
            self._posted.clear()
            self._changed.notify_all()
        for each in left:
            each.taken = True
            each.done(each.sources[0], error)
        for reader in self._readers.values():
            reader.join()

    def _start(self, source: int) -> None:
        if source not in self._readers:
            name = f"zmqtrain-messages-of-{source}"
            self._readers[source] = threading.Thread(target=self._read_all, args=(source,), name=name, daemon=True)
            self._readers[source].start()

    def _put_aside(self, source: int, tag: int) -> Tensor | None:
        aside = self._aside.get(source, ())
        for place, (found, content) in enumerate(aside):
            if found == tag:
                del self._aside[source][place]
                return content
        return None

    # In the thread of one sender.

    def _read_all(self, source: int) -> None:
        torch.set_grad_enabled(False)  # a setting of each thread
        while self._wanted(source):
            try:
                if self._arrived(source):
                    self._read_one(source)
            except Exception as error:  # noqa: BLE001 - passed to those who wait
                self._fail(source, error)

    def _wanted(self, source: int) -> bool:
        """Wait until there is a receive from this sender. Returns False once the channels are closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(source in each.sources for each in self._posted))
            return not self._closed

    def _arrived(self, source: int) -> bool:
        """Wait a moment for a message. Raises `PeerLostError` if none can come."""
        words, index, count = self._team.words_of(source), self._word(self._team.rank, _SENT), self._taken.get(source, 0) + 1
        if words.reached(index, count) or words.wait(index, count, LOOK_S):
            return True
        now = time.monotonic()
        for each in self._take(lambda each: source in each.sources and each.deadline <= now):
            team = self._team
            peer = team.names[source] if len(each.sources) == 1 else "any rank"
            each.done(source, PeerTimeoutError(peer, each.what, team.timeout_s, team.setting))
        with self._changed:
            what = next((each.what for each in self._posted if source in each.sources), None)
        if what is not None:
            self._team.look(what, [source])
        return False

    def _fail(self, source: int, error: Exception) -> None:
        """Receives that only this sender could have ended cannot go on; others wait for the other ones."""
        with self._changed:
            for each in self._posted:
                each.sources = tuple(other for other in each.sources if other != source)
        for each in self._take(lambda each: not each.sources):
            each.done(source, error)

    def _take(self, which: Callable[[_Posted], bool]) -> list[_Posted]:
        with self._changed:
            found = [each for each in self._posted if which(each)]
            self._posted[:] = [each for each in self._posted if each not in found]
        for each in found:
            each.taken = True
        return found

    def _claim(self, source: int, tag: int) -> _Posted | None:
        """The receive that was posted first of those for a message, which is no longer posted then."""
        for each in self._posted:
            if each.tag == tag and source in each.sources:
                self._posted.remove(each)
                each.taken = True
                return each
        return None

    def _read_one(self, source: int) -> None:
        """Read the message that has arrived to where it belongs."""
        chunk, mine = self._chunk(source), None
        tag, length = (int(number) for number in chunk[:_HEADER].view(torch.int64))
        with self._changed:
            mine = self._claim(source, tag)
        fits = mine is not None and length == mine.target.numel()
        content = mine.target if mine is not None and fits else torch.empty(length, dtype=torch.uint8)
        try:
            self._read(source, chunk, content, "the rest of a message")
        except Exception as error:
            if mine is not None:
                mine.done(source, error)
            raise
        if mine is None:
            with self._changed:
                mine = self._claim(source, tag)  # it may have been posted meanwhile
                if mine is None:
                    self._aside.setdefault(source, deque()).append((tag, content))
                    return
        if content is mine.target:
            mine.done(source, None)
        else:
            _deliver(mine, source, content)

    def _read(self, source: int, chunk: Tensor, target: Tensor, what: str) -> None:
        start, room = 0, CHUNK_BYTES - _HEADER
        while True:
            piece = target[start : start + room]
            piece.copy_(chunk[_HEADER : _HEADER + piece.numel()])
            self._taken[source] = self._taken.get(source, 0) + 1
            self._mine.set(self._word(source, _TAKEN), self._taken[source])
            start += room
            if start >= target.numel():
                return
            self._wait(source, self._word(self._team.rank, _SENT), self._taken[source] + 1, what)
            chunk = self._chunk(source)

    def _chunk(self, source: int) -> Tensor:
        """The next chunk of ``source``, which has been written."""
        words, mine = self._team.words_of(source), self._team.rank
        count = self._taken.get(source, 0) + 1
        start = (words.get(self._word(mine, _HIGH)) << 32 | words.get(self._word(mine, _LOW))) * _LINE
        memory = self._team.arena.memory(Place(start + count % 2 * CHUNK_BYTES, CHUNK_BYTES))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _open(self, to: int) -> list[Tensor]:
        with self._opening:
            if to not in self._windows:
                block = self._team.arena.allocate(2 * CHUNK_BYTES, "messages to another process")
                memory = torch.frombuffer(block.memory, dtype=torch.uint8)
                self._mine.set(self._word(to, _HIGH), block.place.start // _LINE >> 32)
                self._mine.set(self._word(to, _LOW), block.place.start // _LINE)
                self._windows[to], self._sent[to] = [memory[:CHUNK_BYTES], memory[CHUNK_BYTES:]], 0
            return self._windows[to]

    def _wait(self, peer: int, index: int, value: int, what: str) -> None:
        words, team = self._team.words_of(peer), self._team
        if words.reached(index, value):
            return
        deadline = time.monotonic() + team.timeout_s
        while not words.wait(index, value, LOOK_S):
            team.look(what, [peer])
            if time.monotonic() >= deadline:
                raise PeerTimeoutError(team.names[peer], what, team.timeout_s, team.setting)

    @staticmethod
    def _word(peer: int, kind: int) -> int:
        return _FIRST + _WORDS_A_PEER * peer + kind


def _deliver(posted: _Posted, source: int, content: Tensor) -> None:
    """Hand over a message that was read elsewhere."""
    if content.numel() != posted.target.numel():
        error = ProtocolError(f"{posted.what}: {content.numel():,} bytes were sent, but {posted.target.numel():,} were expected")
        posted.done(source, error)
        return
    posted.target.copy_(content)
    posted.done(source, None)
