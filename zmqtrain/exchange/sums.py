"""Sums of gradients over workers, bucket by bucket: over the network, or in memory within hosts and over the network between
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.host.accumulator import Accumulator
from zmqtrain.host.member import HostMember
from zmqtrain.net.endpoint import Tag
from zmqtrain.waiting import abandoned, settle
from zmqtrain.wire.payload import Payload

#: How long the accumulator's lanes may take to end once nothing is left to sum, in seconds.
CLOSE_S = 5.0


class Sums(Protocol):
    """Sums each bucket's gradients over all its workers, times a fixed factor. Call `start` once, then `sum` for each bucket once
    per step, then `stop`."""

    @property
    def group(self) -> Group:
        """The workers that sum."""
        ...

    async def start(self, replica: Replica) -> None: ...

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        """Sum the bucket; afterwards `Replica.update`, or the bucket's update when it is taken back, uses the sum.

        Buckets are handed over in the same order on all workers; they may be summed at the same time and finish in any order.
        """
        ...

    def abort(self, error: BaseException) -> None:
        """End all waits here with ``error``: no more sums will arrive."""

    async def stop(self) -> None:
        """Cancel the sums in progress."""


class NetworkSums:
    """`Sums` over the network."""

    def __init__(self, group: Group, scale: float = 1.0) -> None:
        """``scale``: the factor on the sums."""
        self.group, self._scale = group, scale
        self._arithmetic = Arithmetic("zmqtrain-sums")

    async def start(self, replica: Replica) -> None:
        return None

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        # The next forward needs the bucket with the highest index first. The tag identifies the bucket, so it does not matter
        # that workers finish them in different orders.
        await all_reduce(self.group, bucket.gradients, tag, priority=bucket.index)
        if self._scale != 1.0:
            await self._arithmetic.do(partial(bucket.gradients.scale_, self._scale), bucket.gradients)

    def abort(self, error: BaseException) -> None:
        return None

    async def stop(self) -> None:
        self._arithmetic.close()


class HostSums:
    """`Sums` first in the memory of each host, where its workers see each other's gradients; then, if there are several hosts,
    slice by
    slice over the network: worker i of each host handles slice i, so each host's sum is sent once, by all its workers together.

    Implements `zmqtrain.exchange.base.Sharing` for the replica.
    """

    def __init__(
        self, group: Group, member: HostMember, column: Group | None, *, slices: int, scale: float, in_place: bool
    ) -> None:
        """``member``: this worker's place among the members of ``group`` on this host. ``column``: the workers that handle the same
        slice, one on each host (None: there are no others). ``slices``: the number of slices. ``in_place``: see `Accumulator`."""
        self.group, self.in_place = group, in_place
        self._column, self._member, self._begun = column, member, False
        between = None if slices == member.size and column is None else self._between
        self._accumulator = Accumulator(member, scale=scale, in_place=in_place, slices=slices, between=between)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._summed: dict[int, asyncio.Future[None]] = {}
        self._places: dict[int, int] = {}  # bucket -> its number among those that are summed here
        self._indices: list[int] = []  # the inverse of _places
        self.sums: Sequence[Payload] = ()
        """The sums of the buckets that are summed here, in their order."""

    async def start(self, replica: Replica) -> None:
        await self.begin(replica.buckets)
        replica.share(self)

    async def begin(self, buckets: Sequence[Bucket]) -> None:
        """Sum these buckets only; the caller informs the replica."""
        self._loop = asyncio.get_running_loop()
        self._indices = [bucket.index for bucket in buckets]
        self._places = {index: place for place, index in enumerate(self._indices)}
        self._begun = True
        gradients = [bucket.gradients for bucket in buckets]
        self.sums = await self._member.run(self._accumulator.start(gradients, self._on_summed))

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        future = self._future(bucket.index)
        try:
            await future
        finally:
            del self._summed[bucket.index]

    def abort(self, error: BaseException) -> None:
        self._member.abort(error)

    async def stop(self) -> None:
        if not self._begun:
            return
        self._begun = False
        await abandoned(self._tasks)
        await self._member.leave(CLOSE_S)

    # Called by the replica.

    def wait_writable(self) -> None:
        self._member.complete(self._accumulator.writable())

    async def writable(self) -> None:
        await self._member.run(self._accumulator.writable())

    def produced(self, index: int) -> None:
        self._accumulator.produced(self._places[index])

    def taken(self, index: int) -> None:
        self._accumulator.taken()

    # Called in the accumulator's lanes.

    def _on_summed(self, place: int, error: BaseException | None) -> None:
        self._call(lambda: self._end(self._indices[place], error))

    def _between(self, operation: int, place: int, part: Payload, done: Callable[[], None]) -> None:
        self._call(lambda: self._begin(self._sum_column(operation, self._indices[place], part, done)))

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    # On the loop.

    async def _sum_column(self, operation: int, index: int, part: Payload, done: Callable[[], None]) -> None:
        try:
            if self._column is not None:
                await all_reduce(self._column, part, ("hosts", operation), priority=index)
        except Exception as error:  # noqa: BLE001 - passed to the waiter for the bucket, and to all other workers of this host
            self._member.abort(error)
            self._end(index, error)
        else:
            done()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work, name="sum of a slice over hosts")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, index: int, error: BaseException | None) -> None:
        settle(self._future(index), error)

    def _future(self, index: int) -> asyncio.Future[None]:
        """The future of a bucket and step, created on first use, by the sum or by its reader."""
        assert self._loop is not None
        return self._summed.setdefault(index, self._loop.create_future())
