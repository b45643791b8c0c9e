"""The seam to layers that a worker does not compute itself: another process has those behind its own (`zmqtrain.merged_fc`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zmqtrain.train.device.modelled import Waited

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from zmqtrain.data.batch import Batch
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.evaluate import Evaluation, EvaluationSettings
    from zmqtrain.train.replica import TorchReplica
    from zmqtrain.train.step import StepSettings
    from zmqtrain.train.task import Task
    from zmqtrain.train.work import StepResult


class Step(Protocol):
    """Forward and backward of a batch, in the compute thread."""

    def __call__(self, step: int, batch: Batch, *, hand_over: bool = True, group_batch: float | None = None) -> StepResult:
        """See `zmqtrain.train.step.TrainStep`."""
        ...


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """What a worker computes itself."""

    model: nn.Module
    """Maps the model's inputs to the activations that leave."""
    optimizer: Optimizer
    """All parameter groups of the task's, with this model's parameters alone."""
    schedule: LRScheduler | None
    sizes: Mapping[str, int]
    """Parameters of each layer of the whole model, by the layer's name."""


class RemoteLayers(Protocol):
    """A worker's side of them, with torch. `build`, and the step and the evaluation that are made, run in the compute thread; all
    coroutines, `make_step` and `make_evaluation` on the loop's."""

    def build(self, task: Task, device: Device) -> OwnLayers:
        """Build the task's model, with torch seeded, without the remote layers. Raises `TaskError`, and `UsageError` for a task or
        model for which there can be no remote layers."""
        ...

    def make_step(self, task: Task, replica: TorchReplica, device: Device, settings: StepSettings) -> Step:
        """The training step through both. Raises `UsageError` where these settings cannot be right with remote layers."""
        ...

    def make_evaluation(self, task: Task, replica: TorchReplica, device: Device, settings: EvaluationSettings) -> Evaluation: ...

    async def keep(self, step: int, *, save: bool) -> None:
        """Have the remote layers kept at ``step`` as they are now; ``save``: in a checkpoint, too."""
        ...

    async def state(self, step: int) -> Mapping[str, Tensor]:
        """The part of the model's state that was kept at ``step``, by the names of the whole model's state dict."""
        ...

    async def hold(self, held: bool) -> None:
        """Let nobody train the remote layers while this worker's group evaluates; then again."""
        ...

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``. From any thread."""
        ...

    async def close(self) -> None:
        """Give up what is under way; this worker needs the remote layers no more."""
        ...


class ModelledRemoteLayers(Protocol):
    """A worker's side of them, on a modelled device."""

    async def __call__(self, step: int, samples: int, sent: Callable[[], Awaitable[None]]) -> Waited:
        """Have a batch computed; ``sent`` is called once everything is on its way."""
        ...

    async def close(self) -> None:
        """This worker needs the remote layers no more."""
        ...
