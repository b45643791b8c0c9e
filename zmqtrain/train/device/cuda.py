"""Torch on a CUDA device: copies to and from pinned host memory run beside the arithmetic."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from zmqtrain.data.background import BackgroundThread
from zmqtrain.errors import HostMemoryError
from zmqtrain.train.device.threads import RealThreads

T = TypeVar("T")
#: ``cudaHostRegisterPortable``: pinned for every context of the process.
_PORTABLE = 1


class CudaStaging:
    """Copies by way of pinned memory, which may be the host's shared memory: a worker's gradients go straight to where they are
    summed, and the sums straight back. Each direction has a stream of its own, and so have batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing, self._incoming = _Stream(device, "out"), _Stream(device, "in")
        self._batches = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: list[Tensor] = []

    def pin(self, tensor: Tensor) -> None:
        if not tensor.nbytes or tensor.is_pinned():
            return
        with torch.cuda.device(self._device):
            error = _runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
        if int(error):
            raise HostMemoryError(
                f"CUDA cannot pin {tensor.nbytes / 1e6:.1f} MB of host memory ({error}): is locked memory limited (ulimit -l)?"
            )
        self._pinned.append(tensor)

    def to_host(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        # The stream that is current here is the one on which the gradients are made (autograd sets it in its own threads, too).
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(torch.cuda.current_stream(self._device))
        return self._outgoing.copy(source, target, done, after=made).synchronize

    def to_device(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        copied = self._incoming.copy(source, target, done)
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def ahead(self, source: Tensor) -> Callable[[], Tensor]:
        # The memory belongs to this stream, so what is queued elsewhere cannot be using it; and torch keeps the source.
        with torch.cuda.stream(self._batches):
            copy = source.to(self._device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._batches)

        def take() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            copy.record_stream(current)  # once it is dropped, its memory is free only after what is queued here has run
            return copy

        return take

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Nothing is copied any more."""
        self.synchronize()
        self._outgoing.close()
        self._incoming.close()
        while self._pinned:
            _runtime().cudaHostUnregister(self._pinned.pop().data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Stream:
    """Copies in one direction, and a thread that tells when each is done."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        threading.Thread(target=self._watch, name=f"zmqtrain-copies-{name}", daemon=True).start()

    def copy(
        self, source: Tensor, target: Tensor, done: Callable[[], None], *, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._order, torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            copied.record(self._stream)
            self._copies.put((copied, done))
        return copied

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
