"""Sums for a model that is divided over the rows of a grid: each row sums its own part, and all workers together the whole
parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.base import Bucket, Replica, Rows
from zmqtrain.exchange.sums import HostSums, NetworkSums
from zmqtrain.net.endpoint import Tag
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload

#: ``make(group, number)``: sums over these workers; the number distinguishes the sums in which a worker takes part.
Make = Callable[[Group, int], HostSums | NetworkSums]


class RowSums:
    """Implements `zmqtrain.exchange.sums.Sums` with one sum for each set of workers that have the same buckets. If these are in a
    host's memory, it is also the replica's `Sharing`."""

    def __init__(self, group: Group, make: Make) -> None:
        self.group, self._make = group, make
        self._of: list[HostSums | NetworkSums] = []  # bucket -> its sums
        self._all: list[HostSums | NetworkSums] = []
        self.sums: Sequence[Payload] = ()

    async def start(self, replica: Replica) -> None:
        families: dict[Rows | None, list[Bucket]] = {}
        for bucket in replica.buckets:
            families.setdefault(_family(bucket), []).append(bucket)
        made = {}
        # Numbers follow the order of buckets, which is the same on all workers.
        for number, (family, buckets) in enumerate(families.items()):
            sums = made[family] = self._make(buckets[0].sharers(self.group), number)
            self._all.append(sums)
        places: list[Payload] = [bucket.gradients for bucket in replica.buckets]
        self._of = [made[_family(bucket)] for bucket in replica.buckets]
        for family, buckets in families.items():
            sums = made[family]
            if isinstance(sums, HostSums):
                await sums.begin(buckets)
                for bucket, place in zip(buckets, sums.sums, strict=True):
                    places[bucket.index] = place
        self.sums = places
        if self._shared:
            replica.share(self)

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        await self._of[bucket.index].sum(bucket, tag)

    def abort(self, error: BaseException) -> None:
        for sums in self._all:
            sums.abort(error)

    async def stop(self) -> None:
        await together(*(sums.stop() for sums in self._all))

    # Called by the replica.

    def wait_writable(self) -> None:
        for sums in self._shared:
            sums.wait_writable()

    async def writable(self) -> None:
        for sums in self._shared:
            await sums.writable()

    def produced(self, index: int) -> None:
        sums = self._of[index]
        if isinstance(sums, HostSums):
            sums.produced(index)

    def taken(self, index: int) -> None:
        sums = self._of[index]
        if isinstance(sums, HostSums):
            sums.taken(index)

    @property
    def _shared(self) -> list[HostSums]:
        return [sums for sums in self._all if isinstance(sums, HostSums)]


def _family(bucket: Bucket) -> Rows | None:
    """What buckets that are summed by the same workers have in common."""
    return None if bucket.rows is None else Rows(bucket.rows.positions, (), bucket.rows.own)
