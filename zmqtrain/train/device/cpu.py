"""Torch on the CPU, in one compute thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zmqtrain.train.device.base import Staging

T = TypeVar("T")


class ComputeThread:
    """A daemon thread that calls functions one after another.

    Not a ThreadPoolExecutor, since the interpreter joins its threads at exit: a step that waits for a lost peer would hold the
    process back.
    """

    def __init__(self, name: str, first: Callable[[], None]) -> None:
        """``first`` is called in the thread before anything else."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._jobs.put(first)
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the last step's tensors
        self._ended.set()

    async def run(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def settle(setter: Callable[[Any], None], value: object) -> None:
            if not outcome.done():  # else the waiter was cancelled
                setter(value)

        def job() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed to the waiter, whatever it is
                report(outcome.set_exception, error)
            else:
                report(outcome.set_result, result)

        def report(setter: Callable[[Any], None], value: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, setter, value)

        self._jobs.put(job)
        return await outcome

    async def close(self, timeout_s: float) -> None:
        self._jobs.put(None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._ended.wait, timeout_s)


class CpuDevice:
    """Torch on the CPU; tensors lie in memory that the network reads and writes itself."""

    def __init__(self, threads: int = 0) -> None:
        """``threads``: how many threads torch may use; 0 leaves torch's own choice."""
        self.torch_device = torch.device("cpu")
        self.staging: Staging | None = None
        self._thread = ComputeThread("zmqtrain-compute", lambda: _use_threads(threads))

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.run(function)

    async def close(self, timeout_s: float) -> None:
        await self._thread.close(timeout_s)


def _use_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
