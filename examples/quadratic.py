"""A noisy quadratic, of which every figure is known: what asynchrony, staleness and momentum do to training, in simulated time.

    zmqtrain simulate launch/simulate-quadratic.toml

The model is one vector w. A sample x has the loss curvature / 2 * |w - x|^2; samples lie around the optimum with a spread of
``noise``, so a gradient is curvature * (w - optimum) plus noise, and the loss that remains at the end is the samples' spread.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zmqtrain import Task

OPTIMUM = 1.0


class Point(nn.Module):
    """The vector, which answers each sample with its difference from it."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dimensions))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, dimensions) to the same."""
        return self.w - x


def task(dimensions: int = 100, curvature: float = 1.0, noise: float = 1.0, samples: int = 4096, lr: float = 0.1) -> Task:
    """What to train. The arguments come from ``[job] args`` in the topology file."""
    generator = torch.Generator().manual_seed(0)
    x = OPTIMUM + noise * torch.randn(samples, dimensions, generator=generator)
    x -= x.mean(0) - OPTIMUM  # so that the optimum of exactly these samples is known, too
    exact = torch.full((256, dimensions), OPTIMUM)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return curvature / 2 * output.square().sum(1).mean()

    return Task(
        model=lambda: Point(dimensions),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        train_data=TensorDataset(x, torch.zeros(samples)),
        eval_data=TensorDataset(exact, torch.zeros(256)),
        metrics={"distance": lambda output, target: output.norm(dim=1).mean()},
    )
