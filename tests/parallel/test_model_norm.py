"""Norms of whole and of divided features on every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.model_world import GRIDS, compare, grids, random, randomised
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.batch_norm import BatchNorm
from zmqtrain.parallel.model.norm import GroupNorm, LayerNorm
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Divisions, Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks

DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_divided_features(grid: Grid, dtype: torch.dtype) -> None:
    placement = Placement.over_rows(grid, -1, 7)
    original = randomised(nn.LayerNorm(7), dtype)
    compare(original, LayerNorm, random(5, 3, 7, dtype=dtype) + 2, grid, source=placement, target=placement)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_layer_norm_of_whole_features_is_the_plain_one(grid: Grid) -> None:
    """Everybody in a column computes the same; its weights are summed over the row."""
    compare(randomised(nn.LayerNorm(7)), lambda layer, site: layer, random(5, 7), grid, predict=lambda *_: {})


@given(st.data(), grids, st.integers(1, 6), st.integers(4, 9), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=20)
def test_layer_norm_of_any_kind(
    data: st.DataObject, grid: Grid, batch: int, features: int, affine: bool, bias: bool, first: bool
) -> None:
    inner = data.draw(st.sampled_from([(), (2,), (2, 3)]))
    original = nn.LayerNorm((features, *inner), elementwise_affine=affine, bias=bias)
    placement = Placement.over_rows(grid, -1 - len(inner), features)
    x = random(batch, 2, features, *inner)
    needs = not first or not affine
    compare(randomised(original), LayerNorm, x, grid, source=placement, target=placement, input_gradient=needs)


def test_statistics_keep_their_digits() -> None:
    """A mean that is much larger than the deviation: the squares' sums would have lost it."""
    grid = Grid(3, 1)
    placement = Placement.over_rows(grid, -1, 8)

    def compared(offset: float) -> None:
        x = (random(4, 8) + offset).float()

        def rank(fabric: ThreadFabric) -> torch.Tensor:
            layer = LayerNorm(nn.LayerNorm(8), Site("layer", grid, fabric))
            start, stop = placement.divisions[fabric.rank]
            found: torch.Tensor = layer(x[:, start:stop])
            return found.detach()

        found = torch.cat(run_ranks(3, rank)[0], -1)
        plain, exact = (torch.nn.functional.layer_norm(each, (8,)) for each in (x, x.double()))
        close(found, plain, f"around {offset}", exact=exact)

    compared(0)
    compared(1000)


@given(st.data(), grids, st.integers(1, 5), st.integers(4, 6), st.integers(2, 4), st.booleans())
@settings(max_examples=20)
def test_group_norm_with_cuts_between_groups_and_within(
    data: st.DataObject, grid: Grid, batch: int, groups: int, each: int, affine: bool
) -> None:
    channels = groups * each
    divisions: Divisions | None = data.draw(st.sampled_from([None, Placement.over_rows(grid, 1, channels).divisions]))
    placement = Placement(grid, "columns", 1, divisions or _whole_groups(grid, groups, each))
    dtype = data.draw(st.sampled_from(DTYPES))
    world = compare(
        randomised(nn.GroupNorm(groups, channels, affine=affine), dtype),
        lambda layer, site: GroupNorm(layer, site, divisions=divisions),
        random(batch, channels, *data.draw(st.sampled_from([(3,), (2, 2)])), dtype=dtype),
        grid,
        source=placement,
        target=placement,
    )
    cut = divisions is not None and any(start % each for start, _ in divisions)
    assert any(Label("layer", "statistics") in traffic.messages for traffic in world.traffic) == cut


def _whole_groups(grid: Grid, groups: int, each: int) -> Divisions:
    return tuple((start * each, stop * each) for start, stop in Placement.over_rows(grid, 1, groups).divisions)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_of_divided_channels_with_the_statistics_of_all(grid: Grid, dtype: torch.dtype) -> None:
    placement = Placement.over_rows(grid, 1, 6)
    compare(
        randomised(nn.BatchNorm2d(6), dtype),
        lambda layer, site: BatchNorm(layer, site, divisions=placement.divisions),
        random(5, 6, 3, 2, dtype=dtype) + 1,
        grid,
        source=placement,
        target=placement,
    )


