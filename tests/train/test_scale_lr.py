"""The learning-rate rules, with parameter groups and a schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zmqtrain import Task
from zmqtrain.topology.world import Optimizer
from zmqtrain.train.task import build_optimizer_of


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 4.0), ("linear", 16.0)])
def test_all_groups_are_scaled_before_the_schedule_reads_them(rule: str, factor: float) -> None:
    task = Task(
        model=lambda: nn.Linear(2, 2),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1),
        train_data=[0],
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
    )
    settings = Optimizer.model_validate({"scale_lr": rule})
    optimizer, schedule = build_optimizer_of(task, nn.Linear(2, 2), lr_factor=settings.lr_factor(16))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.5 * factor])
    assert schedule is not None
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01 * factor, 0.05 * factor])
