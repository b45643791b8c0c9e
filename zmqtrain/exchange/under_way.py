"""The exchanges of buckets that are under way while the replica computes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from zmqtrain.exchange.base import Bucket


class UnderWay:
    """One task a bucket and step::

        begin(step, buckets)        the step's buckets will come
        add(bucket)                 its exchange begins at once; without overlap, when all are there
        await all_added()           the step may end
        await settle()              nothing is under way any more

    An error of one ends all: it goes to ``abort``, and is raised by `all_added` and `settle` from then on.
    """

    def __init__(
        self,
        exchange: Callable[[Bucket, int], Coroutine[Any, Any, None]],
        abort: Callable[[BaseException], None],
        *,
        overlap: bool = True,
    ) -> None:
        """``exchange(bucket, step)`` is called when the bucket's exchange begins, and what it returns becomes a task."""
        self.error: BaseException | None = None
        self._exchange, self._abort, self._overlap = exchange, abort, overlap
        self._step = 0
        self._missing = 0
        self._held_back: list[Bucket] = []
        self._complete = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, step: int, buckets: int) -> None:
        """Begin ``step``, in which ``buckets`` buckets are exchanged."""
        assert not self._missing, f"{self._missing} buckets of step {self._step} were not added"
        self._step, self._missing = step, buckets
        self._complete.clear()

    def add(self, bucket: Bucket) -> None:
        """The bucket is the exchange's from now on."""
        self._missing -= 1
        self._held_back.append(bucket)
        if self._overlap or not self._missing:
            begun, self._held_back = self._held_back, []
            for each in begun:
                self._start(each)
        if not self._missing:
            self._complete.set()

    async def all_added(self) -> None:
        """Until all buckets of the step were added. Raises the first error.

        Devices with memory of their own hand the last buckets over after the compute thread is through with the step.
        """
        if self.error is None:
            await self._complete.wait()
        if self.error is not None:
            raise self.error

    async def settle(self) -> None:
        """Until nothing is under way. Raises the first error."""
        while self._tasks and self.error is None:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        if self.error is not None:
            raise self.error

    async def cancel(self) -> None:
        """Give up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()
        self._held_back.clear()
        self._missing = 0

    def fail(self, error: BaseException) -> None:
        """Something outside went wrong: nothing goes on."""
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
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
