"""Whose samples a divided model's outputs are of, and what the modules of a model may be called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zmqtrain
from tests.parallel.placed.training import Training, compare
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.rehearsal import rehearse
from zmqtrain.parallel.verify.verdict import Verified
from zmqtrain.testing.threads import ThreadFabric, run_ranks


def plan_of(**layers: str) -> Plan:
    """Such as ``first="model 4x1"``."""
    ways = {layer: how.split() for layer, how in layers.items()}
    return Plan(tuple(LayerPlan(layer, how, Grid.parse(grid)) for layer, (how, grid) in ways.items()))  # type: ignore[arg-type]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x))
        return self.one(x), self.two(x)


class One(Heads):
    def forward(self, x: Tensor) -> Any:
        return self.two(torch.relu(self.first(x)))


X = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("first", "last", "stays"),
    [
        ("model 4x1", "model 2x2", True),
        ("whole 4x1", "whole 2x2", True),
        ("model 4x1", "batch 1x4", True),
        ("whole 2x2", "whole 4x1", False),
        ("model 2x2", "model 4x1", False),
    ],
)
def test_an_output_on_another_grid_stays_where_every_process_has_all_samples(first: str, last: str, stays: bool) -> None:
    plan = plan_of(first=first, one=first, two=last)
    compare(lambda: One().double(), Training(X), plan, "2x2")
    sent = rehearse(One(), [X.float()[:2]], plan.layers[0].grid, plan, len(X))
    assert stays == (not any(label.layer == "output" and label.term == "redistribute" for rank in sent for label in rank))


@pytest.mark.parametrize(("one", "two"), [("model 4x1", "model 2x2"), ("batch 1x4", "whole 4x1"), ("whole 4x1", "batch 1x4")])
def test_outputs_that_lie_in_different_ways_are_of_the_same_samples(one: str, two: str) -> None:
    compare(lambda: Heads().double(), Training(X), plan_of(first="model 4x1", one=one, two=two), "4x1")


class Named(nn.Module):
    """Its modules and tensors are called as a divided model calls what is its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.grid, self.batch, self.samples = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.shares = nn.Parameter(torch.ones(5))
        self.register_buffer("sizes", torch.full((5,), 2.0))

    def forward(self, x: Tensor) -> Any:
        return self.samples(self.batch(self.grid(x))) * self.shares * self.sizes


def test_modules_may_be_called_as_what_a_divided_model_has() -> None:
    compare(lambda: Named().double(), Training(X), "model", "2x1")


class Words(nn.Module):
    """Samples and time become one dimension of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.last = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.words(x))).view(-1, 11)


@pytest.mark.parametrize("grid", ["2x1", "1x3", "2x2"])
@pytest.mark.parametrize("how", ["model", "batch"])
def test_columns_get_their_part_of_outputs_of_samples_and_time(grid: str, how: str) -> None:
    words = torch.arange(30).remainder(11).reshape(5, 6)
    wanted = Grid.parse(grid)
    model, plan = Words(), plan_of(words=f"{how} {wanted}", last=f"{how} {wanted}")

    def run(fabric: ThreadFabric) -> Verified:
        return zmqtrain.verify(
            *(model, grid, plan),
            fabric=fabric,
            inputs=(words,),
            target=words,
            loss=lambda output, target: nn.functional.cross_entropy(output, target.view(-1)),
        )

    assert {each.samples for each in run_ranks(wanted.size, run)[0]} == {5}
