"""The sample ring with groups that divide their model: the rows of a column have the same samples, lap after lap."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.pairwise import pairwise
from tests.train.test_clipping_on_grids import network, whole
from tests.train.test_divided import data_of
from tests.train.world import Recipe, run, topology_of
from zmqtrain.data.ring import Ring
from zmqtrain.train.random_state import seed_everything


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws in reading a sample."""

    def __init__(self) -> None:
        self.data = data_of(22)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype), target


EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "gossip": {"kind": "gossip"},
    "servers": {"kind": "model_server", "staleness": "sync", "shards": 2},
}


async def trained(exchange: str, ring: str, grid: str, *, groups: int = 2, noisy: bool = False) -> list[Tensor]:
    """The parameters of each group after two laps."""
    recipe = Recipe(
        model=network, train_data=Noisy() if noisy else data_of(22), eval_data=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.2)
    )
    topology = topology_of(
        job={"epochs": 2, "elastic": False},
        compute={"groups": groups, "group_size": math.prod(map(int, grid.split("x"))), "batch_size": 4, "grid": grid},
        data={"shuffle": "ring", "ring": ring},
        exchange=EXCHANGES[exchange],
    )
    result = await run(topology, recipe)
    assert not result.errors, result.errors
    return [whole(recipe, group, grid) for group in range(groups)]


def alone() -> Tensor:
    """Plain torch on the samples that both groups have in a step, together."""
    seed_everything(1)
    model, (inputs, targets), ring = network(), data_of(22).tensors, Ring.of(22, 2, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(2 * ring.steps):
        ids = torch.from_numpy(np.concatenate([ring.indices(step, group) for group in range(2)]))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[ids]), targets[ids]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pairwise({"exchange": list(EXCHANGES), "ring": ["indices", "tensors"], "grid": ["2x1", "2x2", "1x2"]})
async def test_grids_train_as_one_process_or_as_single_workers(exchange: str, ring: str, grid: str) -> None:
    """Parts and batches differ in size by one."""
    found = await trained(exchange, ring, grid)
    expected = await trained(exchange, ring, "1x1") if exchange == "gossip" else [alone()] * 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)  # sums in another order


@pytest.mark.parametrize("ring", ["indices", "tensors"])
async def test_rows_draw_the_same_for_a_sample(ring: str) -> None:
    """What the dataset draws. Other samples on a row would end the run before its first step."""
    (found,), (expected,) = [await trained("allreduce", ring, grid, groups=1, noisy=True) for grid in ("2x1", "1x1")]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
