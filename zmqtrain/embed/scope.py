"""The workers whose gradients make one gradient, and what they tell each other in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import TaskError
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


class Scope:
    """A compute group, or all groups where they are in step. All methods on the loop's thread."""

    def __init__(self, group: Group, groups: int) -> None:
        """``groups``: how many compute groups ``group`` is."""
        self.group, self.groups = group, groups
        self.sums = 0
        """That were begun."""

    @property
    def alone(self) -> bool:
        return self.group.size == 1

    async def sum(self, payloads: Sequence[Payload]) -> None:
        """Sum each payload, in place; the same bits on all. Every worker calls it, with payloads of the same sizes."""
        self.sums = number = self.sums + 1
        await together(*(all_reduce(self.group, payload, ("sum", number, index)) for index, payload in enumerate(payloads)))

    async def sum_numbers(self, *numbers: float) -> list[float]:
        """The sums of these numbers."""
        values = np.array(numbers, np.float64)
        await self.sum([TensorPayload.of(values)])
        return [float(value) for value in values]

    async def agree(self, state: StepState) -> bool:
        """Raise `TaskError` unless all have the same gradients, weights and settings. Returns whether any ``holds``."""
        if self.alone:
            return state.holds
        mine = state.numbers()
        sums = await self.sum_numbers(*mine)
        state.check([total / self.group.size for total in sums], mine)
        return sums[0] > 0


@dataclass(slots=True)
class StepState:
    """What must be the same on all workers of a scope when a step ends."""

    step: int
    holds: bool = False
    """Not the same on all: whether gradients must be held back from now on."""
    settings: int = 0
    """Checksum of the optimizer's hyperparameters."""
    without: int = 0
    """Checksum of the names of parameters that have no gradient."""
    gradients: tuple[float, float] = (0.0, 0.0)
    """Sum and norm."""
    weights: tuple[float, float] = (0.0, 0.0)
    """Sum and norm of a sample."""
    tolerance: float = 1e-5

    def numbers(self) -> list[float]:
        """For `check`."""
        return [float(self.holds), self.step, self.settings, self.without, *self.gradients, *self.weights]

    def check(self, means: Sequence[float], mine: Sequence[float]) -> None:
        """``means`` over all workers, of their `numbers`."""
        _, step, settings, without, *sums = (mean - own for mean, own in zip(means, mine, strict=True))
        if step:
            raise TaskError(f"this worker is at step {self.step}, others are not: all must call optimizer.step() equally often")
        if settings:
            raise TaskError(
                "the optimizer's settings differ from worker to worker (a learning rate, most likely): step schedules equally "
                'often on all, and give ReduceLROnPlateau a metric that all share, such as session.all_reduce(metric, "mean")'
            )
        if without:
            raise TaskError(
                "some workers have no gradient (grad is None) where others have one: set them to None on all workers, or on none"
            )
        if self._apart(sums[0], self.gradients) or self._apart(sums[1], (self.gradients[1],) * 2):
            raise TaskError(
                "gradients were changed after backward(), and not alike on all workers: random numbers need a generator with one "
                "seed on all, and gradients from torch.autograd.grad() must be averaged by session.all_reduce() first"
            )
        if self._apart(sums[2], self.weights) or self._apart(sums[3], (self.weights[1],) * 2):
            raise TaskError(
                "the workers' weights differ: they were changed on some of them only (load_state_dict, a change by hand). Do the "
                "same on all workers, or before session.replicate(), which gives all rank 0's"
            )

    def _apart(self, difference: float, of: tuple[float, float]) -> bool:
        return abs(difference) > self.tolerance * (abs(of[0]) + abs(of[1]))


def tolerance_of(dtypes: Sequence[torch.dtype]) -> float:
    """How far sums may be apart on processors that round differently."""
    return min(0.05, max(1e-9, *(100 * torch.finfo(dtype).eps for dtype in dtypes)))


def sum_and_norm(tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Of all elements."""
    sums = torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors])
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    both = torch.stack([sums.sum(), torch.linalg.vector_norm(norms)]).tolist()
    return both[0], both[1]
