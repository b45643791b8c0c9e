"""One training step of one worker, in the compute thread."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from zmqtrain.data.batch import Batch
from zmqtrain.data.nested import leaves
from zmqtrain.errors import NonFiniteLossError, TaskError
from zmqtrain.events import Recorder
from zmqtrain.parallel.loss_value import no_loss
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.placed.tensor import Placed
from zmqtrain.train.device.base import Device
from zmqtrain.train.divided import DividedShare, share_of_model
from zmqtrain.train.loss_graph import PICKED, picks_samples
from zmqtrain.train.loss_trial import Constants, Trials, counts_of
from zmqtrain.train.losses import Losses
from zmqtrain.train.own_samples import require_unchanged, versions_of
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.task import Measure, user_code
from zmqtrain.train.unreached import unreached_warning
from zmqtrain.train.weighting import (
    LOSSES_TRIED,
    WEIGHTED,
    WeightSums,
    depends_beside_rows,
    ignores,
    mean_of,
    of_model,
    parted,
    require_all_rows,
    require_mean,
    require_mean_of_model,
    require_mean_on_grid,
    require_none_ignored,
    require_none_ignored_by_model,
    require_same_counts,
    require_weight,
)
from zmqtrain.train.work import StepResult

Precision = Literal["float32", "bfloat16", "float16"]
#: If looking at targets means waiting for the device, it is done only in this many first steps.
STEPS_LOOKED_AT = 10


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a worker computes a step."""

    rank: int
    group_batch: int
    """Samples of the whole group in a step: the worker's gradient is weighted by its share of them."""
    accumulate: int = 1
    every: int = 1
    """Steps whose gradients are added up before they are handed over."""
    precision: Precision = "float32"
    on_nan: Literal["stop", "continue"] = "stop"
    shared: bool = False
    """Whether parameters must be the same on several processes, so that a forward may not change them."""
    blind: str = ""
    """Why gradients cannot show that no backward has reached a parameter, in words; empty if they can."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """A context that computes in ``precision`` where that is safe; parameters keep their type."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


