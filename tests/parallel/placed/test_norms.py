"""Norms of each sample where channels, or places of an image, are divided: the ordinary model's, and no activation is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.training import Training, compare
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.rehearsal import rehearse
from zmqtrain.plan.counted import counted, predicted
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.trace import trace_layers

CHANNELS = 8
NORMS: dict[str, Callable[[], nn.Module]] = {
    "groups": lambda: nn.GroupNorm(4, CHANNELS),
    "one group": lambda: nn.GroupNorm(1, CHANNELS, affine=False),
    "instances": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
    "instances alone": lambda: nn.InstanceNorm2d(CHANNELS),
}


def network(norm: str) -> nn.Module:
    torch.manual_seed(1)
    found = nn.Sequential(
        *(nn.Conv2d(3, CHANNELS, 3, padding=1), NORMS[norm](), nn.SiLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 5)),
    )
    for parameter in found[1].parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return found


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("norm", "plan", "grid"),
    [
        *[("groups", plan, grid) for plan, grid in (("model", "2x2"), ("domain", "3x1"), ("both", "4x1"))],
        *[("one group", plan, grid) for plan, grid in (("model", "3x1"), ("width", "2x2"))],
        *[("instances", plan, grid) for plan, grid in (("domain", "2x2"), ("both", "4x1"), ("model", "2x2"))],
    ],
)
def test_divided_norms_are_the_norms(norm: str, plan: str, grid: str) -> None:
    compare(lambda: network(norm).double(), Training(images(5)), plan, grid)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("how", ["model 4x1", "model 2x2", "domain 4x1", "domain 2x2", "batch 1x4"])
def test_a_few_numbers_of_each_sample_travel_as_they_are_priced(norm: str, how: str) -> None:
    choice, grid = how.split()[0], Grid.parse(how.split()[1])
    ways = {"0": choice, "3": choice, "6": "model"}
    plan = Plan(tuple(LayerPlan(layer, way, grid) for layer, way in ways.items()))  # type: ignore[arg-type]
    inputs = [images(2).float()]
    layers = stages(trace_layers(network(norm), inputs))
    problem = Problem(layers, 8, 4, Link(1e-4, 1e-9), Ours())
    sent = counted(layers, rehearse(network(norm), inputs, grid, plan, 8))
    assert sent == predicted(price(problem, placed_of(problem, plan)))
    assert sum(each.nbytes for (_, term, _), each in sent.items() if term == "redistribute") == 0
