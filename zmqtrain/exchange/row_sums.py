"""Sums of a model that is divided over the rows of a grid: each row sums its own part, and all together what is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.base import Bucket, Replica, Rows
from zmqtrain.exchange.sums import HostSums, NetworkSums
from zmqtrain.net.endpoint import Tag
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload

#: ``make(group, number)``: sums over these workers; the number tells apart the sums that a worker takes part in.
Make = Callable[[Group, int], HostSums | NetworkSums]


class RowSums:
    """Implements `zmqtrain.exchange.sums.Sums` with one sum for each set of workers that have the same buckets. Where these lie in
    a host's memory it is the replica's `Sharing`, too."""

    def __init__(self, group: Group, make: Make) -> None:
        self.group, self._make = group, make
        self._of: list[HostSums | NetworkSums] = []  # bucket -> who sums it
        self._all: list[HostSums | NetworkSums] = []
        self.sums: Sequence[Payload] = ()

    async def start(self, replica: Replica) -> None:
        families: dict[Rows | None, list[Bucket]] = {}
        for bucket in replica.buckets:
            families.setdefault(_family(bucket), []).append(bucket)
        made = {}
        # The numbers are in the order of buckets, which all workers have in common.
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

    # For the replica.

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
    """What buckets have in common that the same workers sum."""
    return None if bucket.rows is None else Rows(bucket.rows.positions, (), bucket.rows.own)
