"""Gradients of a divided model are clipped by the norm of the whole, under every exchange, as in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.pairwise import pairwise
from tests.train.test_divided import data_of
from tests.train.test_worker import alone
from tests.train.world import Recipe, run, topology_of
from zmqtrain.arena import Arena, Region, shared_memory_missing
from zmqtrain.parallel.gradient_norm import GradientNorm
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.testing.threads import run_ranks

STEPS, BATCH, LIMIT = 4, 8, 0.2

EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "sync": {"kind": "model_server", "staleness": "sync", "shards": 1},
    "sync shards": {"kind": "model_server", "staleness": "sync", "shards": 3, "split_size": 2048},
    "bound": {"kind": "model_server", "staleness": {"bound": 1}, "shards": 2},
    "async": {"kind": "model_server", "staleness": "async"},
    "gossip": {"kind": "gossip", "gossip": {"granularity": "batch"}},
    "mean": {"kind": "averaging", "every": 2},
    "elastic": {"kind": "averaging", "every": 2, "averaging": {"method": "elastic"}},
    "outer": {"kind": "averaging", "every": 2, "averaging": {"method": "outer"}},
}
GRIDS = ["2x1", "1x2", "2x2"]


def network() -> nn.Module:
    """Parameters in parts of different sizes, and some that all rows have whole."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.Tanh(), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(5 * 9 * 7, 7), nn.Tanh(),
        nn.Linear(7, 3),
    ).double()  # fmt: skip


def recipe() -> Recipe:
    return Recipe(
        model=network, train_data=data_of(72), eval_data=None, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)
    )


def whole(shared: Recipe, group: int, grid: str) -> torch.Tensor:
    """A group's parameters, of the parts of its rows."""
    rows, columns = map(int, grid.split("x"))
    models = [shared.models[f"worker/{group * rows * columns + row}"] for row in range(rows)]
    found = []
    for name, parameter in network().named_parameters():
        parts = [dict(model.named_parameters())[name].detach() for model in models]
        found.append((parts[0] if parts[0].shape == parameter.shape else torch.cat(parts)).flatten())
    return torch.cat(found)


async def trained(
    exchange: dict[str, Any], groups: int, grid: str, batch: int = BATCH, region: Region | None = None
) -> list[torch.Tensor]:
    """The parameters of each group."""
    shared, size = recipe(), math.prod(map(int, grid.split("x")))
    topology = topology_of(
        job={"steps": STEPS, "elastic": False},
        compute={"groups": groups, "group_size": size, "batch_size": batch, "grid": grid},
        optimizer={"clip_norm": LIMIT},
        exchange=exchange,
    )
    result = await run(topology, shared, region=region)
    assert not result.errors, result.errors
    return [whole(shared, group, grid) for group in range(groups)]


@pairwise({"exchange": EXCHANGES, "grid": GRIDS})
async def test_a_group_trains_as_one_process(exchange: dict[str, Any], grid: str) -> None:
    (found,) = await trained(exchange, 1, grid)
    expected, loose = (alone(recipe(), STEPS, BATCH, clip=clip) for clip in (LIMIT, 0.0))
    assert not torch.allclose(expected, loose, rtol=0.1), "clipping makes a difference"
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)  # sums in another order


@pytest.mark.parametrize(("exchange", "grid"), [("allreduce", "2x2"), ("sync", "2x1"), ("sync shards", "2x2")])
async def test_groups_in_step_train_as_one_process(exchange: str, grid: str) -> None:
    """The norm is of the mean of all groups' gradients."""
    for found in await trained(EXCHANGES[exchange], 2, grid, BATCH // 2):
        torch.testing.assert_close(found, alone(recipe(), STEPS, BATCH, clip=LIMIT), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("exchange", "grid"), [("gossip", "2x2"), ("mean", "2x1"), ("elastic", "2x2"), ("outer", "2x1")])
async def test_groups_with_models_of_their_own_train_as_such_workers(exchange: str, grid: str) -> None:
    """Each clips by the norm of its own gradient."""
    found, expected = await trained(EXCHANGES[exchange], 2, grid), await trained(EXCHANGES[exchange], 2, "1x1")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
@pytest.mark.parametrize("exchange", ["allreduce", "mean"])
async def test_sums_in_the_hosts_memory_are_clipped_alike(exchange: str) -> None:
    (found,) = await trained(EXCHANGES[exchange], 1, "2x2", region=Arena.create(16, 1 << 20))
    torch.testing.assert_close(found, alone(recipe(), STEPS, BATCH, clip=LIMIT), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.0, math.inf, -math.inf])
@pytest.mark.parametrize("grid", ["2x2", "3x1"])
def test_norms_of_any_order_are_torchs(norm_type: float, grid: str) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            for name, parameter in network().named_parameters()
        }

    expected = torch.nn.utils.get_total_norm(list(gradients().values()), norm_type)

    def rank(fabric: Any) -> torch.Tensor:
        shards = parallelize(network(), grid, fabric=fabric).shards_by_name()
        parts = {name: shards[name].cut(each, shards[name].members.index(fabric.rank)) for name, each in gradients().items()}
        return GradientNorm(shards, fabric)(parts, norm_type)

    ranks, _ = run_ranks(math.prod(map(int, grid.split("x"))), rank)
    for found in ranks:
        assert torch.equal(found, ranks[0])
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
