"""What an FC server computes with: its fully connected layers, on a device, as the server sees them."""

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
    """One worker's part of a batch. Its tensors alias the transport's memory: read them, and drop them soon."""

    meta: ActivationsMeta
    tensors: tuple[Payload, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a turn has given."""

    loss: float | None
    compute_s: float
    gradients: tuple[tuple[Payload, ...], ...]
    """For each part, those of the activations that want one."""


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """What an FC server has, copied."""

    model: dict[str, Tensor]
    """By the names of the model's state dict."""
    more: dict[str, Tensor]
    """The optimizer's state, and whatever else goes on from there."""
    sidecar: dict[str, Value]


class Executor(Protocol):
    """The fully connected layers, on a device. One call at a time."""

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        """Forward, loss and backward of a group's micro-batch. The gradients of the parameters are added to the group's; where the
        loss is not finite and the run is to stop, nothing is."""
        ...

    async def update(self, applied: Applied) -> None:
        """One step of the optimizer with the mean of these groups' gradients, which are used up."""
        ...

    async def evaluate(self, part: BatchPart) -> list[float]:
        """The sums of the metrics over a batch."""
        ...

    async def state(self) -> ExecutorState:
        """For a checkpoint."""
        ...
