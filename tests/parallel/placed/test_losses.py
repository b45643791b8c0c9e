"""Losses, and what masks are made with: nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.parallel.placed.world import Given, check

SCORES = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = torch.tensor([[0, 1, -100], [2, 3, 1], [0, -100, -100], [1, 1, 2], [3, 0, 0]])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("over", ["columns", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy(over: str, reduction: str, weight: Tensor | None) -> None:
    def flat(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(x[:, :, 0], y[:, 0], weight, reduction=reduction)

    def deep(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(x[..., None], y[..., None], weight, reduction=reduction)

    def of_words(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(x.transpose(1, 2).reshape(-1, 4), y.view(-1), weight, reduction=reduction)

    for loss in (flat, deep, of_words):
        given: list[Any] = [Given(SCORES, over=over), Given(LABELS, over=over)]
        assert not check(loss, given).gathered
        check(loss, [Given(SCORES, divided=1), Given(LABELS)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 0).all() | (x > 2.5).any(),
        lambda x: (x > -9).all(),
        lambda x: (x > 0)[torch.arange(5)[:, None, None], torch.arange(3)[None, None, :], torch.arange(4)[None, :, None]],
        lambda x: x[torch.arange(5)[:, None], torch.tensor([[1]]), torch.arange(4)],
    ],
)
@pytest.mark.parametrize("over", ["columns", "all"])
def test_masks(function: Callable[[Tensor], Tensor], over: str) -> None:
    assert not check(function, [Given(SCORES.transpose(1, 2), over=over)], gradients=False).gathered
