"""How the model is cut into pieces: which worker of a group exchanges which elements with which server.

A pure function of sizes, so that workers and servers agree without sending the cut to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zmqtrain.collectives.group import bounds


@dataclass(frozen=True, slots=True)
class BucketSize:
    """The properties of a bucket that decide how it is cut."""

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

    A model that would leave servers without a piece is cut finer, so that each has one as long as there are as many elements.
    """
    assert group_size > 0
    assert servers > 0
    most_bytes = _finer(buckets, group_size, servers, split_bytes)
    load = [0] * servers
    result: list[Piece] = []
    for index, bucket in enumerate(buckets):
        for position, (start, stop) in _parts(bucket, group_size):
            count = _count(stop - start, bucket, most_bytes)
            # An even cut, since one small remainder costs a message as large ones do.
            for first, last in bounds(stop - start, count) if count else []:
                server = load.index(min(load))
                load[server] += (last - first) * bucket.itemsize
                result.append(Piece(len(result), index, start + first, start + last, position, server))
    return tuple(result)


def _finer(buckets: Sequence[BucketSize], group_size: int, servers: int, split_bytes: int) -> int:
    """The largest piece with which no server is left without one, or else that of one element."""
    parts = [(stop - start, bucket) for bucket in buckets for _, (start, stop) in _parts(bucket, group_size)]
    wanted = min(servers, sum(numel for numel, _ in parts))
    most_bytes = split_bytes
    itemsize = max((bucket.itemsize for _, bucket in parts), default=1)
    # The first try is an even share of the whole. Parts smaller than that may take more than one.
    share = -(-sum(numel * bucket.itemsize for numel, bucket in parts) // (servers * itemsize)) * itemsize
    while sum(_count(numel, bucket, most_bytes) for numel, bucket in parts) < wanted:
        most_bytes = share if most_bytes > share else most_bytes // 2
    return most_bytes


def _parts(bucket: BucketSize, group_size: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each worker that exchanges the bucket, by its place, and what of the bucket is its own."""
    positions = range(group_size) if bucket.positions is None else bucket.positions
    return zip(positions, bounds(bucket.numel, len(positions)), strict=True)


def _count(numel: int, bucket: BucketSize, most_bytes: int) -> int:
    """The number of pieces for a part of ``numel`` elements."""
    return -(-numel // max(1, most_bytes // bucket.itemsize))
