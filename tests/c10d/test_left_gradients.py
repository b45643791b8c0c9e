"""Gradients that a program changes after they have left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zmqtrain.c10d.left_gradients import LeftGradients
from zmqtrain.errors import UsageError


def stepped(change: Callable[[nn.Linear], object], *, unchanged: int = 1, changed: int = 1) -> None:
    """Steps of a model whose gradients leave during backward; in the last ones these are changed before the step."""
    model = nn.Linear(3, 2)
    left = LeftGradients(model.named_parameters())
    engine = torch.autograd.Variable._execution_engine

    def hook(parameter: torch.Tensor) -> None:
        left.leave()
        # As DistributedDataParallel, which writes the gradients of its buckets when all of backward has ended.
        engine.queue_callback(lambda: parameter.grad.mul_(1.0))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for each in [*[lambda model: None] * unchanged, *[change] * changed]:
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        each(model)
        left.require_unchanged()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
        lambda model: model.bias.grad.mul_(2),
        lambda model: setattr(model.bias, "grad", torch.zeros(2)),
        lambda model: model.zero_grad(),
    ],
)
def test_a_change_after_backward_is_refused(change: Callable[[nn.Linear], object]) -> None:
    with pytest.raises(UsageError, match=r"the gradient of '(weight|bias)' was changed after backward.*had left"):
        stepped(change)


@pytest.mark.parametrize(
    "harmless",
    [
        lambda model: model.bias.grad.norm(),
        lambda model: model.weight.grad.clone().mul_(2),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")),  # as the Trainer measures the norm
        lambda model: setattr(model.bias, "grad", model.bias.grad.clone()),
    ],
)
def test_what_leaves_them_as_they_are_is_no_change(harmless: Callable[[nn.Linear], object]) -> None:
    stepped(harmless)


def test_a_program_that_clips_later_on_is_refused_at_its_second_step() -> None:
    with pytest.raises(UsageError, match="changed after backward"):
        stepped(lambda model: model.bias.grad.mul_(2), unchanged=10, changed=2)
    stepped(lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")), unchanged=10, changed=9)
