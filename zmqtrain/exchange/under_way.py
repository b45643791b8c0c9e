"""The pending exchanges of buckets, while the replica goes on computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from zmqtrain.exchange.base import Bucket
from zmqtrain.waiting import abandoned


class UnderWay:
    """One task per bucket and step::

        begin(step, buckets)        the step's buckets will come
        add(bucket)                 its exchange begins at once; without overlap, when all are there
        await all_added()           the step may end
        await settle()              nothing is under way any more
        await give_up(free)         the step counts nowhere: its buckets are free, also those to come

    An error of one task ends all: it is passed to ``abort``, and `all_added` and `settle` raise it from then on.
    """

    def __init__(
        self,
        exchange: Callable[[Bucket, int], Coroutine[Any, Any, None]],
        abort: Callable[[BaseException], None],
        *,
        overlap: bool = True,
    ) -> None:
        """``exchange(bucket, step)`` is called when the bucket's exchange begins, and its result becomes a task."""
        self.error: BaseException | None = None
        self._exchange, self._abort, self._overlap = exchange, abort, overlap
        self._step = 0
        self._missing = 0
        self._held_back: list[Bucket] = []
        self._complete = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], Bucket] = {}
        self._free: Callable[[Bucket], None] | None = None  # set while the step is given up

    def begin(self, step: int, buckets: int) -> None:
        """Begin ``step``, in which ``buckets`` buckets are exchanged."""
        assert not self._missing, f"{self._missing} buckets of step {self._step} were not added"
        self._step, self._missing, self._free = step, buckets, None
        self._complete.clear()

    def add(self, bucket: Bucket) -> None:
        """The bucket belongs to the exchange from now on."""
        self._missing -= 1
        if self._free is not None:
            self._free(bucket)
        else:
            self._held_back.append(bucket)
        if self._overlap or not self._missing:
            begun, self._held_back = self._held_back, []
            for each in begun:
                self._start(each)
        if not self._missing:
            self._complete.set()

    async def all_added(self) -> None:
        """Wait until all buckets of the step were added. Raises the first error.

        Devices with memory of their own hand the last buckets over after the compute thread has finished the step.
        """
        if self.error is None:
            await self._complete.wait()
        if self.error is not None:
            raise self.error

    async def settle(self) -> None:
        """Wait until nothing is pending. Raises the first error."""
        while self._tasks and self.error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        if self.error is not None:
            raise self.error

    def give_up(self, free: Callable[[Bucket], None]) -> Coroutine[Any, Any, None]:
        """Abandon all pending exchanges, and those of the step's buckets that are still to come. ``free(bucket)`` is called once
        nothing is done with a bucket any more. Takes effect at once; what it returns must be awaited."""
        self._free = free
        held_back, self._held_back = self._held_back, []
        begun = dict(self._tasks)
        for task in begun:
            task.cancel()
        return _freed(begun, [*begun.values(), *held_back], free)

    async def cancel(self) -> None:
        """Abandon all pending exchanges."""
        await abandoned(self._tasks)
        self._tasks.clear()
        self._held_back.clear()
        self._missing = 0

    def fail(self, error: BaseException) -> None:
        """Something failed outside the exchanges: end them all with ``error``."""
        if self.error is None:
            self.error = error
            for task in self._tasks:
                task.cancel()
            self._complete.set()
            self._abort(error)

    def _start(self, bucket: Bucket) -> None:
        if self.error is not None:
            return
        name = f"exchange of bucket {bucket.index} in step {self._step}"
        task = asyncio.get_running_loop().create_task(self._exchange(bucket, self._step), name=name)
        self._tasks[task] = bucket
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


async def _freed(tasks: Collection[asyncio.Task[None]], buckets: Collection[Bucket], free: Callable[[Bucket], None]) -> None:
    await abandoned(tasks)
    for bucket in buckets:
        free(bucket)
