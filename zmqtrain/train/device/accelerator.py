"""What a device with memory of its own gives: a small table of calls, which CUDA implements, and a stand-in in the tests.

All that is built on it (copies beside the arithmetic, random states, tensors of other devices in collectives) is the same code for
all of them, so what runs on the stand-in runs on a GPU but for the lines of `zmqtrain.train.device.cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from zmqtrain.errors import UsageError


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Stream) -> object:
        """Be the point behind all that is queued on the stream now."""
        ...

    def synchronize(self) -> None:
        """Wait until what is before it has run, without using a processor meanwhile. Any thread. Raises what has gone wrong."""
        ...


class Stream(Protocol):
    """Work that a device does in order, beside that of other streams."""

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after what is before the event. Returns at once."""
        ...

    def synchronize(self) -> None:
        """Wait until all that is queued has run."""
        ...


class Accelerator(Protocol):
    """A kind of device."""

    def count(self) -> int:
        """How many there are here; 0 where there is none, or no driver. Must not be asked before a process forks."""
        ...

    def use(self, device: torch.device) -> None:
        """What this thread does without naming a device is done on this one."""
        ...

    def stream(self, device: torch.device) -> Stream:
        """A new one."""
        ...

    def current(self, device: torch.device) -> Stream:
        """The one on which this thread's arithmetic is queued; in a hook of autograd the one on which gradients are made."""
        ...

    def event(self) -> Event:
        """A new one."""
        ...

    def copy(self, source: Tensor, target: Tensor, stream: Stream) -> None:
        """Queue a copy on the stream. It returns at once where the host's side is pinned. Neither may be freed before it ends."""
        ...

    def move(self, source: Tensor, device: torch.device, stream: Stream) -> Tensor:
        """Queue a copy of host memory to new memory of the device, which belongs to the stream."""
        ...

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Once it is dropped, the tensor's memory is used again only when what is queued on this stream, too, has run."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until all streams have run."""
        ...

    def pin(self, tensor: Tensor, device: torch.device) -> bool:
        """Let the device read and write this memory of the host itself. False where it could already. Raises `HostMemoryError`."""
        ...

    def unpin(self, tensor: Tensor) -> None:
        """Take that back."""
        ...

    def random_state(self, device: torch.device) -> Tensor:
        """Of the device's generator, as bytes in the host's memory."""
        ...

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """What `random_state` gave."""
        ...


def _cuda() -> Accelerator:
    from zmqtrain.train.device.cuda import Cuda

    return Cuda()


#: By torch's name for the type of device.
KINDS: dict[str, Callable[[], Accelerator]] = {"cuda": _cuda}


def accelerator_of(device: torch.device) -> Accelerator | None:
    """What drives the device; None for the CPU. Raises `UsageError` where tensors cannot travel from and to such devices."""
    if device.type == "cpu":
        return None
    if device.type not in KINDS:
        raise UsageError(f"a model on {device} cannot be trained: there are cpu and {', '.join(KINDS)}; move it there first")
    return KINDS[device.type]()
