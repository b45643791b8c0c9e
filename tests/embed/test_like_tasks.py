"""A session trains what a task trains, under every exchange whose result does not depend on who is faster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed.own_run import open_run
from zmqtrain.embed.session import Session
from zmqtrain.errors import UsageError
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.schema import Topology
from zmqtrain.train.task import Task

EPOCHS, SAMPLES = 2, 64
EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "allreduce every 2": {"kind": "allreduce", "every": 2},
    "sync": {"kind": "model_server", "staleness": "sync", "shards": 2, "split_size": 128},
    "sync, snapshots": {"kind": "model_server", "staleness": "sync", "snapshot": True},
    "async, one group": {"kind": "model_server", "staleness": "async", "shards": 2, "split_size": 128},
    "bound 2, one group": {"kind": "model_server", "staleness": {"bound": 2}},
    "gossip": {"kind": "gossip"},
    "gossip of gradients": {"kind": "gossip", "gossip": {"exchange": "gradients"}},
    "gossip on a ring": {"kind": "gossip", "gossip": {"topology": "ring", "rotation": False}},
    "averaging": {"kind": "averaging"},
    "averaging every 3": {"kind": "averaging", "every": 3},
    "elastic averaging": {"kind": "averaging", "every": 2, "averaging": {"method": "elastic"}},
    "outer": {"kind": "averaging", "every": 2, "averaging": {"method": "outer"}},
    "averaging late": {"kind": "averaging", "every": 4, "averaging": {"overlap_steps": 1, "fragments": 2}},
}


ON_GRIDS = ("sync", "async, one group", "gossip", "outer")


def topology(name: str, grid: str | None = None, **job: Any) -> Topology:
    groups = 1 if "one group" in name else 2
    compute = {"groups": groups, "group_size": 2, "batch_size": 8, **({"parts": [3, 5]} if grid is None else {"grid": grid})}
    return topology_of(job={"checkpoint_every": 0, **job}, compute=compute, exchange=EXCHANGES[name])


def network() -> nn.Module:
    """Always the same, without torch's generator, which the threads share."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64), torch.arange(SAMPLES) % 3)


async def by_a_task(topology: Topology, folder: Path) -> dict[str, Tensor]:
    task = Task(model=network, loss=cross_entropy, optimizer=sgd, train_data=data())
    async with open_run(topology, network=MemoryNetwork(), checkpoints=folder / "checkpoints") as run, asyncio.TaskGroup() as tasks:
        for role in run.placement.roles:
            tasks.create_task(run.role(role.peer, task=task))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("name", "grid"), [*((name, None) for name in EXCHANGES), *((name, "2x1") for name in ON_GRIDS)])
async def test_a_session_is_a_task(name: str, grid: str | None, tmp_path: Path) -> None:
    models: dict[int, nn.Module] = {}
    steps: list[int] = []

    def program(session: Session) -> None:
        model = models[session.rank] = network()
        _, optimizer = session.replicate(model, sgd(model.parameters()))
        for epoch in range(EPOCHS):
            for inputs, target in session.batches(data(), epoch):
                optimizer.zero_grad()
                cross_entropy(model(inputs), target).backward()
                optimizer.step()
        steps.append(session.step)

    given = topology(name, grid)
    await asyncio.to_thread(run_sessions, given, program)
    expected = await by_a_task(topology(name, grid, epochs=EPOCHS), tmp_path)
    assert set(steps) == {EPOCHS * SAMPLES // (8 * given.compute.groups)}
    assert not all(torch.equal(expected[key], tensor) for key, tensor in network().state_dict().items()), "it has trained"
    for model in models.values():
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"compute": {"group_size": 2, "grid": "auto"}}, r'\[compute\] grid = "auto" is for tasks'),
        ({"compute": {"group_size": 2}, "exchange": {"kind": "model_server", "merged_fc": True}}, "merged_fc needs"),
        ({"job": {"weights": "given.safetensors"}}, r"\[job\] weights is for tasks"),
        ({"job": {"checkpoint_every": 5}}, r"\[job\] checkpoint_every is for tasks"),
        ({"job": {"checkpoint_every": "30 s"}}, r"\[job\] checkpoint_every is for tasks"),
        ({"job": {"steps": 5}}, r"\[job\] steps is for tasks"),
        ({"job": {"epochs": 2}}, r"\[job\] epochs is for tasks"),
        ({"job": {"until": {"metric": "loss", "reaches": 0.1}, "eval_every": 5}}, r"\[job\] until is for tasks"),
        ({"job": {"eval_every": 5}}, r"\[job\] eval_every is for tasks"),
        ({"optimizer": {"scale_lr": "linear"}}, r"\[optimizer\] scale_lr is for tasks"),
        ({"optimizer": {"lr": 0.1}}, r"\[optimizer\] lr and a number as momentum are for tasks"),
        ({"compute": {"accumulate": 2}}, r"\[compute\] precision and accumulate are for tasks"),
        ({"compute": {"channels_last": True}}, r"\[compute\] channels_last is for tasks"),
        ({"job": {"keep_checkpoints": 3}}, r"\[job\] keep_checkpoints is for tasks"),
    ],
    ids=str,
)
def test_what_only_a_task_can_have_is_refused(
    sections: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(network().state_dict(), "given.safetensors")

    def program(session: Session) -> None:
        model = network()
        session.replicate(model, sgd(model.parameters()))

    with pytest.raises(UsageError, match=why):
        run_sessions(topology_of(**sections), program)
