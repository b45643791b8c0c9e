"""Schedules that set rates and momenta of their own, with ``[optimizer] scale_lr`` and ``momentum`` on top."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from zmqtrain import Task
from zmqtrain.train.task import build_optimizer_of

STEPS = 12

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=[0.3, 0.1], total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.3, step_size_up=3),
    "SWA": lambda o: SWALR(o, swa_lr=0.02, anneal_epochs=5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 8, eta_min=0.01),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2, eta_min=0.01),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "one after another": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 7)], [3]
    ),
    "both": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]),
}


def groups_of(name: str, kind: str, **changes: Any) -> list[list[dict[str, Any]]]:
    """The hyperparameters before each step."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05}]
        if kind == "adam":
            return torch.optim.Adam(groups, lr=torch.tensor(0.1), foreach=False)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    model = nn.Linear(2, 2)
    task = Task(model=lambda: model, loss=nn.functional.mse_loss, optimizer=optimizer, train_data=[0], schedule=SCHEDULES[name])
    made, schedule = build_optimizer_of(task, model, **changes)
    assert schedule is not None
    seen = []
    for _ in range(STEPS):
        seen.append([{key: value for key, value in group.items() if key != "params"} for group in made.param_groups])
        seen[-1] = [group | {"lr": float(group["lr"])} for group in seen[-1]]
        made.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rate_of_a_schedule_is_scaled(name: str, kind: str) -> None:
    if kind == "adam" and name in ("SWA", "one after another", "cyclic"):
        kind = "sgd"  # torch's own do not take a tensor as the rate, or keep no momentum
    own, scaled = groups_of(name, kind), groups_of(name, kind, lr_factor=4.0)
    for before, after in zip(own, scaled, strict=True):
        for one, other in zip(before, after, strict=True):
            assert other["lr"] == pytest.approx(4 * one["lr"], rel=1e-6)
            assert {**other, "lr": 0} == {**one, "lr": 0}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["one cycle", "exponential"])
def test_a_schedule_does_not_bring_back_the_tasks_momentum(name: str, kind: str) -> None:
    own, changed = groups_of(name, kind), groups_of(name, kind, momentum=0.5)
    for before, after in zip(own, changed, strict=True):
        assert [group["lr"] for group in after] == pytest.approx([group["lr"] for group in before])
        assert {group["momentum"] if kind == "sgd" else group["betas"][0] for group in after} == {0.5}
