"""PReLU of divided channels, and other functions that take them as they are."""

from __future__ import annotations

import pytest
from torch import nn

from tests.parallel.model_world import GRIDS, compare, random, randomised
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model import PReLU, Site
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("weights", [1, 7])
def test_prelu_on_every_grid(grid: Grid, weights: int) -> None:
    placement = Placement.over_rows(grid, 1, 7)
    compare(
        randomised(nn.PReLU(weights)),
        lambda layer, site: PReLU(layer, site, placement.divisions),
        random(5, 7, 3),
        grid,
        source=placement,
        target=placement,
    )


def test_elementwise_functions_need_no_other_layer() -> None:
    placement = Placement.over_rows(Grid(3, 2), 1, 7)
    for layer in (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.ELU()):
        compare(
            layer, lambda layer, _: layer, random(5, 7), placement.grid, source=placement, target=placement, predict=lambda *_: {}
        )


def test_divisions_of_other_channels_are_refused() -> None:
    site = Site("act", Grid(1, 1), ThreadFabric(ThreadWorld(1), 0))
    with pytest.raises(UsageError, match="act has 7 channels, and the divisions 6"):
        PReLU(nn.PReLU(7), site, ((0, 6),))
