"""What ``python -m benchmarks quality`` trains, for all systems alike: the examples' tasks, evaluated on fewer samples, by devices
of the same speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Subset

from benchmarks.compression import profile_of
from benchmarks.paced import paced
from examples import cifar10, shakespeare
from zmqtrain import Task

#: Steps of a worker between two evaluations.
EVALUATE_EVERY = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """What is trained until which validation loss."""

    batch: int
    """Samples of a worker's step."""
    loss: float
    """The validation loss at which a run ends."""
    rates: tuple[float, ...]
    """The learning rates of which each system takes its best."""
    evaluated: int
    """How many samples are evaluated."""
    sleep_s: float
    """How long a step's layers sleep, in addition to their arithmetic."""


PROBLEMS = {
    "cifar": Problem(batch=16, loss=1.7, rates=(0.01, 0.02, 0.04), evaluated=500, sleep_s=0.16),
    "shakespeare": Problem(batch=8, loss=2.4, rates=(1e-3, 2e-3, 4e-3), evaluated=200, sleep_s=0.16),
}
#: SGD's momentum and weight decay; Shakespeare has Adam.
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-3


def task(data: str, problem: str, lr: float) -> Task:
    """CIFARNet with SGD and momentum, or a transformer of 0.4 million parameters with Adam."""
    of = PROBLEMS[problem]
    sgd = problem == "cifar"
    made = cifar10.task(data, lr, MOMENTUM, WEIGHT_DECAY) if sgd else shakespeare.task(data, "transformer", lr)
    held_out: Any = made.eval_data
    step = len(held_out) // of.evaluated
    profile = profile_of(made, of.batch)
    return replace(
        made,
        model=lambda: paced(made.model(), profile, of.sleep_s),
        eval_data=Subset(held_out, range(0, step * of.evaluated, step)),
    )
