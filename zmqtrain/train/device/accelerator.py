"""The calls that zmqtrain makes on a device with memory of its own. CUDA implements them, and so does a stand-in in the tests.

Everything built on them (copies beside the arithmetic, random states, tensors of other devices in collectives) is the same code
for all devices, so what works on the stand-in works on a GPU, apart from the lines of `zmqtrain.train.device.cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from zmqtrain.errors import UsageError


class Event(Protocol):
    """A point in a stream of work."""

    def record(self, stream: Stream) -> object:
        """Mark the point after everything that is queued on the stream now."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before the point has run, without occupying a processor. Any thread. Raises the device's errors."""
        ...


class Stream(Protocol):
    """Work that a device does in order, concurrently with other streams."""

    def wait_event(self, event: Event) -> None:
        """Work queued from now on runs after the event. Returns at once."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work has run."""
        ...


class Accelerator(Protocol):
    """A kind of device, such as CUDA."""

    def count(self) -> int:
        """The number of devices here; 0 if there is none, or no driver. Must not be called before the process forks."""
        ...

    def use(self, device: torch.device) -> None:
        """Make ``device`` the default device of this thread."""
        ...

    def stream(self, device: torch.device) -> Stream:
        """Create a stream of the device."""
        ...

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread's arithmetic is queued; in an autograd hook, the stream on which gradients are
        computed."""
        ...

    def event(self) -> Event:
        """Create an event of the device."""
        ...

    def copy(self, source: Tensor, target: Tensor, stream: Stream) -> None:
        """Queue a copy of ``source`` to ``target`` (same shape and dtype) on the stream.

        It returns at once if the host's side is pinned. Neither tensor may be freed before the copy ends."""
        ...

    def move(self, source: Tensor, device: torch.device, stream: Stream) -> Tensor:
        """Queue a copy of ``source``, in host memory, to new memory of the device that belongs to the stream. Returns the copy."""
        ...

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """After the tensor is freed, its memory is not reused before the work now queued on this stream has run."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until all streams have run."""
        ...

    def pin(self, tensor: Tensor, device: torch.device) -> bool:
        """Let the device read and write the host memory of ``tensor`` directly. Returns False if it already could. Raises
        `HostMemoryError`."""
        ...

    def unpin(self, tensor: Tensor) -> None:
        """Unregister memory that `pin` has registered."""
        ...

    def random_state(self, device: torch.device) -> Tensor:
        """The state of the device's generator, as uint8 in host memory."""
        ...

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """Restore what `random_state` returned."""
        ...


def _cuda() -> Accelerator:
    from zmqtrain.train.device.cuda import Cuda

    return Cuda()


#: Keyed by torch's name of the device type.
KINDS: dict[str, Callable[[], Accelerator]] = {"cuda": _cuda}


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator that drives ``device``; None for the CPU. Raises `UsageError` if tensors cannot be copied to such devices."""
    if device.type == "cpu":
        return None
    if device.type not in KINDS:
        raise UsageError(
            f"a model on {device} cannot be trained: supported devices are cpu and {', '.join(KINDS)}; move the model to one of "
            "them"
        )
    return KINDS[device.type]()
