"""Logistic regression on handwritten digits: convex, small and quick to train, even with many simulated workers.

zmqtrain simulate launch/simulate-digits.toml
"""

from __future__ import annotations

import torch
from digits import load
from torch import nn

from zmqtrain import Task


def task(lr: float = 0.2, momentum: float = 0.0) -> Task:
    """What to train. The arguments come from ``[job] args`` in the topology file."""
    train, test = load()
    return Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        train_data=train,
        eval_data=test,
    )
