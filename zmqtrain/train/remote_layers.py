"""The interface to layers that a worker does not compute itself: another process has the layers after its own (`merged_fc`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zmqtrain.train.device.modelled import Waited

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from zmqtrain.data.batch import Batch
    from zmqtrain.membership.alike import Facts
    from zmqtrain.train.adapted_schedule import Schedule
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.evaluate import Evaluation, EvaluationSettings
    from zmqtrain.train.replica import TorchReplica
    from zmqtrain.train.step import StepSettings
    from zmqtrain.train.task import Task
    from zmqtrain.train.work import StepResult


class RemoteStep(Protocol):
    """Forward and backward of a batch, in the compute thread."""

    def __call__(
        self,
        step: int,
        batch: Batch,
        *,
        hand_over: bool = True,
        group_batch: float | None = None,
        group_samples: int | None = None,
    ) -> StepResult:
        """See `zmqtrain.train.step.TrainStep`."""
        ...


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """The layers that a worker computes itself."""

    model: nn.Module
    """Maps the model's inputs to the activations that are sent."""
    optimizer: Optimizer
    """All parameter groups of the task's optimizer, with only this model's parameters."""
    schedule: Schedule | None
    sizes: Mapping[str, int]
    """The number of parameters of each layer of the whole model, by the layer's name."""
    facts: Facts
    """What all workers, and those who compute the other layers, must have alike of the whole model."""


class RemoteLayers(Protocol):
    """A worker's side of remote layers, with torch. `build`, and the step and the evaluation that are made, run in the compute
    thread; all coroutines, `make_step` and `make_evaluation` run on the loop's thread."""

    def build(self, task: Task, device: Device) -> OwnLayers:
        """Seed torch, and build the task's model without the remote layers. Raises `TaskError`, and `UsageError` if the task or the
        model does not allow remote layers."""
        ...

    def make_step(self, task: Task, replica: TorchReplica, device: Device, settings: StepSettings) -> RemoteStep:
        """The training step through own and remote layers. Raises `UsageError` if these settings do not work with remote layers."""
        ...

    def make_evaluation(self, task: Task, replica: TorchReplica, device: Device, settings: EvaluationSettings) -> Evaluation: ...

    def begin_step(self, step: int) -> None:
        """The batch of this step is the next one that is trained. Called at the moment at which the exchange begins the step."""
        ...

    async def keep(self, step: int, *, save: bool) -> None:
        """Have the current state of the remote layers kept for ``step``. ``save``: in a checkpoint, too."""
        ...

    async def state(self, step: int) -> Mapping[str, Tensor]:
        """The part of the model's state that was kept for ``step``, by the names of the whole model's state dict."""
        ...

    async def hold(self, held: bool) -> None:
        """``held``: stop all training of the remote layers while this worker's group evaluates. Otherwise: let it continue."""
        ...

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``. May be called in any thread."""
        ...

    async def close(self) -> None:
        """Abandon any pending work; this worker no longer needs the remote layers."""
        ...


class ModelledRemoteLayers(Protocol):
    """A worker's side of remote layers on a modelled device."""

    def begin_step(self, step: int) -> None:
        """See `RemoteLayers.begin_step`."""
        ...

    async def __call__(self, step: int, samples: int, sent: Callable[[], Awaitable[None]]) -> Waited:
        """Have a batch computed. ``sent`` is called once everything has been sent."""
        ...

    async def close(self) -> None:
        """This worker no longer needs the remote layers."""
        ...
