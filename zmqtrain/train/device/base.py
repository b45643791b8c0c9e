"""The interface between a worker and the place where its arithmetic happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.background import Background, Condition

T = TypeVar("T")


class Staging(Protocol):
    """Copies between the device's memory and host memory, which the network and the host's other processes read and write.

    Copies run concurrently with the arithmetic. Those in one direction run one after another and never wait for the other
    direction.
    """

    def pin(self, tensor: Tensor) -> None:
        """Let the device read and write this host memory directly from now on. The memory must be whole pages.

        It must stay allocated until the staging is closed. Raises `HostMemoryError`.
        """
        ...

    def to_host(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        """Copy ``source`` (device) to ``target`` (host), after everything now queued on the device. Returns at once.

        ``done`` is called in any thread after the copy; ``source`` must not change until then. The returned function waits for the
        copy, and raises its error.
        """
        ...

    def to_device(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        """Copy ``source`` (host) to ``target`` (device), starting now. Returns at once; may be called in any thread.

        Nothing that is queued on the device may use ``target``. ``done`` is called in any thread as soon as ``source`` may be
        written again. Call the returned function in the compute thread: work that it queues afterwards sees the new content.
        """
        ...

    def ahead(self, source: Tensor) -> Callable[[], Tensor]:
        """Start to copy a tensor in pinned memory to new memory of the device. Returns at once; may be called in any thread.

        Call the returned function in the compute thread: it returns the copy, for work queued afterwards."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued before this call has run."""
        ...


class Device(Protocol):
    """One compute thread, and the memory that it computes in."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def staging(self) -> Staging | None:
        """None if the network can read the device's memory directly (CPU)."""
        ...

    def clock(self) -> float:
        """Seconds, on the event loop's clock. May be read in the compute thread."""
        ...

    def background(self, name: str) -> Background:
        """A thread, or on virtual time its replacement, that calls functions beside the compute thread."""
        ...

    def condition(self) -> Condition:
        """A condition at which the compute thread can wait."""
        ...

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sizes: Mapping[str, int] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Announce a model that will be computed here. Called in the compute thread, before anything else uses the model.

        ``sizes``: the number of parameters of each layer of the whole model, if ``model`` is a part of it. ``shares``: which
        part of a layer's work is done here, where that does not follow from its parameters."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the compute thread, after all earlier calls. Cancelling the wait does not stop a call that has
        begun."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Wait for the running call, at most ``timeout_s`` seconds, and end the compute thread."""
        ...
