"""Between a thread of plain code and the event loop.

The plain code waits for coroutines that run on the loop; meanwhile the loop may ask for something to be computed (a local update
of the model, say), and that is computed in the waiting thread. So all of torch's work stays in the one thread that the user's
loop runs in, with its CUDA stream and its settings.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import torch

from zmqtrain.errors import PeerTimeoutError, UsageError
from zmqtrain.train.device.base import Staging
from zmqtrain.train.device.threads import RealThreads

T = TypeVar("T")


class Crossing:
    """Made on the loop's thread. One thread at a time may `wait`; what is computed there may wait in its turn."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: above all time-outs that the coroutines have of their own; it only bites where the loop itself hangs."""
        self.loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | object] = queue.SimpleQueue()
        self._ended: set[object] = set()  # waits whose end came while another one waited

    def check_thread(self, what: str) -> None:
        """Raise `UsageError` on the loop's own thread, which must never wait for itself."""
        if threading.get_ident() == self._loop_thread:
            raise UsageError(f"{what} waits for the network, so it cannot run on the event loop: use `await session.run(function)`")

    def wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """The coroutine's result. The calling thread computes what `run` asks for meanwhile; a KeyboardInterrupt cancels."""
        try:
            self.check_thread(what)
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except BaseException:
            coroutine.close()
            raise
        end = object()
        future.add_done_callback(lambda _: self._jobs.put(end))
        try:
            while end not in self._ended and (job := self._jobs.get(timeout=self._timeout_s)) is not end:
                if callable(job):
                    job()
                else:  # the end of a wait around this one; or of an earlier one, that was interrupted
                    self._ended.add(job)
        except queue.Empty:
            future.cancel()
            raise PeerTimeoutError("the event loop", what, self._timeout_s) from None
        except BaseException:
            future.cancel()
            raise
        self._ended.discard(end)
        return future.result()

    async def run(self, function: Callable[[], T]) -> T:
        """Compute ``function`` in the thread that waits. On the loop's thread, from within a coroutine that is waited for."""
        outcome: asyncio.Future[T] = self.loop.create_future()

        def settle(setter: Callable[[Any], None], value: object) -> None:
            if not outcome.done():
                setter(value)

        def job() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed to the coroutine, whatever it is
                self.loop.call_soon_threadsafe(partial(settle, outcome.set_exception, error))
            else:
                self.loop.call_soon_threadsafe(partial(settle, outcome.set_result, result))

        self._jobs.put(job)
        return await outcome


class CallersDevice(RealThreads):
    """A `Device` whose compute thread is the user's own."""

    def __init__(self, crossing: Crossing, torch_device: torch.device, staging: Staging | None) -> None:
        super().__init__()
        self._crossing = crossing
        self.torch_device = torch_device
        self.staging = staging

    async def run(self, function: Callable[[], T]) -> T:
        return await self._crossing.run(function)

    async def close(self, timeout_s: float) -> None:
        return None
