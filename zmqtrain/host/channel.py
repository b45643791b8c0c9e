"""Messages from one process of a host to another, through shared memory.

Each pair of processes has a channel each way: two chunks in the sender's slot, and counters of the chunks written and read.
Messages keep their order; one with another tag than is asked for is put aside.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import torch
from torch import Tensor

from zmqtrain.arena.arena import FIRST_FREE, WORDS, Place
from zmqtrain.errors import PeerTimeoutError, ProtocolError
from zmqtrain.host.team import LOOK_S, MOST_TEAMS, WORDS_A_TEAM, Team

CHUNK_BYTES = 512 * 1024
_HEADER = 16  # tag and length, in front of a message's first chunk
_LINE = 64
_WORDS_A_PEER = 4
_SENT, _LOW, _HIGH, _TAKEN = range(_WORDS_A_PEER)
#: Words that teams leave to channels.
_FIRST = FIRST_FREE + WORDS_A_TEAM
MOST_PEERS = (WORDS - _FIRST) // _WORDS_A_PEER
assert MOST_TEAMS > 1


class Channels:
    """This process's ends of the channels to all members of ``team``, which must be the only team of its region.

    `send` and `receive` block. Calls for one peer and direction must come from one thread.
    """

    def __init__(self, team: Team) -> None:
        if team.size > MOST_PEERS:
            raise ValueError(f"{team.size} processes: at most {MOST_PEERS} of one host can send each other messages")
        self._team = team
        self._mine = team.arena.words(team.arena.slot)
        self._windows: dict[int, list[Tensor]] = {}  # to whom -> the two chunks
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._aside: dict[int, deque[tuple[int, Tensor]]] = {}
        self._opening = threading.Lock()

    def send(self, to: int, tag: int, content: Tensor, what: str) -> None:
        """Returns when the last chunk is written; ``content`` is flat bytes."""
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

    def receive(self, source: int, tag: int, target: Tensor, what: str) -> None:
        """The next message of ``source`` with this tag, into flat bytes. Raises `ProtocolError` where its length is another."""
        aside = self._aside.setdefault(source, deque())
        for place, (found, content) in enumerate(aside):
            if found == tag:
                del aside[place]
                _check(content.numel(), target, what)
                target.copy_(content)
                return
        while True:
            chunk = self._next(source, what)
            found, length = (int(number) for number in chunk[:_HEADER].view(torch.int64))
            if found != tag:
                content = torch.empty(length, dtype=torch.uint8)
                self._read(source, chunk, content, what)
                aside.append((found, content))
                continue
            if length != target.numel():
                self._read(source, chunk, torch.empty(length, dtype=torch.uint8), what)
                _check(length, target, what)
            self._read(source, chunk, target, what)
            return

    def waiting(self, source: int) -> bool:
        """Whether a message of ``source`` is there, with any tag."""
        count = self._taken.get(source, 0) + 1
        return bool(self._aside.get(source)) or self._team.words_of(source).reached(self._word(self._team.rank, _SENT), count)

    def _read(self, source: int, chunk: Tensor, target: Tensor, what: str) -> None:
        start, room = 0, CHUNK_BYTES - _HEADER
        while True:
            piece = target[start : start + room]
            piece.copy_(chunk[_HEADER : _HEADER + piece.numel()])
            self._taken[source] += 1
            self._mine.set(self._word(source, _TAKEN), self._taken[source])
            start += room
            if start >= target.numel():
                return
            chunk = self._next(source, what)

    def _next(self, source: int, what: str) -> Tensor:
        """The chunk of ``source`` that is read next, once it is there."""
        count = self._taken.setdefault(source, 0) + 1
        mine = self._team.rank
        self._wait(source, self._word(mine, _SENT), count, what)
        words = self._team.words_of(source)
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


def _check(length: int, target: Tensor, what: str) -> None:
    if length != target.numel():
        raise ProtocolError(f"{what}: {length} bytes were sent, and {target.numel()} are to be received")
