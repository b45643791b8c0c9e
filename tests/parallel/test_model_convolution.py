"""Convolutions by output channels on every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.model_world import GRIDS, compare, grids, random, randomised
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks

#: Of the plain layer, which copies where an even kernel needs more padding on one side.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

BACKWARD = Label("layer", "dx", "backward")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_every_grid(grid: Grid, dtype: torch.dtype) -> None:
    original = randomised(nn.Conv2d(3, 7, 3, stride=2, padding=1), dtype)
    compare(original, lambda layer, site: Convolution(layer, site), random(5, 3, 7, 6, dtype=dtype), grid)


@st.composite
def convolutions(draw: st.DrawFn, groups: int, outputs: int, inputs: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution with any geometry, and the shape of an image that it can be applied to."""
    dimensions = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(dimensions))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dimensions))
    stride: Any = tuple(draw(st.integers(1, 3)) for _ in range(dimensions))
    padding: Any = tuple(draw(st.integers(0, 2)) for _ in range(dimensions))
    if draw(st.integers(0, 4)) == 0:
        padding, stride = draw(st.sampled_from(["same", "valid"])), 1
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"]))
    space = tuple(max(5, 1 + step * (size - 1)) + draw(st.integers(0, 2)) for size, step in zip(kernel, dilation, strict=True))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    layer = kind(
        inputs * groups,
        outputs * groups,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return randomised(layer), space


@given(st.data(), grids, st.integers(1, 5), st.integers(4, 7), st.integers(1, 4), st.booleans())
@settings(max_examples=25)
def test_any_geometry(data: st.DataObject, grid: Grid, batch: int, outputs: int, inputs: int, first: bool) -> None:
    layer, space = data.draw(convolutions(1, outputs, inputs))
    x = random(batch, inputs, *space)
    compare(layer, lambda layer, site: Convolution(layer, site), x, grid, input_gradient=not first)


@given(st.data(), grids, st.integers(1, 5), st.integers(4, 7), st.integers(4, 6))
@settings(max_examples=20)
def test_channels_that_come_divided_or_stay_so(data: st.DataObject, grid: Grid, batch: int, outputs: int, inputs: int) -> None:
    layer, space = data.draw(convolutions(1, outputs, inputs))
    source, gather = Placement.over_rows(grid, 1, inputs), data.draw(st.booleans())
    compare(
        layer,
        lambda layer, site: Convolution(layer, site, gather=gather, gathers=source.divisions),
        random(batch, inputs, *space),
        grid,
        source=source,
        target=Placement(grid) if gather else Placement.over_rows(grid, 1, outputs),
    )


@given(st.data(), grids, st.integers(1, 5), st.integers(2, 7), st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=20)
def test_groups(data: st.DataObject, grid: Grid, batch: int, groups: int, outputs: int, inputs: int, gathers: bool) -> None:
    """Whole groups of a row, or rows that share one; what cannot be divided says why."""
    layer, space = data.draw(convolutions(groups, outputs, inputs))
    x = random(batch, inputs * groups, *space)
    if groups < grid.rows and (grid.rows % groups or outputs < grid.rows // groups):
        site = Site("layer", grid, ThreadFabric(ThreadWorld(grid.size), 0))
        with pytest.raises(UsageError, match=f"has {groups} groups of {outputs} output channels, which cannot be divided"):
            Convolution(layer, site)  # type: ignore[arg-type]
        return
    gathers = gathers and groups * inputs >= grid.rows
    source = Placement.over_rows(grid, 1, groups * inputs) if gathers else Placement(grid)
    compare(
        layer,
        lambda layer, site: Convolution(layer, site, gathers=source.divisions if gathers else None),
        x,
        grid,
        source=source,
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_depthwise_convolution_between_divided_neighbours_sends_nothing(grid: Grid) -> None:
    placement = Placement.over_rows(grid, 1, 6)
    world = compare(
        randomised(nn.Conv2d(6, 6, 3, padding=1, groups=6)),
        lambda layer, site: Convolution(layer, site, gather=False, input_divided=True),
        random(3, 6, 4, 5),
        grid,
        source=placement,
        target=placement,
    )
    assert not any(label.term in ("all_gather", "dx") for traffic in world.traffic for label in traffic.messages)


def test_whole_groups_gather_the_gradient_of_the_input_instead_of_summing_it() -> None:
    grid, x = Grid(2, 1), random(3, 4, 5, 5)
    world = compare(randomised(nn.Conv2d(4, 6, 3, groups=2)), lambda layer, site: Convolution(layer, site), x, grid)
    assert world.traffic[0].nbytes[BACKWARD] == 3 * x.numel() // 2 * 8, "half of the input at each of three steps"
    world = compare(randomised(nn.Conv2d(4, 6, 3)), lambda layer, site: Convolution(layer, site), x, grid)
    assert world.traffic[0].nbytes[BACKWARD] == 3 * x.numel() * 8


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_the_layers_of_alexnet(rows: int) -> None:
    """Its five convolutions, two of them in two groups as in the paper, with an eighth of the channels and small images."""
    for inputs, outputs, kernel, stride, padding, groups in (
        (3, 12, 11, 4, 2, 1),
        (12, 32, 5, 1, 2, 2),
        (32, 48, 3, 1, 1, 1),
        (48, 48, 3, 1, 1, 2),
        (48, 32, 3, 1, 1, 2),
    ):
        layer = randomised(nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups))
        size = 23 if kernel == 11 else 5
        compare(layer, lambda layer, site: Convolution(layer, site), random(2, inputs, size, size), Grid(rows, 1))


def test_bad_input() -> None:
    site = Site("conv1", Grid(4, 1), ThreadFabric(ThreadWorld(4), 0))
    with pytest.raises(UsageError, match="conv1 has 3 output channels, which cannot be divided over 4 rows"):
        Convolution(nn.Conv2d(3, 3, 1), site)
    with pytest.raises(UsageError, match="conv1: output channels 0 to 3 are neither whole groups of 2 nor a part of one"):
        Convolution(nn.Conv2d(4, 8, 1, groups=4), site, divisions=((0, 3), (3, 4), (4, 6), (6, 8)))
    with pytest.raises(UsageError, match="its rows need other input channels than each other's"):
        Convolution(nn.Conv2d(4, 8, 1), site, input_divided=True)
    with pytest.raises(UsageError, match=r"needs a dimension of samples, not shape \(3, 5, 5\)"):
        run_ranks(1, lambda fabric: Convolution(nn.Conv2d(3, 4, 1), Site("c", Grid(1, 1), fabric))(torch.zeros(3, 5, 5)))
