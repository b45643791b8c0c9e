"""A task with all that a worker can remember: what an optimizer and a schedule keep, buffers, and parameters that each row of
a grid has whole. In double precision, so that nothing that is lost of it looks like rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task

SAMPLES, INPUTS, CLASSES = 360, 12, 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def schedule(own: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(own, 2, 0.7)


def task() -> Task:
    """What to train."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, INPUTS, dtype=torch.float64, generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return Task(
        model=network,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        schedule=schedule,
        train_data=TensorDataset(inputs, targets),
    )


def evaluated_task() -> Task:
    """The same, which is evaluated, too."""
    own = task()
    assert isinstance(own.train_data, TensorDataset)
    return replace(own, eval_data=TensorDataset(*(each[:24] for each in own.train_data.tensors)))
