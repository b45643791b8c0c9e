"""How the model is divided into pieces: which worker of a group exchanges which elements with which server.

A pure function of sizes, so that workers and servers agree without sending the result to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zmqtrain.collectives.group import bounds


@dataclass(frozen=True, slots=True)
class BucketSize:
    """The properties of a bucket that determine how it is divided."""

    numel: int
    itemsize: int
    positions: tuple[int, ...] | None = None
    """The positions in each group of the workers that exchange it; ``None``: all workers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a bucket: exchanged by one worker of each group with one server, in one message."""

    index: int
    bucket: int
    start: int
    stop: int
    position: int
    """The position in its group of the worker that exchanges it."""
    server: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def pieces(
    buckets: Sequence[BucketSize], group_size: int, servers: int, split_bytes: int, least_bytes: int | None = None
) -> tuple[Piece, ...]:
    """Divide all buckets so that every element is in exactly one piece. No piece is larger than ``split_bytes`` (or one element),
    and none crosses two workers' parts. A piece goes to the server with the fewest bytes so far, so the servers' loads differ by at
    most a piece.

    Each worker's part of a bucket is divided evenly among all servers, unless its pieces would be smaller than ``least_bytes`` (by
    default ``split_bytes``). If servers would get no piece of a model, it is divided into smaller pieces, down to single elements.
    """
    assert group_size > 0
    assert servers > 0
    least_bytes = split_bytes if least_bytes is None else least_bytes
    most_bytes = _finer(buckets, group_size, servers, split_bytes)
    load = [0] * servers
    result: list[Piece] = []
    for index, bucket in enumerate(buckets):
        for position, (start, stop) in _parts(bucket, group_size):
            count = _count(stop - start, bucket, most_bytes)
            even = -(-count // servers) * servers
            if even > count and (stop - start) * bucket.itemsize >= count * least_bytes:
                count = min(even, (stop - start) * bucket.itemsize // least_bytes)
            # Even pieces, since one small remainder costs as much as a large message.
            for first, last in bounds(stop - start, count) if count else []:
                server = load.index(min(load))
                load[server] += (last - first) * bucket.itemsize
                result.append(Piece(len(result), index, start + first, start + last, position, server))
    return tuple(result)


def _finer(buckets: Sequence[BucketSize], group_size: int, servers: int, split_bytes: int) -> int:
    """The largest piece size with which every server gets a piece, or else one element."""
    parts = [(stop - start, bucket) for bucket in buckets for _, (start, stop) in _parts(bucket, group_size)]
    wanted = min(servers, sum(numel for numel, _ in parts))
    most_bytes = split_bytes
    itemsize = max((bucket.itemsize for _, bucket in parts), default=1)
    # The first try is an even share of the whole. Parts smaller than that may take more tries.
    share = -(-sum(numel * bucket.itemsize for numel, bucket in parts) // (servers * itemsize)) * itemsize
    while sum(_count(numel, bucket, most_bytes) for numel, bucket in parts) < wanted:
        most_bytes = share if most_bytes > share else most_bytes // 2
    return most_bytes


def _parts(bucket: BucketSize, group_size: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each worker that exchanges the bucket, by its position, and the bounds of its part."""
    positions = range(group_size) if bucket.positions is None else bucket.positions
    return zip(positions, bounds(bucket.numel, len(positions)), strict=True)


def _count(numel: int, bucket: BucketSize, most_bytes: int) -> int:
    """The number of pieces for a part of ``numel`` elements."""
    return -(-numel // max(1, most_bytes // bucket.itemsize))
