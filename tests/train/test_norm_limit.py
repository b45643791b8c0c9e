"""Servers of asynchronous groups limit how fast gradients grow, and those of synchronous ones do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.exchange.look_ahead import horizon, steps_ahead
from zmqtrain.exchange.norm_limit import NormLimit

GROUPS, LR, MOMENTUM, SLOPE = 4, 0.5, 0.9, [1.0, -2.0, 4.0, 0.25, -8.0]
#: By which the slope is multiplied, step by step.
TIMES = [1.0, 2.0, 0.5, 8.0, 1.0, 4.0, 16.0, 1.0, 3.0, 2.0]


class Slope(nn.Module):
    """A loss that is linear in its parameters, with samples that are all the same: the order of groups makes no difference, where
    none begins a step before all have ended the one before."""

    times: list[float]

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.times = times
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        output = inputs @ self.weight * (self.times[int(self.steps)] if self.training else 1.0)
        self.steps += self.training
        return output


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


async def trained(
    folder: Path, steps: int, staleness: Any, times: list[float] = TIMES, resume: Path | None = None, **exchange: Any
) -> Run:
    inputs = torch.tensor(SLOPE, dtype=torch.float64).expand(400, 5).contiguous()
    data = TensorDataset(inputs, torch.zeros(400))
    recipe = Recipe(train_data=data, eval_data=data, model=lambda: Slope(times), loss=mean, optimizer=optimizer)
    topology = topology_of(
        job={"steps": steps, "elastic": False, "eval_every": 0, "checkpoint_every": 5, "keep_checkpoints": 9},
        compute={"groups": GROUPS, "group_size": 1, "batch_size": 4},
        exchange={"kind": "model_server", "staleness": staleness, **exchange},
    )
    result = await run(topology, recipe, folder=folder, resume=resume)
    assert not result.errors, result.errors
    return result


def plain(staleness: float, times: list[float]) -> tuple[Tensor, list[float]]:
    """The same update by update, with no server; and by what its gradients were multiplied."""
    m = MOMENTUM ** (1 / GROUPS)
    lr = LR * (1 - m) / ((1 - MOMENTUM) * GROUPS)
    far = steps_ahead(m, horizon(staleness))
    slope = torch.tensor(SLOPE, dtype=torch.float64)
    base, velocity, step = torch.zeros_like(slope), torch.zeros_like(slope), torch.zeros_like(slope)
    limit, factors = NormLimit([0]), []
    for each in times:
        for _ in range(GROUPS):
            factors.append(limit.factor({0: float((each * slope).norm())}))
            velocity = m * velocity + factors[-1] * each * slope
            step = -lr * velocity
            base = base + step
    return base + far * step, factors


def model_of(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")["weight"]


@pytest.mark.parametrize(("staleness", "expected"), [("async", 3.0), ({"bound": 2}, 3.0), ({"bound": 0}, 1.5)], ids=str)
async def test_gradients_that_do_not_grow_are_left_alone(staleness: Any, expected: float, tmp_path: Path) -> None:
    wanted, factors = plain(expected, [1.0] * 10)
    assert set(factors) == {1.0}
    await trained(tmp_path, 10, staleness, [1.0] * 10)
    torch.testing.assert_close(model_of(tmp_path), wanted, rtol=1e-12, atol=1e-12)


async def test_servers_limit_gradients_that_grow(tmp_path: Path) -> None:
    wanted, factors = plain(1.5, TIMES)
    assert min(factors) < 0.1
    await trained(tmp_path, 10, {"bound": 0})
    torch.testing.assert_close(model_of(tmp_path), wanted, rtol=1e-6, atol=1e-6)  # the norm is one of single precision


@pytest.mark.parametrize("exchange", [{}, {"snapshot": True}, {"shards": 2}], ids=str)
async def test_a_resumed_run_goes_on_with_the_same_limit(exchange: dict[str, Any], tmp_path: Path) -> None:
    """Where the groups' order makes no difference it has the same bits as one that was not interrupted."""
    await trained(tmp_path / "straight", 10, {"bound": 0}, **exchange)
    await trained(tmp_path / "first", 5, {"bound": 0}, **exchange)
    await trained(tmp_path / "second", 10, {"bound": 0}, resume=tmp_path / "first", **exchange)
    assert torch.equal(model_of(tmp_path / "second"), model_of(tmp_path / "straight"))


async def test_synchronous_groups_are_not_limited(tmp_path: Path) -> None:
    """To the bit what one process has."""
    await trained(tmp_path, 10, "sync")
    weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    alone = optimizer([weight])
    for each in TIMES:
        weight.grad = each * torch.tensor(SLOPE, dtype=torch.float64)
        alone.step()
    assert torch.equal(model_of(tmp_path), weight.detach())
