"""Blocks of activations: together they are the whole, and shapes follow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placement import Placement, common, scaled, volume, within

GRIDS = st.builds(Grid, st.integers(1, 4), st.integers(1, 4))


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], grid: Grid, sample_dimension: int = 0) -> Placement:
    """Any placement of an activation: uneven divisions, and empty ones, among them."""
    if draw(st.booleans()):
        return Placement(grid, draw(st.sampled_from(["columns", "all"])), sample_dimension=sample_dimension)
    others = [each for each in range(len(shape)) if each != sample_dimension]
    dimension = draw(st.sampled_from(others))
    length = shape[dimension]
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=grid.rows - 1, max_size=grid.rows - 1)))
    divisions = tuple(zip([0, *cuts], [*cuts, length], strict=True))
    if draw(st.booleans()):
        dimension -= len(shape)
    return Placement(grid, "columns", dimension, divisions, sample_dimension)


@given(st.data(), GRIDS, st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 2))
def test_every_element_is_held_as_often_as_the_placement_says(
    data: st.DataObject, grid: Grid, shape: tuple[int, ...], sample_dimension: int
) -> None:
    placement = data.draw(placements(shape, grid, sample_dimension))
    holders = torch.zeros(shape, dtype=torch.int64)
    for rank in range(grid.size):
        block = placement.block(shape, rank)
        held = holders[tuple(slice(*each) for each in block)]
        assert tuple(held.shape) == placement.local_shape(shape, rank)
        assert held.numel() == volume(block)
        assert placement.whole_shape(held.shape, shape[sample_dimension]) == shape
        held += 1
    assert (holders == placement.copies).all()


def test_samples_over_all_processes_stay_in_their_column() -> None:
    grid = Grid(2, 3)
    columns, everywhere = Placement(grid), Placement(grid, "all")
    assert [columns.samples_of(11, rank) for rank in range(6)] == [(0, 4), (0, 4), (4, 8), (4, 8), (8, 11), (8, 11)]
    assert [everywhere.samples_of(11, rank) for rank in range(6)] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]
    assert everywhere.samples_of(1, 0) == (0, 1)
    assert everywhere.samples_of(1, 1) == (1, 1), "fewer samples than processes: some have none"


def test_a_placement_of_another_activation_is_refused() -> None:
    placement = Placement.over_rows(Grid(2, 2), 1, 6)
    assert placement.block((4, 6), 3) == ((2, 4), (3, 6))
    with pytest.raises(UsageError, match="has 7 elements, and the divisions 6"):
        placement.block((4, 7), 0)
    with pytest.raises(UsageError, match="cannot be divided along its dimension 1"):
        placement.block((4,), 0)
    with pytest.raises(UsageError, match="cannot be divided along its dimension -2"):
        Placement(Grid(2, 2), "columns", -2, ((0, 3), (3, 6))).block((6, 5), 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("columns", None, ((0, 1),)), "must say which dimension"),
        (("all", 1, ((0, 1), (1, 2))), "cannot be divided over rows as well"),
        (("columns", 0, ((0, 1), (1, 2))), "dimension 0 has the samples"),
        (("columns", 1, ((0, 1),)), "1 divisions for 2 rows"),
        (("columns", 1, ((0, 2), (1, 3))), "do not follow one another"),
        (("columns", 1, ((1, 2), (2, 3))), "do not follow one another"),
    ],
)
def test_contradictions_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Placement(Grid(2, 2), *arguments)  # type: ignore[arg-type]


def test_blocks() -> None:
    assert common(((0, 4), (2, 6)), ((1, 9), (0, 3))) == ((1, 4), (2, 3))
    assert common(((0, 4), (2, 6)), ((4, 9), (0, 3))) is None
    assert within(((1, 4), (2, 3)), ((0, 4), (2, 6))) == (slice(1, 4), slice(0, 1))
    assert scaled(((0, 2), (2, 3)), 4) == ((0, 8), (8, 12))
