"""A process group whose ranks share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.c10d.descriptor import Descriptor, require_equal
from zmqtrain.c10d.errors import MismatchError
from zmqtrain.errors import PeerLostError
from zmqtrain.host.channel import Channels, Done
from zmqtrain.host.sums import Combine
from zmqtrain.host.team import Team
from zmqtrain.host.window import At, Window, as_bytes


class OneHost:
    """Implements `zmqtrain.c10d.transport.RankTransport` in shared memory."""

    def __init__(self, arena: Arena, rank: int, names: Sequence[str], *, timeout_s: float, setting: str) -> None:
        """Blocks until all ranks have arrived. ``names``: those of the ranks, for errors."""
        self.rank, self.size = rank, len(names)
        self._arena = arena
        self._team = Team(arena, range(self.size), rank, names=names, timeout_s=timeout_s, setting=setting)
        self._window = Window(self._team)
        self._channels = Channels(self._team)

    @property
    def goes_on(self) -> tuple[type[Exception], ...]:
        """All ranks of a host read the same descriptors before anything else is done."""
        return (MismatchError,)

    @property
    def timeout_s(self) -> float:
        return self._team.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._team.timeout_s = timeout_s

    def look(self, what: str, members: Sequence[int] | None = None) -> None:
        self._team.look(what, members)

    def begin(self, descriptor: Descriptor, more: str, *, before: bool) -> None:
        self.check(descriptor.pack(), lambda packed: require_equal(packed, self._team.names, more=more))

    def check(self, packed: bytes, check: Callable[[list[bytes]], None]) -> None:
        """Like `begin`, with bytes of any meaning."""
        self._window.begin(packed, check)

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
        # All are as long as this rank's own: ranks other than root do not know more.
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
        lengths = self._lengths([_nbytes(each) for each in (*parts, *outputs)], what)
        require_splits(lengths, self._team.names, what)
        longest = int(lengths.max())
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

    def post(self, sources: Sequence[int], tag: int, flat: Tensor, what: str, done: Done) -> None:
        self._channels.post(sources, tag, as_bytes(flat), what, done)

    def close(self, error: Exception | None = None) -> None:
        error = error or PeerLostError(self._team.names[self.rank], "its process group was destroyed")
        self._team.abort(error)
        self._channels.close(error)
        self._team.leave()
        self._arena.close()

    def _gather(self, contents: Sequence[Tensor], own: Tensor, what: str, longest: int) -> None:
        def take(start: int, stop: int, at: At) -> None:
            for source, content in enumerate(contents):
                piece = content[start:stop]
                piece.copy_(at(source, 0)[: piece.numel()])

        self._window.offer([own], longest, take, what)

    def _lengths(self, own: Sequence[int], what: str) -> Tensor:
        """All ranks' lengths: parts may be uneven, but all must go through the window equally often."""
        mine = torch.tensor(own, dtype=torch.int64)
        found = torch.empty(self.size, len(own), dtype=torch.int64)
        self._gather([as_bytes(row) for row in found], as_bytes(mine), what, _nbytes(mine))
        return found


def require_splits(lengths: Tensor, names: Sequence[str], what: str) -> None:
    """Raise `MismatchError` unless each rank expects what the others send it.

    ``lengths``: row r holds the bytes that rank r sends to each rank, then those that it expects of each; the same on all ranks.
    """
    size = len(names)
    sent, expected = lengths[:, :size], lengths[:, size:].t()
    wrong = (sent != expected).nonzero()
    if len(wrong):
        source, to = (int(each) for each in wrong[0])
        raise MismatchError(
            f"{what}: {names[source]} sends {int(sent[source, to]):,} bytes to {names[to]}, which expects "
            f"{int(expected[source, to]):,}: the input splits of one must be the output splits of the other"
        )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
