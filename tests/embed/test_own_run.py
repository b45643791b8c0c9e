"""What a run of one's own refuses, at once and with a reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain.embed.own_run import OwnRun, open_run
from zmqtrain.embed.session import join
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.schema import Topology
from zmqtrain.train.task import Task

TOPOLOGY = Topology.from_dict({"job": {"name": "own", "steps": 2}, "compute": {"device": "cpu", "threads": 1, "batch_size": 4}})


def task() -> Task:
    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    return Task(
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
    )


async def ended(folder: Any) -> OwnRun:
    async with open_run(TOPOLOGY, network=MemoryNetwork(), checkpoints=folder) as run:
        await run.role("worker/0", task=task())
    return run


async def test_a_folder_may_be_a_string_and_a_run_that_has_ended_takes_no_roles(tmp_path: Path) -> None:
    run = await ended(str(tmp_path / "checkpoints"))
    assert (tmp_path / "model.safetensors").exists()
    with pytest.raises(UsageError, match="the run has ended"):
        await run.role("worker/0", task=task())


async def test_a_role_that_runs_already_is_refused(tmp_path: Path) -> None:
    opened = open_run(TOPOLOGY, network=MemoryNetwork(), checkpoints=tmp_path / "checkpoints")
    async with opened as run, run.context("worker/0"):
        with pytest.raises(UsageError, match="worker/0 runs in this process already: each role must be run once"):
            await run.role("worker/0", task=task())


@pytest.mark.parametrize(
    ("peer", "given", "error", "said"),
    [
        ("worker/7", task(), UsageError, "has no role 'worker/7': it has worker/0"),
        ("worker/0", task, TaskError, r"is a function: call it, as in task=task\(\)"),
        ("worker/0", {"model": None}, TaskError, "is a dict"),
    ],
)
async def test_what_is_no_role_or_no_task_is_refused(peer: str, given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        async with open_run(TOPOLOGY, network=MemoryNetwork(), model=False) as run:
            await run.role(peer, task=given)


@pytest.mark.parametrize("given", ["job.toml", {"job": {"steps": 1}}], ids=str)
async def test_a_file_is_no_topology_yet(given: Any) -> None:
    with pytest.raises(UsageError, match="load_topology"):
        async with open_run(given):
            pass


async def test_a_session_that_has_ended_computes_nothing_more() -> None:
    async with join() as session:
        assert await session.run(int, "7") == 7
    with pytest.raises(UsageError, match="has ended"):
        await asyncio.wait_for(session.run(int, "7"), 20)
