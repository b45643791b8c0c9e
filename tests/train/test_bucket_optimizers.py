"""A bucket's share of the task's optimizer against the whole of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zmqtrain.errors import TaskError
from zmqtrain.train.bucket_optimizers import BucketOptimizers


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))


OPTIMIZERS: dict[str, Callable[[list[dict[str, object]]], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adam amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),  # whole tensors, but each for itself
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bucket_by_bucket_equals_the_whole_step_also_with_a_schedule(kind: str) -> None:
    whole, parts = model(), model()

    def optimizer_of(net: nn.Module) -> Optimizer:
        named = dict(net.named_parameters())
        return OPTIMIZERS[kind](
            [
                {"params": [p for name, p in named.items() if "weight" in name]},
                {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0, "lr": 0.05},
            ]
        )

    first, second = optimizer_of(whole), optimizer_of(parts)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (first, second)]
    parameters = list(parts.parameters())
    buckets = BucketOptimizers(second, [parameters[4:], parameters[1:4], parameters[:1]])
    for step in range(6):
        inputs = torch.randn(7, 4, generator=torch.Generator().manual_seed(step))
        for net in (whole, parts):
            net.zero_grad()
            net(inputs).square().mean().backward()
        first.step()
        for index in (0, 2, 1):
            buckets.prepare(index)
            buckets.step(index)
        with pytest.warns(UserWarning, match="lr_scheduler.step") if step == 0 else torch.no_grad():
            for schedule in schedules:
                schedule.step()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    mine, others = second.state_dict()["state"], first.state_dict()["state"]
    assert mine.keys() == others.keys()
    assert all(torch.equal(torch.as_tensor(mine[p][key]), torch.as_tensor(others[p][key])) for p in mine for key in mine[p])


def test_a_later_schedule_does_not_touch_a_step_that_was_prepared() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    buckets = BucketOptimizers(optimizer, [[parameter]])
    buckets.prepare(0)
    optimizer.param_groups[0]["lr"] = 100.0
    parameter.grad = torch.full((3,), 0.5)
    buckets.step(0)
    assert torch.equal(parameter.detach(), torch.full((3,), 0.5))


def test_an_optimizer_of_all_parameters_at_once_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(TaskError, match="LBFGS, which updates all parameters at once"):
        BucketOptimizers(torch.optim.LBFGS([parameter]), [[parameter]])
