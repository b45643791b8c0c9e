"""Torch on a device with memory of its own: copies to and from pinned host memory run beside the arithmetic."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from zmqtrain.data.background import BackgroundThread
from zmqtrain.train.device.accelerator import Accelerator, Event
from zmqtrain.train.device.threads import RealThreads

T = TypeVar("T")


class StreamStaging:
    """Copies through pinned memory, which may be the host's shared memory: a worker's gradients are copied directly to where they
    are summed, and the sums directly back. Each direction has a stream of its own, and so have batches."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device
        self._outgoing, self._incoming = _Direction(accelerator, device, "out"), _Direction(accelerator, device, "in")
        self._batches = accelerator.stream(device)
        self._pinned: list[Tensor] = []

    def pin(self, tensor: Tensor) -> None:
        if tensor.nbytes and self._accelerator.pin(tensor, self._device):
            self._pinned.append(tensor)

    def to_host(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        # The current stream here is the one on which the gradients are computed (autograd sets it in its own threads, too).
        made = self._accelerator.event()
        made.record(self._accelerator.current(self._device))
        return self._outgoing.copy(source, target, done, after=made).synchronize

    def to_device(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        copied = self._incoming.copy(source, target, done)
        return lambda: self._accelerator.current(self._device).wait_event(copied)

    def ahead(self, source: Tensor) -> Callable[[], Tensor]:
        # The memory belongs to this stream, so nothing that is queued elsewhere can be using it.
        copy, copied = self._accelerator.move(source, self._device, self._batches), self._accelerator.event()
        copied.record(self._batches)

        def take() -> Tensor:
            current = self._accelerator.current(self._device)
            current.wait_event(copied)
            self._accelerator.keep(copy, current)
            return copy

        return take

    def synchronize(self) -> None:
        self._accelerator.synchronize(self._device)

    def close(self) -> None:
        """Wait for all copies, end what makes them, and release pinned memory."""
        self.synchronize()
        self._outgoing.close()
        self._incoming.close()
        while self._pinned:
            self._accelerator.unpin(self._pinned.pop())


class _Direction:
    """Copies in one direction, and a thread that reports the end of each."""

    def __init__(self, accelerator: Accelerator, device: torch.device, name: str) -> None:
        self._accelerator, self._device = accelerator, device
        self._stream = accelerator.stream(device)
        self._copies: queue.SimpleQueue[tuple[Event, Callable[[], None], Tensor] | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._error: BaseException | None = None
        threading.Thread(target=self._watch, name=f"zmqtrain-copies-{name}", daemon=True).start()

    def copy(self, source: Tensor, target: Tensor, done: Callable[[], None], *, after: Event | None = None) -> Event:
        if self._error is not None:  # the thread that would report the end of this copy has failed
            raise self._error
        copied = self._accelerator.event()
        with self._order:
            if after is not None:
                self._stream.wait_event(after)
            self._accelerator.copy(source, target, self._stream)
            copied.record(self._stream)
            self._copies.put((copied, done, source))  # keeps source, so that its memory is not reused before the copy ends
        return copied

    def close(self) -> None:
        self._copies.put(None)

    def _watch(self) -> None:
        """Call ``done`` of each copy, in the order in which they were begun."""
        try:
            self._accelerator.use(self._device)
            while (copy := self._copies.get()) is not None:
                copied, done, _ = copy
                copied.synchronize()
                done()
                del copy, _
        except BaseException as error:
            self._error = error
            raise


class AcceleratorDevice(RealThreads):
    """One device, driven by one compute thread, in which it is also started, since that takes seconds."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        super().__init__()
        self._accelerator, self.torch_device = accelerator, device
        self._thread = BackgroundThread("zmqtrain-compute", lambda: accelerator.use(device))

    @cached_property
    def staging(self) -> StreamStaging:
        """Made on first use."""
        return StreamStaging(self._accelerator, self.torch_device)

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.submit(function)

    async def close(self, timeout_s: float) -> None:
        if "staging" in self.__dict__:
            closed = self._thread.submit(self.staging.close)
            # This runs after the current call, which may never end; a failed device has already raised where it was used.
            with suppress(TimeoutError, RuntimeError):
                await asyncio.wait_for(closed, timeout_s)
        await self._thread.close(timeout_s)
