"""What is to be compared, and what is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.batch import Batch
from zmqtrain.errors import UsageError
from zmqtrain.parallel.loss_value import no_loss
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.turns import generators_kept, turn

Phase = Literal["training", "evaluation"]
#: With gradients, and afterwards in evaluation.
When = Literal["first", "later"]
What = Literal["output", "loss", "gradient", "buffer", "parameter", "update"]
#: An optimizer that shows what it does to parts in its second step shows it here: preconditioners often begin with the second.
OPTIMIZER_STEPS = 2
#: All weights are multiplied by it between training and evaluation, so that a forward with weights of the step before is seen.
LATER = 1.0625


class Shared(Protocol):
    """What this process does with its column's samples, as `zmqtrain.train.divided.DividedShare` does in training."""

    def begin(self, step: int, micro_batch: int, micro_batches: int) -> None: ...
    def of_output(self, batch: Batch) -> Batch: ...
    def loss(self, measure: Callable[[Any, Any], Any], output: Any, target: Any) -> Any: ...


class NotInDouble(Exception):
    """The ordinary model does not run in double precision."""


class NotComparable(UsageError):
    """There is no ordinary model, or no batch, to compare with; the text says why."""


class NotSmaller(Exception):
    """The ordinary model does not run on parts of images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A comparison of a divided model with the ordinary one: both models, a batch, and how to train on it."""

    make: Callable[[], nn.Module]
    """Makes the ordinary model: an equal one at each call."""
    divide: Callable[[], ParallelModel]
    """Makes this process's part of it."""
    batch: Batch
    """All samples, equal on all processes."""
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[nn.Module], Optimizer] | None
    share: Callable[[ParallelModel, int], Shared]
    seed: int
    local_statistics: bool
    """Batch norm sees a process's own samples, so that only evaluation can be compared."""
    dtype: torch.dtype
    smaller: bool = False
    """Whether a part of each image will do, where the divided model does the same to it (`zmqtrain.parallel.verify.smaller`)."""
    references: tuple[int, ...] = ()
    """For each rank, the one that runs the ordinary model for it and tells it the numbers: one of each host. Empty: rank 0 does
    for all."""

    @property
    def phase(self) -> Phase:
        """The phase in which gradients are compared."""
        return "evaluation" if self.local_statistics else "training"


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as in the ordinary model."""

    phase: Phase
    what: What
    name: str
    """Of a parameter, a buffer, or the number of an output."""
    by: float
    """The largest difference of an element."""
    of: float
    """The largest element of the ordinary model's."""
    order: int
    """The smaller, the more it says about where it begins."""


@dataclass(slots=True)
class Found:
    """The result of a comparison in one process."""

    differences: list[Difference] = field(default_factory=list)
    loss: float = 0.0
    """This process's summand of the whole batch's loss, in training."""
    sizes: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Of images, and of the parts of them that were computed."""


def source_of(references: Sequence[int], rank: int) -> int:
    """The rank that runs the ordinary model for this one (``references``: as `Case` has them)."""
    return references[rank] if references else 0


@contextmanager
def alone() -> Iterator[None]:
    """No other rank of this process draws random numbers meanwhile, and random states are afterwards what they were."""
    with turn():
        own, numbers = random.getstate(), np.random.get_state()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        try:
            with generators_kept(range(torch.cuda.device_count()) if used else ()):
                yield
        finally:
            random.setstate(own)
            np.random.set_state(numbers)


def without_own_dropout(model: nn.Module) -> None:
    """Take out the dropout within torch's own attention and recurrent layers, which draw by themselves."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def is_pair(loss: Any) -> bool:
    """Whether a task's loss is (sum, weight)."""
    return isinstance(loss, tuple | list) and len(loss) == 2


def mean(loss: Any, *, trained: bool = False) -> Tensor:
    """A task's loss as one number, where it may be (sum, weight). ``trained``: a gradient is needed. Raises `TaskError` if it is
    none."""
    value = loss[0] / loss[1] if is_pair(loss) else loss
    if not isinstance(value, Tensor) or value.numel() != 1 or (trained and not value.requires_grad):
        raise no_loss(loss)
    return value.reshape(())


def multiply_weights(model: nn.Module) -> None:
    """Multiply all parameters of a model by `LATER`, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(LATER)
