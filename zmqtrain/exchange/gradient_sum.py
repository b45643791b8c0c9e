"""Sums gradients over a group of workers, bucket by bucket, while backward goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.sums import Sums


class GradientSum:
    """One step at a time: `begin`, then `add` each bucket, then `wait` until all of them hold the sum over the group.

    ``overlap``: a bucket is on its way as soon as it is added; otherwise all of them once the last one is added.
    """

    def __init__(self, sums: Sums, recorder: Recorder, *, overlap: bool = True) -> None:
        self.sums = sums
        self._recorder = recorder
        self._overlap = overlap
        self._step = 0
        self._expected = 0
        self._added: list[Bucket] = []
        self._all_added = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, replica: Replica) -> None:
        """Once, before the first step."""
        await self.sums.start(replica)

    async def stop(self) -> None:
        """Once, after the last one."""
        await self.cancel()
        await self.sums.stop()

    def begin(self, step: int, buckets: Sequence[Bucket]) -> None:
        """Gradients of ``step`` come next, one for each of ``buckets``, in any order."""
        assert not self._tasks, "the step before was not waited for"
        self._step, self._expected = step, len(buckets)
        self._added.clear()
        self._all_added.clear()

    def add(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete; from now on they are ours."""
        self._added.append(bucket)
        complete = len(self._added) == self._expected
        if self._overlap:
            self._start(bucket)
        elif complete:
            for each in self._added:
                self._start(each)
        if complete:
            self._all_added.set()

    async def wait(self) -> None:
        """Until all buckets were added and hold their sums. Raises the first error; nothing is under way afterwards."""
        try:
            # With staging, the last buckets are handed over after the compute thread is done with the step.
            await self._all_added.wait()
            with self._recorder.span("wait for gradients", "wait", step=self._step):
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Give up what is under way. Errors of it are dropped: `wait` has raised the first, or nobody wants them any more."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, bucket: Bucket) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._sum(bucket, self._step)))

    async def _sum(self, bucket: Bucket, step: int) -> None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        await self.sums.sum(bucket, ("gradients", step, bucket.index))
        self._recorder.add_span(
            f"all-reduce bucket {bucket.index}", "send", start_s, clock(), step=step, values={"bytes": bucket.gradients.nbytes}
        )
