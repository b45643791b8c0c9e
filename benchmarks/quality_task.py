"""What ``python -m benchmarks quality`` trains, for all systems alike: the examples' tasks, evaluated on fewer samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Subset

from examples import cifar10, shakespeare
from zmqtrain import Task


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


PROBLEMS = {
    "cifar": Problem(batch=32, loss=1.45, rates=(0.01, 0.03, 0.1), evaluated=2000),
    "shakespeare": Problem(batch=16, loss=1.9, rates=(1e-3, 2e-3, 5e-3), evaluated=400),
}


def task(data: str, problem: str, lr: float) -> Task:
    """CIFARNet with SGD and momentum, or a transformer of 0.4 million parameters with Adam."""
    made = cifar10.task(data, lr, momentum=0.9) if problem == "cifar" else shakespeare.task(data, "transformer", lr)
    held_out: Any = made.eval_data
    step = len(held_out) // PROBLEMS[problem].evaluated
    return replace(made, eval_data=Subset(held_out, range(0, step * PROBLEMS[problem].evaluated, step)))
