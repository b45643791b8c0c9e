"""A process group whose ranks share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import PeerLostError
from zmqtrain.host.channel import Channels
from zmqtrain.host.sums import Combine
from zmqtrain.host.team import Team
from zmqtrain.host.window import At, Window, as_bytes


class OneHost:
    """Implements `zmqtrain.c10d.transport.Transport` in shared memory."""

    def __init__(self, arena: Arena, rank: int, names: Sequence[str], *, timeout_s: float, setting: str) -> None:
        """Blocks until all ranks have come. ``names`` of the ranks, for errors."""
        self.rank, self.size = rank, len(names)
        self._arena = arena
        self._team = Team(arena, range(self.size), rank, names=names, timeout_s=timeout_s, setting=setting)
        self._window = Window(self._team)
        self._channels = Channels(self._team)

    def all_reduce(self, flat: Tensor, combine: Combine, what: str, *, root: int | None = None) -> None:
        self._window.all_reduce(flat, combine, what, root=root)

    def broadcast(self, flat: Tensor, root: int, what: str) -> None:
        content, mine = as_bytes(flat), self.rank == root

        def take(start: int, stop: int, at: At) -> None:
            if not mine:
                content[start:stop].copy_(at(root, 0))

        self._window.offer([content if mine else None], content.numel(), take, what)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor, what: str) -> None:
        self._gather([as_bytes(output) for output in outputs], as_bytes(own), what, max(map(_nbytes, outputs)))

    def gather(self, outputs: Sequence[Tensor] | None, own: Tensor, root: int, what: str) -> None:
        # Everybody's is as long as the own: others than root know no more.
        self._gather([as_bytes(output) for output in outputs or ()], as_bytes(own), what, _nbytes(own))

    def scatter(self, output: Tensor, parts: Sequence[Tensor] | None, root: int, what: str) -> None:
        content = as_bytes(output)
        offered = [None] * self.size if parts is None else [as_bytes(part) for part in parts]

        def take(start: int, stop: int, at: At) -> None:
            content[start:stop].copy_(at(root, self.rank))

        self._window.offer(offered, content.numel(), take, what)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], combine: Combine, what: str) -> None:
        lengths = self._lengths([_nbytes(output)], what)
        self._window.reduce_scatter(parts, output, combine, what, longest=int(lengths.max()))

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], what: str) -> None:
        longest = int(self._lengths([_nbytes(part) for part in parts], what).max())
        contents = [as_bytes(output) for output in outputs]

        def take(start: int, stop: int, at: At) -> None:
            for source, content in enumerate(contents):
                piece = content[start:stop]
                piece.copy_(at(source, self.rank)[: piece.numel()])

        self._window.offer([as_bytes(part) for part in parts], longest, take, what)

    def barrier(self, what: str) -> None:
        self._window.barrier(what)

    def send(self, to: int, tag: int, flat: Tensor, what: str) -> None:
        self._channels.send(to, tag, as_bytes(flat), what)

    def receive(self, source: int, tag: int, flat: Tensor, what: str) -> None:
        self._channels.receive(source, tag, as_bytes(flat), what)

    def waiting(self, source: int) -> bool:
        self._team.look("a message of any rank")
        return self._channels.waiting(source)

    def close(self, error: BaseException | None = None) -> None:
        self._team.abort(error or PeerLostError(self._team.names[self.rank], "its process group was destroyed"))
        self._team.leave()
        self._arena.close()

    def _gather(self, contents: Sequence[Tensor], own: Tensor, what: str, longest: int) -> None:
        def take(start: int, stop: int, at: At) -> None:
            for source, content in enumerate(contents):
                piece = content[start:stop]
                piece.copy_(at(source, 0)[: piece.numel()])

        self._window.offer([own], longest, take, what)

    def _lengths(self, own: Sequence[int], what: str) -> Tensor:
        """All ranks' lengths: parts may be uneven, and all must go through the window as often."""
        mine = torch.tensor(own, dtype=torch.int64)
        found = torch.empty(self.size, len(own), dtype=torch.int64)
        self._gather([as_bytes(row) for row in found], as_bytes(mine), what, _nbytes(mine))
        return found


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
