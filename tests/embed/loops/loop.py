"""What a training loop is given, in a session or in one process, and the ordinary model and optimizers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.embed.session import Session

STEPS = 5
SHARE = 4
"""Samples of a worker in a step."""
FEATURES, CLASSES = 6, 3
BUILDING = threading.Lock()


class Loop:
    """What a loop is given: the session, or what stands for it in plain PyTorch; and this worker's samples."""

    def __init__(self, session: Session | None, places: list[int], dtype: torch.dtype = torch.float64) -> None:
        """``places``: which shares of a step's samples it has."""
        self.session, self.places, self.dtype = session, places, dtype
        self.model: nn.Module = nn.Identity()
        self.seen: list[float] = []

    @property
    def rank(self) -> int:
        return self.session.rank if self.session else 0

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This worker's samples of a step."""
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(4 * SHARE, FEATURES, generator=generator, dtype=self.dtype)
        target = torch.randint(CLASSES, (4 * SHARE,), generator=generator)
        rows = [row for place in self.places for row in range(place * SHARE, (place + 1) * SHARE)]
        return inputs[rows], target[rows]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            yield self.batch(step)

    def build(self, make: Callable[[], nn.Module] | None = None) -> nn.Module:
        with BUILDING:  # workers are threads here, with one random state
            torch.manual_seed(5)
            self.model = (make or network)().to(self.dtype)
        return self.model

    def start(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        make: Callable[[], nn.Module] | None = None,
        **how: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.build(make)
        return self.replicate(model, (optimizer or sgd)(model.parameters()), **how)

    def replicate(self, model: nn.Module, optimizer: Any, **how: Any) -> tuple[nn.Module, Any]:
        return self.session.replicate(model, optimizer, **how) if self.session else (model, optimizer)

    def mean(self, value: Tensor) -> Tensor:
        return self.session.all_reduce(value.detach().clone(), "mean") if self.session else value.detach()

    def clip_grad_norm_(self, *arguments: Any) -> Tensor:
        if self.session:
            return self.session.clip_grad_norm_(*arguments)
        return nn.utils.clip_grad_norm_(self.model.parameters(), *arguments)

    def clip_grad_value_(self, value: float) -> None:
        if self.session:
            self.session.clip_grad_value_(value)
        else:
            nn.utils.clip_grad_value_(self.model.parameters(), value)

    def backward(self, total: Tensor, weight: Any) -> float:
        if self.session:
            return self.session.backward(total, weight)
        (total / weight).backward()
        return float(total / weight)

    def accumulating(self) -> Any:
        from contextlib import nullcontext

        return self.session.accumulating() if self.session else nullcontext()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=1e-3)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