class TrainStep:
    """Forward and backward over a batch, divided into micro-batches.

    The loss of n samples counts n / (the group's batch), so that the *sum* of a group's gradients is the gradient of its mean loss.
    """

    def __init__(
        self,
        replica: TorchReplica,
        loss: Measure,
        device: Device,
        settings: StepSettings,
        recorder: Recorder,
        weights: WeightSums | None = None,
    ) -> None:
        """``weights``: for losses that return (sum, weight); without, they are refused, and losses are taken for means."""
        self._replica, self._loss, self._settings, self._recorder = replica, loss, settings, recorder
        self._device, self._clock = device.torch_device, device.clock
        self._share = share_of_model(replica.model, settings.group_batch, loss)
        self._weights = weights
        self._weighted = False
        divides = (weights is not None and weights.shared) or settings.accumulate > 1
        self._looks = ignores(loss) and divides
        self._models = False  # the model computes the loss
        self._watches = settings.shared  # the first forward
        self._divides = divides and weights is not None
        self._trials = Trials(LOSSES_TRIED)
        self._weights_tried = 0
        self._counts: list[tuple[str, float]] = []  # of the last loss that was tried
        self._constants: Constants | None = None  # of the last loss that a divided model computed
        self._looked = settings.rank != 0 or not settings.blind  # whether unreached parameters have been checked
        self._losses = Losses(device.staging, settings.rank, settings.accumulate, stop=settings.on_nan == "stop")

    def __call__(
        self,
        step: int,
        batch: Batch,
        *,
        hand_over: bool = True,
        group_batch: float | None = None,
        group_samples: int | None = None,
    ) -> StepResult:
        """Compute a step. Without ``hand_over`` gradients are only accumulated. ``group_batch``: this step's, by which gradients
        are divided, if it differs. ``group_samples``: the samples that this worker's group has in it, if these differ.

        Raises `NonFiniteLossError` before anything of the step has left the worker or changed a parameter (on a CPU, before the
        backward of the micro-batch in question), and `TaskError`."""
        start = self._clock()
        replica, settings = self._replica, self._settings
        divisor = group_batch or settings.group_batch
        replica.model.train()
        replica.begin_step(step)
        self._share.waited_s()  # discards waits during evaluations
        losses = self._losses.of_step(step)
        replica.sound = losses.sound
        self._look(step, batch)
        parts = batch.to(self._device).split(settings.accumulate)
        for number, part in enumerate(parts):
            with self._recorder.span("forward", "compute", step=step):
                self._share.begin(step, number, len(parts), group_samples)
                loss, total, times, counted = self._forward(part)
                losses.add(loss, counted, wait=not hand_over)
            if number == 0:  # the forward has waited for the previous step, so its gradient has been judged
                loss_scale = replica.loss_scale.value if replica.loss_scale else 1.0
                scale, replica.divisor = loss_scale / divisor, loss_scale
            if self._weighted and number == len(parts) - 1:
                self._weigh(step, scale, hand_over)
            replica.begin_backward(last=hand_over and number == len(parts) - 1)
            with (
                self._recorder.span("backward", "compute", step=step),
                self._share.backward(),
                user_code("the backward pass"),
            ):
                (total * (scale * times)).backward()  # type: ignore[no-untyped-call]
            replica.end_backward()
        if hand_over and not self._looked:
            self._looked = True
            if (warning := unreached_warning(replica, settings.blind)) is not None:
                self._recorder.event("warning", step=step, text=warning)
        exposed_s = replica.waited_s + self._share.waited_s()
        try:
            mean = losses.mean()
        except NonFiniteLossError:
            replica.take_back()
            raise
        return StepResult(mean, losses.samples if self._share.counts else 0, self._clock() - start - exposed_s, exposed_s)

    def _look(self, step: int, batch: Batch) -> None:
        """Check for targets that the loss leaves out: always if that needs no synchronization, otherwise in the first steps."""
        if self._device.type != "cpu" and step >= STEPS_LOOKED_AT:
            return
        if self._looks:
            require_none_ignored(batch.target)
        if self._models:
            require_none_ignored_by_model(batch.target)

    def _weigh(self, step: int, scale: float, hand_over: bool) -> None:
        """All weights of the step are known: gradients, which are those of sums so far, are divided by them when handed over."""
        if self._weights is None:
            raise TaskError(f"{WEIGHTED}; nobody sums the weights")
        if not self._share.all_have_samples:  # those without any do not know that the loss has weights
            raise TaskError(
                f"{WEIGHTED}; some workers of the grid have no samples of this batch: use a larger "
                "[compute] batch_size, or fewer micro-batches"
            )
        if hand_over:
            replica = self._replica
            weight, replica.weight = replica.weight, 0.0
            # As in one step with a batch that is larger by that factor; what is added up is divided by it afterwards.
            replica.divisor = scale * self._weights.of_a_group(step, weight if self._share.counts else 0.0) / self._settings.every

    def _forward(self, part: Batch) -> tuple[Tensor, Tensor, int, int]:
        """The mean loss; the value from which backward starts, and its factor; and the number of samples."""
        with autocast(self._device, self._settings.precision):
            before = versions_of(self._replica.model) if self._watches else {}
            with user_code("the model's forward"), self._replica.forward():
                output = part.output(self._replica.model)
            if self._watches:  # later on, parameters change as they arrive
                self._watches = False
                require_unchanged(self._replica.model, before)
            given, part = part.samples, self._share.of_output(part)
            if part.samples < given and ignores(self._loss):  # the rows of a grid divide the samples, too
                require_none_ignored(part.target)
            if not part.samples:
                nothing = output.sum() * 0.0
                return nothing, nothing, 0, 0  # other workers of the group have all samples, and wait for this worker's backward
            with user_code("Task.loss(output, target)"):
                loss = self._share.loss(self._loss, output, part.target)
                if self._divides and isinstance(loss, Tensor):
                    self._try(part, output, loss)
        if (pair := parted(loss)) is not None and pair[0].requires_grad:
            total, weight = pair
            if self._weights_tried < LOSSES_TRIED:
                self._weights_tried += 1
                require_weight(self._loss, output, part.target, part.samples, weight)
            self._weighted = True
            self._replica.weight += float(weight)
            return mean_of(total, weight), total, 1, part.samples
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise no_loss(loss)
        return loss, loss, part.samples, part.samples

    def _try(self, part: Batch, output: Any, loss: Tensor) -> None:
        """Refuse a loss that is not a mean over samples."""
        require_all_rows(part.target, part.samples)
        if not self._models and of_model(loss, output):
            self._models = True
            require_none_ignored_by_model(part.target)
        # Those of other workers of a grid would be needed to compute anything of an output that stays divided.
        if loss.numel() != 1 or any(isinstance(leaf, Placed) for leaf in leaves(output)):
            return
        model = self._replica.model
        if self._models and isinstance(model, ParallelModel):  # its forward makes it a mean over the group's samples
            if self._weights is not None and (self._weights.groups > 1 or self._settings.accumulate > 1):
                read = self._device.type == "cpu" or not self._constants
                self._constants = require_mean_on_grid(loss, model.batch.size, self._constants, read=read)
            return
        if self._trials.due(loss, part.samples, read=self._device.type == "cpu"):
            if picks_samples(loss):  # halves may have fewer samples than are chosen
                raise TaskError(
                    f"the loss is not a mean over samples: {PICKED}, or, if each worker's own choice is meant, let Task.loss "
                    "return the pair (loss * n, n) for its n samples"
                )
            counts = [("samples", float(part.samples)), *counts_of(loss)]
            self._counts = require_same_counts(self._counts, counts)
            looks = not self._models and require_mean(self._loss, output, part.target, part.samples, loss.detach())
            # A divided model's whole forward would need all workers of the grid; it was compared with the ordinary one's.
            alone = not isinstance(self._share, DividedShare)
            if alone and part.samples > 1 and (not looks or depends_beside_rows(loss, output, part.samples)):
                require_mean_of_model(self._loss, part, self._replica.model, itself=not looks)
