"""The workers whose gradients are combined into one, and the values that they compare in each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import TaskError
from zmqtrain.train.loss_trial import DIFFERENT_CONSTANTS, DIFFERENT_SCALES, Constants
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


class Scope:
    """A compute group, or all groups if they are synchronous. All methods on the loop's thread."""

    def __init__(self, group: Group, groups: int) -> None:
        """``groups``: the number of compute groups in ``group``."""
        self.group, self.groups = group, groups
        self.sums = 0
        """The number of sums that were begun."""

    @property
    def alone(self) -> bool:
        return self.group.size == 1

    async def sum(self, payloads: Sequence[Payload], among: Sequence[Group] | None = None) -> None:
        """Sum each payload, in place; the result has the same bits on all. Every worker must call it, with payloads of the same
        sizes.

        ``among``: the workers that sum each payload, if not all do (`zmqtrain.exchange.base.Bucket.sharers`)."""
        self.sums = number = self.sums + 1
        groups = among or [self.group] * len(payloads)
        await together(
            *(
                all_reduce(group, payload, ("sum", number, index))
                for index, (group, payload) in enumerate(zip(groups, payloads, strict=True))
            )
        )

    async def sum_numbers(self, *numbers: float) -> list[float]:
        """The sums of these numbers over all workers."""
        values = np.array(numbers, np.float64)
        await self.sum([TensorPayload.of(values)])
        return [float(value) for value in values]

    async def agree(self, state: StepState) -> Agreed:
        """Raise `TaskError` unless all have the same gradients, weights and settings."""
        if self.alone:
            return Agreed(state.holds)
        mine = state.numbers()
        sums = await self.sum_numbers(*mine)
        means = [total / self.group.size for total in sums]
        state.check(means, mine)
        return Agreed(sums[0] > 0, state.remark(means, mine), state.has_the_others_loss(means))


class Agreed(NamedTuple):
    """What all workers know after a step."""

    holds: bool
    """Whether any of them needs held gradients."""
    remark: str = ""
    """What this one has other than they, and may be meant so; empty for nothing."""
    same_loss: bool = False
    """Whether this worker's loss is the mean of all, which it is by chance where samples differ."""


@dataclass(slots=True)
class StepState:
    """The values that must be the same on all workers of a scope when a step ends."""

    step: int
    holds: bool = False
    """Whether this worker needs held gradients from now on; may differ between workers."""
    settings: int = 0
    """Checksum of the optimizer's hyperparameters."""
    without: int = 0
    """Checksum of the names of parameters that have no gradient."""
    loss: float = 0.0
    """The sum of this worker's own losses; 0 if it is not known."""
    gradients: tuple[float, float] = (0.0, 0.0)
    """Sum and norm of the gradients."""
    weights: tuple[float, float] = (0.0, 0.0)
    """Sum and norm of a sample of the weights."""
    others: tuple[float, float] = (0.0, 0.0)
    """Sum and norm of what other optimizers train."""
    constants: Constants = field(default_factory=Constants)
    """The constants found in the losses."""
    tolerance: float = 1e-5

    def numbers(self) -> list[float]:
        """The state as numbers, for `check`."""
        sums = (*self.gradients, *self.weights, *self.others)
        constants = self.constants
        compared = (constants.kinds, constants.value, constants.scale)
        return [float(self.holds), self.step, self.settings, self.without, self.loss, *sums, *compared]

    def check(self, means: Sequence[float], mine: Sequence[float]) -> None:
        """Raise `TaskError` if the workers differ. ``means``: the means of all workers' `numbers`. ``mine``: this worker's."""
        _, step, settings, without, _, *sums, kinds, constants, _ = (mean - own for mean, own in zip(means, mine, strict=True))
        if step:
            raise TaskError(
                f"this worker is at step {self.step}, but others are not: all workers must call optimizer.step() equally often"
            )
        if settings:
            raise TaskError(
                "the optimizer's settings (probably the learning rate) differ between workers: step schedules equally often on "
                'all workers, and give ReduceLROnPlateau a metric that all share, such as session.all_reduce(metric, "mean")'
            )
        if without:
            raise TaskError(
                "some parameters have no gradient (grad is None) on some workers only: set it to None on all workers, or on none"
            )
        if not kinds and abs(constants) > 1e-5 * abs(self.constants.value):
            raise TaskError(DIFFERENT_CONSTANTS)
        if self._apart(sums[0], self.gradients) or self._apart(sums[1], (self.gradients[1],) * 2):
            raise TaskError(
                "gradients were changed after backward(), but not in the same way on all workers: random numbers need a "
                "generator with the same seed on all, and gradients from torch.autograd.grad() must be averaged by "
                "session.all_reduce() first"
            )
        if self._apart(sums[2], self.weights) or self._apart(sums[3], (self.weights[1],) * 2):
            raise TaskError(
                "the workers' weights differ, because they were changed on some workers only (load_state_dict, a change by "
                "hand). Make the change on all workers, or before session.replicate(), which copies rank 0's weights to all"
            )

        if self._apart(sums[4], self.others) or self._apart(sums[5], (self.others[1],) * 2):
            raise TaskError(
                "parameters outside of the replicated model differ between the workers: another optimizer, which was not given to "
                "session.replicate(), or a change by hand has trained them differently, on each worker by its own samples (a loss "
                "with parameters, a discriminator?). Put everything that is trained into one "
                "nn.Module, with one optimizer for all of it; or average these gradients before its step, by "
                'session.all_reduce(p.grad, "mean"), and begin with the same values'
            )

    def remark(self, means: Sequence[float], mine: Sequence[float]) -> str:
        """What differs between the workers and may be meant so, in words; empty for nothing."""
        *_, kinds, _, scale = (mean - own for mean, own in zip(means, mine, strict=True))
        return DIFFERENT_SCALES if not kinds and abs(scale) > 1e-5 * abs(self.constants.scale) else ""

    def has_the_others_loss(self, means: Sequence[float]) -> bool:
        """Whether it is the mean of all, as in ``means``: of `numbers` over all workers. Not if the loss is not known."""
        _, _, _, _, loss, *_ = means
        return math.isfinite(self.loss) and abs(loss - self.loss) <= 1e-14 * abs(self.loss) and self.loss != 0

    def _apart(self, difference: float, of: tuple[float, float]) -> bool:
        return abs(difference) > self.tolerance * (abs(of[0]) + abs(of[1]))


def tolerance_of(dtypes: Sequence[torch.dtype]) -> float:
    """How much sums may differ between processors that round differently."""
    return min(0.05, max(1e-9, *(100 * torch.finfo(dtype).eps for dtype in dtypes)))


def sum_and_norm(tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The sum and the norm of all elements."""
    sums = torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors])
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    both = torch.stack([sums.sum(), torch.linalg.vector_norm(norms)]).tolist()
    return both[0], both[1]
