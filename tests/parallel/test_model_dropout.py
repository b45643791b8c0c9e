"""Masks are the same on every grid, and look like chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.model_world import GRIDS, part, random
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.dropout import Batch, Masks, keep
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks


def dropped(probability: float, x: Tensor, placement: Placement, step: int = 0, calls: int = 1) -> list[Tensor]:
    """What each rank makes of its part of ``x``, at the last of some calls."""
    grid, batch = placement.grid, Batch(x.shape[placement.sample_dimension], step)

    def rank(fabric: ThreadFabric) -> Tensor:
        masks, own = Masks(Site("drop", grid, fabric), batch, seed=3), part(x, placement, fabric.rank)
        return [masks.drop(own, probability, placement) for _ in range(calls)][-1]

    results, world = run_ranks(grid.size, rank)
    assert not any(traffic.messages for traffic in world.traffic)
    return results


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_grid_drops_what_one_process_does(grid: Grid) -> None:
    """Whatever is divided: samples, features, heights; and wherever the samples are."""
    cases = [(0, "columns"), (1, "columns"), (2, "all"), (0, 1), (0, 2), (0, -1), (1, 0), (1, 2), (2, -2)]
    for sample_dimension, divided in cases:
        drops_alike(grid, sample_dimension, divided)


def drops_alike(grid: Grid, sample_dimension: int, divided: Any) -> None:
    x = random(5, 4, 6)
    if isinstance(divided, str):
        placement = Placement(grid, divided, sample_dimension=sample_dimension)  # type: ignore[arg-type]
    else:
        placement = Placement.over_rows(grid, divided, x.shape[divided], sample_dimension)
    (alone,) = dropped(0.4, x, Placement(Grid(1, 1), sample_dimension=sample_dimension))
    for rank, found in enumerate(dropped(0.4, x, placement)):
        assert torch.equal(found, part(alone, placement, rank))


def test_what_is_kept_is_scaled_and_its_gradient_too() -> None:
    x = random(50, 40).requires_grad_()
    masks = Masks(Site("drop", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0)), Batch(50), 0)
    result = masks.drop(x, 0.25, Placement(Grid(1, 1)))
    result.sum().backward()
    kept = result != 0
    assert x.grad is not None
    assert torch.equal(x.grad, kept.double() / 0.75)
    assert torch.allclose(result, x * kept / 0.75)


def test_steps_layers_seeds_and_calls_have_masks_of_their_own() -> None:
    x = torch.ones(30, 30)
    grid = Grid(1, 1)
    found = [dropped(0.5, x, Placement(grid), step, calls)[0] for step in range(3) for calls in (1, 2)]
    for name, seed in (("other", 3), ("drop", 4)):
        masks = Masks(Site(name, grid, ThreadFabric(ThreadWorld(1), 0)), Batch(30), seed)
        found.append(masks.drop(x, 0.5, Placement(grid)))
    for number, one in enumerate(found):
        for other in found[:number]:
            assert abs(float((one == other).float().mean()) - 0.5) < 0.1, "as often the same as chance has it"
    assert torch.equal(found[0], dropped(0.5, x, Placement(grid))[0]), "and the same again"


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_look_like_chance(probability: float) -> None:
    """Frequencies by sample and by position, and neighbours in both directions."""
    samples, positions = 400, 500
    kept = keep("key", probability, ((0, samples), (0, positions)), (samples, positions), 0, torch.device("cpu")).double()
    deviation = (probability * (1 - probability)) ** 0.5
    centred = (kept - (1 - probability)) / deviation
    assert abs(float(centred.mean())) < 5 / (samples * positions) ** 0.5
    assert float(centred.mean(0).abs().max()) < 5 / samples**0.5
    assert float(centred.mean(1).abs().max()) < 5 / positions**0.5
    for neighbours in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[2:, 4:] * centred[:-2, :-4]):
        assert abs(float(neighbours.mean())) < 5 / neighbours.numel() ** 0.5
    # Samples are as different from one another as chance has it, and so are positions.
    for products in (centred @ centred.t() / positions, centred.t() @ centred / samples):
        products.fill_diagonal_(0)
        assert float(products.abs().max()) < 6.5 / min(samples, positions) ** 0.5


def test_extremes() -> None:
    x = torch.ones(3, 4)
    assert torch.equal(dropped(0.0, x, Placement(Grid(1, 1)))[0], x)
    assert torch.equal(dropped(1.0, x, Placement(Grid(1, 1)))[0], torch.zeros(3, 4))


def test_masks_never_change_between_releases() -> None:
    """A run that goes on from a checkpoint with a newer release drops the same elements."""
    kept = keep("0/fc6/7/1", 0.5, ((2, 4), (0, 16)), (8, 16), 0, torch.device("cpu"))
    assert ["".join("1" if each else "0" for each in row) for row in kept.tolist()] == ["0101111110001111", "0010111000110001"]


def test_a_batch_of_another_size_is_refused() -> None:
    masks = Masks(Site("drop", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0)), Batch(12), 0)
    with pytest.raises(UsageError, match=r"layer drop: a part of shape \(5, 3\), where a batch of 12 samples has \(12, 3\)"):
        masks.drop(torch.ones(5, 3), 0.5, Placement(Grid(1, 1)))