@given(
    grids,
    st.integers(2, 7),
    st.sampled_from(["columns", "all"]),
    st.sampled_from([0.3, None]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25)
def test_batch_norm_of_whole_channels(
    grid: Grid, batch: int, samples: Any, momentum: float | None, affine: bool, track: bool, flat: bool
) -> None:
    """Of samples that are divided over columns or all processes, unevenly, some of whom may have none."""
    kind = nn.BatchNorm1d if flat else nn.BatchNorm2d
    placement = Placement(grid, samples)
    compare(
        randomised(kind(4, momentum=momentum, affine=affine, track_running_stats=track)),
        lambda layer, site: BatchNorm(layer, site, samples=samples),
        random(batch, 4, *(() if flat else (2, 3))),
        grid,
        source=placement,
        target=placement,
    )


def test_local_statistics_send_nothing_and_are_those_of_the_own_samples() -> None:
    grid, x = Grid(2, 2), random(6, 4, 3)
    original = randomised(nn.BatchNorm1d(4))

    def rank(fabric: ThreadFabric) -> torch.Tensor:
        layer = BatchNorm(original, Site("layer", grid, fabric), divisions=((0, 1), (1, 4)), statistics="local")  # type: ignore[arg-type]
        row, column = grid.place(fabric.rank)
        assert layer.traffic((3, 1, 3), 8) == {}
        return layer(x[column * 3 : column * 3 + 3, slice(*layer.divisions[row])])  # type: ignore[index]

    results, world = run_ranks(4, rank)
    assert not any(traffic.messages for traffic in world.traffic)
    for column in range(2):
        due = original(x[column * 3 : column * 3 + 3])
        assert torch.allclose(torch.cat([results[column], results[2 + column]], 1), due, rtol=1e-12)


def test_running_statistics_are_used_outside_of_training() -> None:
    grid = Grid(1, 2)
    original = randomised(nn.BatchNorm1d(4))
    original.running_mean.copy_(random(4, seed=5))  # type: ignore[union-attr,operator]
    x = random(3, 4)

    def rank(fabric: ThreadFabric) -> torch.Tensor:
        return BatchNorm(original, Site("layer", grid, fabric)).eval()(x)  # type: ignore[arg-type,no-any-return]

    results, world = run_ranks(2, rank)
    assert all(torch.equal(found, original.eval()(x)) for found in results)
    assert not any(traffic.messages for traffic in world.traffic)


def test_bad_input() -> None:
    site = Site("norm", Grid(4, 1), ThreadFabric(ThreadWorld(4), 0))
    with pytest.raises(UsageError, match="norm has 3 features, which cannot be divided over 4 rows"):
        LayerNorm(nn.LayerNorm(3), site)
    with pytest.raises(UsageError, match="norm has 2 groups, which cannot be divided over 4 rows"):
        GroupNorm(nn.GroupNorm(2, 8), site)
    with pytest.raises(UsageError, match="channels and samples cannot both be divided over the rows"):
        BatchNorm(nn.BatchNorm1d(4), site, divisions=((0, 1), (1, 2), (2, 3), (3, 4)), samples="all")
    alone = Site("norm", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0))
    with pytest.raises(UsageError, match="needs more than one value per channel"):
        BatchNorm(nn.BatchNorm1d(4), alone)(torch.zeros(1, 4))
    for layer in (BatchNorm(nn.BatchNorm1d(4), alone), GroupNorm(nn.GroupNorm(2, 4), alone)):
        with pytest.raises(UsageError, match=r"shape \(2, 3\) where this row has channels 0 to 4"):
            layer(torch.zeros(2, 3))
