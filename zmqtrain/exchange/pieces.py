"""How the model is cut into pieces: which worker of a group exchanges which elements with which server.

A pure function of sizes, so that workers and servers agree without sending the cut to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.collectives.group import bounds


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What the cut must know of a bucket."""

    numel: int
    itemsize: int
    positions: tuple[int, ...] | None = None
    """The workers of each group that exchange it, by their places; ``None``: all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a bucket: exchanged by one worker of each group with one server, in one message."""

    index: int
    bucket: int
    start: int
    stop: int
    position: int
    """Place in its group of the worker that exchanges it."""
    server: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def pieces(buckets: Sequence[BucketSize], group_size: int, servers: int, split_bytes: int) -> tuple[Piece, ...]:
    """Cut all buckets: every element in exactly one piece, no piece over ``split_bytes`` (but of one element at least), none across
    two workers' parts. A piece goes to the server with the fewest bytes so far, so the servers' loads differ by a piece at most.
    """
    assert group_size > 0
    assert servers > 0
    load = [0] * servers
    result: list[Piece] = []
    for index, bucket in enumerate(buckets):
        most = max(1, split_bytes // bucket.itemsize)
        positions = range(group_size) if bucket.positions is None else bucket.positions
        for position, (start, stop) in zip(positions, bounds(bucket.numel, len(positions)), strict=True):
            count = -(-(stop - start) // most)
            # An even cut, since one small remainder costs a message as large ones do.
            for first, last in bounds(stop - start, count) if count else []:
                server = load.index(min(load))
                load[server] += (last - first) * bucket.itemsize
                result.append(Piece(len(result), index, start + first, start + last, position, server))
    return tuple(result)
