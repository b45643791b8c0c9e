"""Torch on a CUDA device: copies to and from pinned host memory run beside the arithmetic."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from zmqtrain.data.background import BackgroundThread
from zmqtrain.train.device.threads import RealThreads

T = TypeVar("T")


class CudaStaging:
    """Copies by way of pinned memory. Gradients leave on a stream of their own, while backward goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="zmqtrain-copies", daemon=True).start()

    def host_memory(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def to_host(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> None:
        # The stream that is current here is the one on which the gradients are made (autograd sets it in its own threads, too).
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._outgoing):
            self._outgoing.wait_event(made)
            target.copy_(source, non_blocking=True)
            copied.record(self._outgoing)
        self._copies.put((copied, done))

    def to_device(self, source: Tensor, target: Tensor) -> None:
        # On the stream of the arithmetic, so in order with it. What it queues later waits for this copy, and `to_host` waits for
        # that, so `source` is free again before the exchange writes it next.
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._copies.put(None)

    def _watch(self) -> None:
        """Call ``done`` of copies in the order in which they were begun."""
        torch.cuda.set_device(self._device)
        while (copy := self._copies.get()) is not None:
            copied, done = copy
            copied.synchronize()
            done()


class CudaDevice(RealThreads):
    """One CUDA device, driven by one compute thread."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self.staging = CudaStaging(self.torch_device)
        self._thread = BackgroundThread("zmqtrain-compute", lambda: torch.cuda.set_device(self.torch_device))

    async def run(self, function: Callable[[], T]) -> T:
        return await self._thread.submit(function)

    async def close(self, timeout_s: float) -> None:
        await self._thread.close(timeout_s)
        self.staging.close()
