"""Sums gradients over workers, bucket by bucket, while backward goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.sums import Sums
from zmqtrain.exchange.under_way import UnderWay


class GradientSum:
    """One step at a time: `begin`, then `add` each bucket, then `wait` until all of them hold their sums (or let ``summed``
    continue).

    An error of one bucket ends all (`UnderWay`).
    """

    def __init__(
        self,
        sums: Sums,
        recorder: Recorder,
        abort: Callable[[BaseException], None],
        *,
        overlap: bool = True,
        summed: Callable[[Bucket], None] | None = None,
    ) -> None:
        """
        Args:
            abort: gets the first error, as does ``sums``.
            overlap: a bucket is sent as soon as it is added; otherwise all of them are once the last one is added.
            summed: called with each bucket once it holds its sum.
        """
        self._sums, self._recorder, self._summed = sums, recorder, summed
        self._under_way = UnderWay(self._sum, abort, overlap=overlap)
        self._step = 0

    async def start(self, replica: Replica) -> None:
        """Call it once, before the first step."""
        await self._sums.start(replica)

    async def stop(self) -> None:
        """Call it once, after the last step. Pending sums are abandoned."""
        await self._under_way.cancel()
        await self._sums.stop()

    def begin(self, step: int, buckets: int) -> None:
        """Begin ``step``, whose gradients come in ``buckets`` buckets."""
        self._step = step
        self._under_way.begin(step, buckets)

    def add(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete and belong to this object from now on."""
        self._under_way.add(bucket)

    async def all_added(self) -> None:
        """Wait until all buckets of the step were added. Raises the first error."""
        await self._under_way.all_added()

    async def wait(self) -> None:
        """Wait until all buckets were added and hold their sums. Raises the first error."""
        await self.all_added()
        with self._recorder.span("wait for gradients", "wait", step=self._step):
            await self.settle()

    async def settle(self) -> None:
        """Wait until nothing is pending. Raises the first error."""
        await self._under_way.settle()

    async def _sum(self, bucket: Bucket, step: int) -> None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        await self._sums.sum(bucket, ("gradients", step, bucket.index))
        self._recorder.add_span(
            f"all-reduce bucket {bucket.index}", "send", start_s, clock(), step=step, values={"bytes": bucket.gradients.nbytes}
        )
        if self._summed is not None:
            self._summed(bucket)
