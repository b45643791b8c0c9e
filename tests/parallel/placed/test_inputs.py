"""Inputs that have no samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import run_ranks


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, places: Tensor, *, mixing: Tensor) -> Tensor:
        return mixing @ self.layer(x + self.places(places))


def inputs(samples: slice) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, 6, generator=generator, dtype=torch.float64)
    return x[samples], torch.tensor([[2, 0, 1]]), torch.randn(3, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("grid", ["2x1", "2x2", "1x2"])
def test_positions_and_masks(grid: str) -> None:
    torch.manual_seed(1)
    model = Positions().double()
    ordinary = copy.deepcopy(model)
    x, places, mixing = inputs(slice(None))
    expected = ordinary(x, places, mixing=mixing)
    (expected**2).sum().backward()

    def run(fabric: Fabric) -> Any:
        parallel = parallelize(copy.deepcopy(model), grid, fabric=fabric, whole=["layer", "places"])
        parallel.batch.size = 4
        mine = slice(*parallel.samples(4))
        x, places, mixing = inputs(mine)
        output = parallel(x, places, mixing=parallel.same(mixing))
        (output**2).sum().backward()
        sum_gradients(parallel, fabric, parallel.shards_by_name())
        return mine, output.detach(), [each.grad for each in parallel.parameters()]

    rows, columns = map(int, grid.split("x"))
    for mine, output, gradients in run_ranks(rows * columns, run)[0]:
        torch.testing.assert_close(output, expected.detach()[mine])
        torch.testing.assert_close(gradients, [each.grad for each in ordinary.parameters()])


def test_too_few_samples_are_refused() -> None:
    """Also where the tensor could be one for all samples, or the one of a column."""

    def run(fabric: Fabric) -> None:
        parallel = parallelize(Positions().double(), "1x2", fabric=fabric)
        x, places, mixing = inputs(slice(0, 1))
        parallel.batch.size = 4
        with pytest.raises(UsageError, match=r"given a tensor of shape \(1, .*\); of a batch of 4 its column has 2"):
            parallel(x, places, mixing=parallel.same(mixing))
        parallel.batch.size = 3
        if fabric.rank == 0:
            with pytest.raises(UsageError, match=r"column has 2 samples, and they .* give a tensor without samples by same\(\)"):
                parallel(inputs(slice(0, 2))[0], places, mixing=parallel.same(mixing))

    run_ranks(2, run)
