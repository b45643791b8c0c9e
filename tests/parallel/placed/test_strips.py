"""Images divided by their height, their width, or both: one layer after another, each in a way of its own."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.training import CLASSES, Training, compare
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.domain.make import domain_layer
from zmqtrain.parallel.geometry import even, grid_traffic
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan, Strips
from zmqtrain.testing.threads import ThreadFabric, run_ranks

BATCH = 3
#: Choice, grid, and how images lie.
WAYS: list[tuple[Choice, str, str]] = [
    ("domain", "4x1", "height"),
    ("domain", "4x1", "width"),
    ("domain", "4x1", "2x2"),
    ("domain", "2x2", "height"),
    ("domain", "2x2", "width"),
    ("model", "4x1", "height"),
    ("model", "2x2", "height"),
    ("batch", "1x4", "height"),
    ("whole", "4x1", "height"),
]


def images(height: int, width: int) -> Tensor:
    return torch.randn(BATCH, 2, height, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def chain() -> nn.Sequential:
    """Layers of which each has a plan of its own, with others between."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, (5, 3), padding=(2, 1)), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 6, 3, padding=2, dilation=2), nn.Tanh(), nn.MaxPool2d(3, (2, 1), 1)),
        *(nn.Conv2d(6, 4, 3, (1, 2), 1, groups=2), nn.GroupNorm(2, 4), nn.GELU(), nn.AvgPool2d(2, 1, 1)),
        *(nn.Conv2d(4, 4, (4, 2), padding=(2, 1)), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten()),
        nn.Linear(24, CLASSES),
    ).double()


def plan_of(ways: list[tuple[Choice, str, str]]) -> Plan:
    convolutions = [name for name, module in chain().named_children() if isinstance(module, nn.Conv2d)]
    layers = [LayerPlan(name, way[0], Grid.parse(way[1]), way[2]) for name, way in zip(convolutions, ways, strict=True)]
    return Plan((*layers, LayerPlan("14", "model", Grid(4, 1))))


#: Each way before and after every other one, in turn.
ORDERS = [[WAYS[(start + step * number) % len(WAYS)] for number in range(4)] for step in (1, 2, 4) for start in range(len(WAYS))]


@pytest.mark.parametrize("ways", random.Random(2).sample(ORDERS, 9), ids=lambda ways: " ".join("-".join(way) for way in ways))
def test_activations_go_from_each_way_to_each_other(ways: list[tuple[Choice, str, str]]) -> None:
    compare(chain, Training(images(9, 7)), plan_of(ways), "4x1")


@pytest.mark.parametrize(("height", "width"), [(2, 11), (11, 2), (5, 5)])
@pytest.mark.parametrize(("grid", "strips"), [("4x1", "2x2"), ("3x1", "width"), ("6x1", "3x2"), ("4x2", "2x2")])
def test_images_with_fewer_rows_than_strips(height: int, width: int, grid: str, strips: str) -> None:
    """Strips that are empty, or thinner than the halo."""
    layers = tuple(
        LayerPlan(name, "domain", Grid.parse(grid), strips)
        for name, module in chain().named_children()
        if isinstance(module, nn.Conv2d)
    )
    compare(chain, Training(images(height, width), steps=1), Plan((*layers, LayerPlan("14", "whole", Grid.parse(grid)))), grid)


def test_four_by_four_strips_send_what_is_predicted() -> None:
    """A convolution on a 4 x 4 grid of strips: neighbours' rows, then columns that have the corners."""
    module, shape = nn.Conv2d(2, 3, 5, padding=2), (BATCH, 2, 10, 13)

    def run(fabric: ThreadFabric) -> None:
        torch.manual_seed(1)
        plan = Plan((LayerPlan("1", "domain", Grid(16, 1), "4x4"),))
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 5, padding=2)).double()
        parallel = parallelize(model, Grid(16, 1), plan, fabric=fabric)
        parallel.batch.size = BATCH
        parallel(images(10, 13)).sum().backward()

    _, world = run_ranks(16, run)
    divisions = even(10, 4), even(13, 4)
    silent = run_ranks(1, lambda fabric: domain_layer(module, "1", fabric.among((0,)), even(10, 1))[0])[0][0]
    reaches = silent.reach(2, 10), silent.reach(3, 13)
    traffic = grid_traffic(reaches, divisions, divisions, 8 * shape[0] * shape[1])
    for rank, sent in enumerate(world.traffic):
        for phase in ("forward", "backward"):
            label = Label("1", "halo", phase)
            assert (sent.messages[label], sent.nbytes[label]) == (traffic[phase][rank].messages, traffic[phase][rank].nbytes)


@pytest.mark.parametrize(("strips", "senders"), [("height", {0, 3}), ("2x2", {0, 1, 2, 3})])
def test_circular_padding_sends_the_ends_of_images_alone(strips: str, senders: set[int]) -> None:
    """And not whole images: three rows from each end to the other."""

    def run(fabric: ThreadFabric) -> dict[str, str]:
        convolutions = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 7, padding=3, padding_mode="circular")
        plan = Plan(tuple(LayerPlan(str(number), "domain", Grid(4, 1), strips) for number in range(2)))
        model = parallelize(nn.Sequential(*convolutions).double(), Grid(4, 1), plan, fabric=fabric, strict=True)
        model.batch.size = BATCH
        model(images(16, 8)).sum().backward()
        return dict(model.left_whole)

    left_whole, world = run_ranks(4, run)
    assert not any(left_whole)
    found = [{phase: sent.nbytes[Label("1", "redistribute", phase)] for phase in ("forward", "backward")} for sent in world.traffic]
    assert {rank for rank, each in enumerate(found) if any(each.values())} == senders
    places = 2 * 3 * 14 if strips == "height" else 2 * 3 * 14 + 2 * 3 * 16  # rows are as wide as the width has been padded
    assert sum(each["forward"] for each in found) == sum(each["backward"] for each in found) == places * BATCH * 2 * 8


def test_what_strips_mean() -> None:
    assert Strips.parse("height", 6) == Strips(6, 1)
    assert Strips.parse("width", 6) == Strips(1, 6)
    assert Strips.parse("2x3", 6) == Strips(2, 3)
    for text in ("2x2", "0x6", "depth", "6x", ""):
        with pytest.raises(UsageError, match=f"strips '{text}'"):
            Strips.parse(text, 6)
