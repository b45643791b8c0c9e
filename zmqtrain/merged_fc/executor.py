"""What an FC server computes with: its fully connected layers on a device, behind an interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zmqtrain.merged_fc.messages import ActivationsMeta
from zmqtrain.merged_fc.queue import Applied, Turn
from zmqtrain.wire.payload import Payload, Value


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One worker's part of a batch. Its tensors alias the transport's memory: read them and release them soon."""

    meta: ActivationsMeta
    tensors: tuple[Payload, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a turn."""

    loss: float | None
    compute_s: float
    gradients: tuple[tuple[Payload, ...], ...]
    """For each part, the gradients of those activations that need one."""


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """A copy of an FC server's state."""

    model: dict[str, Tensor]
    """The model's state, by the names of its state dict."""
    more: dict[str, Tensor]
    """The optimizer's state, and everything else needed to continue."""
    sidecar: dict[str, Value]


class Executor(Protocol):
    """The fully connected layers on a device. One call at a time."""

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        """Forward, loss and backward of a group's micro-batch. The parameters' gradients are added to the group's, unless the loss
        is not finite and the run is to stop, or the turn does not count: then it leaves the layers as they are."""
        ...

    async def update(self, applied: Applied) -> None:
        """One step of the optimizer with the mean of these groups' gradients, which are then discarded."""
        ...

    async def evaluate(self, part: BatchPart) -> list[float]:
        """The sums of the metrics over a batch."""
        ...

    async def state(self) -> ExecutorState:
        """A copy of the state, for a checkpoint."""
        ...

    async def become(self, state: ExecutorState) -> None:
        """Have the state that another server had, when no gradients waited to be applied."""
        ...
