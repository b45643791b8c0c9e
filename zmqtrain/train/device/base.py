"""The seam between a worker and where its arithmetic happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.background import Background, Condition

T = TypeVar("T")


class Staging(Protocol):
    """Copies between the device's memory and the host's, which the network and the other processes of the host read and write.

    Copies run beside the arithmetic, those in one direction one after another, and never wait for those in the other.
    """

    def pin(self, tensor: Tensor) -> None:
        """Host memory, in whole pages, that will be copied from and to: the device may read and write it itself from now on.

        It stays where it is until the staging is closed. Raises `HostMemoryError`.
        """
        ...

    def to_host(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        """Begin to copy once what is queued on the device so far has run, and return at once; then call ``done`` (any thread).

        ``source`` must stay until then. Call what is returned to wait until it has been copied; it raises what has gone wrong.
        """
        ...

    def to_device(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        """Begin to copy at once, and return; nothing queued on the device may use ``target``. Any thread. ``done`` is called (any
        thread) once ``source`` may be written again.

        Call what is returned in the compute thread: what it queues from then on sees the new content.
        """
        ...

    def ahead(self, source: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a tensor in pinned memory to new memory of the device, and return at once. Any thread.

        Call what is returned in the compute thread: it gives the copy, for what is queued from then on."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued so far has run."""
        ...


class Device(Protocol):
    """One compute thread, and the memory that it computes in."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def staging(self) -> Staging | None:
        """None where the network can read the device's memory itself (CPU)."""
        ...

    def clock(self) -> float:
        """Seconds, on a clock that runs with the event loop's. May be read in the compute thread."""
        ...

    def background(self, name: str) -> Background:
        """Something that calls functions beside the compute thread."""
        ...

    def condition(self) -> Condition:
        """What the compute thread can wait at."""
        ...

    def watch(self, model: nn.Module, optimizer: Optimizer, sizes: Mapping[str, int] | None = None) -> None:
        """This model will be computed here. Called in the compute thread, before anything else looks at it.

        ``sizes``: parameters of each layer of the whole model, where ``model`` is a part of it."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the compute thread. One after another; a cancelled wait does not stop what runs already."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Wait for what runs, at most ``timeout_s``, and end the compute thread."""
        ...
