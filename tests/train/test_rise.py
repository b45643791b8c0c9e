"""The learning rate of asynchronous groups rises at the beginning of a run, once, and of that alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.exchange.look_ahead import RISE, horizon, risen, steps_ahead

GROUPS, LR, MOMENTUM, SLOPE = 4, 0.5, 0.9, [1.0, -2.0, 4.0, 0.25, -8.0]


class Slope(nn.Module):
    """A loss that is linear in its parameters, with samples that are all the same: the order of groups makes no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=10_000)


async def trained(folder: Path, steps: int, staleness: Any, resume: Path | None = None, **fields: Any) -> Run:
    inputs = torch.tensor(SLOPE, dtype=torch.float64).expand(400, 5).contiguous()
    data = TensorDataset(inputs, torch.zeros(400))
    given: dict[str, Any] = {"train_data": data, "eval_data": data, "model": Slope, "loss": mean, "optimizer": optimizer, **fields}
    topology = topology_of(
        job={"steps": steps, "elastic": False, "eval_every": 0, "checkpoint_every": 5, "keep_checkpoints": 9},
        compute={"groups": GROUPS, "group_size": 1, "batch_size": 4},
        exchange={"kind": "model_server", "staleness": staleness},
    )
    result = await run(topology, Recipe(**given), folder=folder, resume=resume)
    assert not result.errors, result.errors
    return result


def plain(updates: int, staleness: float, scheduled: float = 1.0) -> Tensor:
    """The same update by update, with no server."""
    m = MOMENTUM ** (1 / GROUPS)
    lr = scheduled * LR * (1 - m) / ((1 - MOMENTUM) * GROUPS)
    far = steps_ahead(m, horizon(staleness))
    slope = torch.tensor(SLOPE, dtype=torch.float64)
    base, velocity, step = torch.zeros_like(slope), torch.zeros_like(slope), torch.zeros_like(slope)
    for update in range(updates):
        velocity = m * velocity + slope
        step = -lr * math.sqrt(min(1.0, (update + 1) / (RISE * horizon(staleness)))) * velocity
        base = base + step
    return base + far * step


def model_of(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")["weight"]


@pytest.mark.parametrize(("staleness", "expected"), [("async", 3.0), ({"bound": 2}, 3.0), ({"bound": 0}, 1.5)], ids=str)
async def test_servers_let_the_rate_rise(staleness: Any, expected: float, tmp_path: Path) -> None:
    await trained(tmp_path, 10, staleness)
    assert risen(GROUPS * 10, RISE * horizon(expected)) < 1, "it is still rising"
    torch.testing.assert_close(model_of(tmp_path), plain(GROUPS * 10, expected), rtol=1e-12, atol=1e-12)


async def test_on_top_of_the_task_s_schedule(tmp_path: Path) -> None:
    await trained(tmp_path, 10, "async", schedule=schedule)
    torch.testing.assert_close(model_of(tmp_path), plain(GROUPS * 10, 3.0, scheduled=0.5), rtol=1e-12, atol=1e-12)


async def test_a_resumed_run_does_not_begin_anew(tmp_path: Path) -> None:
    """Where the groups' order makes no difference it has the same bits as one that was not interrupted."""
    await trained(tmp_path / "straight", 10, "async")
    await trained(tmp_path / "first", 5, "async")
    await trained(tmp_path / "second", 10, "async", resume=tmp_path / "first")
    assert torch.equal(model_of(tmp_path / "second"), model_of(tmp_path / "straight"))


async def test_synchronous_groups_have_their_rate_at_once(tmp_path: Path) -> None:
    """To the bit, as one process has it."""
    await trained(tmp_path, 10, "sync")
    weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    alone = optimizer([weight])
    for _ in range(10):
        weight.grad = torch.tensor(SLOPE, dtype=torch.float64)
        alone.step()
    assert torch.equal(model_of(tmp_path), weight.detach())
