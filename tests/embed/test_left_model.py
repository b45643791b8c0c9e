"""What scripts leave in the run's directory: the model given to `replicate`, as it is for the whole run at the end."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from zmqtrain.data.background import BackgroundThread
from zmqtrain.embed.core import Core
from zmqtrain.embed.own_run import OwnRun, open_run
from zmqtrain.embed.session import AsyncSession
from zmqtrain.errors import ConnectivityError, RunStopped
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.schema import Topology

EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "sync": {"kind": "model_server", "staleness": "sync"},
    "async": {"kind": "model_server", "staleness": "async", "shards": 2, "split_size": 64},
    "gossip": {"kind": "gossip"},
    "averaging": {"kind": "averaging", "every": 4},
    "elastic": {"kind": "averaging", "every": 2, "averaging": {"method": "elastic"}},
}
STEPS, LR = 6, 0.5


class Slope(nn.Module):
    """Linear in its parameters, so that each step adds what is known to them, whatever the others do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(11, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :5] @ self.first + inputs[:, 5:] @ self.second


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(-8, 9, (4, 16), generator=generator).double()


async def script(run: OwnRun, rank: int, models: dict[int, nn.Module], steps: int = STEPS) -> None:
    """A worker whose loop is the user's own."""
    async with run.context(f"worker/{rank}") as context:
        core, thread = Core(context), BackgroundThread("compute")
        try:
            session = AsyncSession(core, thread)
            model = Slope()
            model, optimizer = await session.replicate(model, torch.optim.SGD(model.parameters(), lr=LR))
            models[rank] = model

            def train(step: int) -> None:
                if rank == 2:
                    time.sleep(0.005)
                optimizer.zero_grad()
                model(batch(rank, step)).mean().backward()
                optimizer.step()

            for step in range(steps):
                await session.run(train, step)
            session.report("eval", quality=0.25)
            await thread.submit(lambda: core.bridge.call(core.guard(core.finish()), "the end of the session"))
        finally:
            await core.close(thread)


@pytest.mark.parametrize("kind", EXCHANGES)
async def test_a_script_leaves_the_runs_model(kind: str, tmp_path: Path) -> None:
    exchange = EXCHANGES[kind]
    topology = Topology.model_validate(
        {
            "job": {"name": "script", "timeout": 20.0, "oversubscribe": True, "elastic": False},
            "compute": {"groups": 3, "bucket_size": 64, "device": "cpu"},
            "exchange": exchange,
            "optimizer": {"look_ahead": "none"},  # or asynchronous groups' steps would be a third
        }
    )
    models: dict[int, nn.Module] = {}
    opened = open_run(topology, network=MemoryNetwork(), checkpoints=tmp_path / "checkpoints")
    async with opened as run, asyncio.TaskGroup() as tasks:
        for role in run.placement.roles:
            tasks.create_task(script(run, role.index, models) if role.kind == "worker" else run.role(role.peer))
    left = load_file(tmp_path / "model.safetensors")
    for model in models.values():
        assert all(torch.equal(left[name], tensor) for name, tensor in model.state_dict().items()), "each script holds it, too"
    gradients = sum(batch(rank, step).mean(0) for rank in range(3) for step in range(STEPS))
    assert isinstance(gradients, Tensor)
    steps_of_all = kind == "async"  # else each step is one of the mean gradient
    expected = -LR * gradients / (1 if steps_of_all else 3)
    if kind != "elastic":
        torch.testing.assert_close(torch.cat([left["first"], left["second"]]), expected, rtol=1e-12, atol=1e-12)
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["step"] == STEPS
    assert about["metrics"] == {"quality": 0.25}
    assert about["versions"]["torch"] == torch.__version__


async def test_groups_that_are_not_in_step_may_end_at_different_ones(tmp_path: Path) -> None:
    """The model is that of all steps of all groups, and the record has the largest staleness."""
    topology = Topology.model_validate(
        {
            "job": {"name": "script", "timeout": 20.0, "oversubscribe": True},
            "compute": {"groups": 2, "bucket_size": 64, "device": "cpu"},
            "exchange": {"kind": "model_server", "staleness": "async"},
            "optimizer": {"look_ahead": "none"},
        }
    )
    models: dict[int, nn.Module] = {}
    steps: list[dict[str, Any]] = []

    def note(_peer: str, events: list[dict[str, Any]]) -> None:
        steps.extend(event["values"] for event in events if event["kind"] == "step")

    opened = open_run(topology, network=MemoryNetwork(), checkpoints=tmp_path / "checkpoints", on_report=note)
    async with opened as run, asyncio.TaskGroup() as tasks:
        tasks.create_task(run.role("server/0"))
        for rank in range(2):
            tasks.create_task(script(run, rank, models, steps=3 + 2 * rank))
    left = load_file(tmp_path / "model.safetensors")
    gradients = sum(batch(rank, step).mean(0) for rank in range(2) for step in range(3 + 2 * rank))
    assert isinstance(gradients, Tensor)
    torch.testing.assert_close(torch.cat([left["first"], left["second"]]), -LR * gradients, rtol=1e-12, atol=1e-12)
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["step"] == 5
    assert about["metrics"] == {}, "worker 0 reported after 3 steps, of another model"
    assert len(steps) == 8
    assert all(values["staleness_max"] >= values["staleness"] for values in steps if values["staleness"] is not None)
    assert any(values["staleness_max"] is not None for values in steps)


class AskedToStop:
    """Asks all workers to stop once one of them has made so many steps, as the launcher does."""

    def __init__(self, run: OwnRun, after: int) -> None:
        self.after, self._run = after, run
        self.now = asyncio.Event()
        self.step: int | None = None

    async def ask(self) -> None:
        await self.now.wait()
        self.step = await self._run.stop()


async def stopped_script(run: OwnRun, rank: int, models: dict[int, nn.Module], asked: AskedToStop, overlap: bool | None) -> None:
    """A loop without an end, which optimizer.step() ends."""
    loop = asyncio.get_running_loop()
    async with run.context(f"worker/{rank}") as context:
        core, thread = Core(context), BackgroundThread("compute")
        try:
            session = AsyncSession(core, thread)
            model = Slope()
            model, optimizer = await session.replicate(model, torch.optim.SGD(model.parameters(), lr=LR), overlap=overlap)
            models[rank] = model
            ends: list[str] = []
            codes: set[object] = set()

            def train() -> None:
                step = 0
                while True:
                    if rank == 2:
                        time.sleep(0.005)
                    optimizer.zero_grad()
                    model(batch(rank, step)).mean().backward()
                    try:
                        optimizer.step()
                    except RunStopped as stop:
                        ends.append(str(stop))
                        codes.add(stop.code)
                        break
                    step += 1
                    if step == asked.after:
                        loop.call_soon_threadsafe(asked.now.set)
                with torch.no_grad():
                    model(batch(rank, step))  # it may be looked at
                for more in (optimizer.step, lambda: model(batch(rank, step)).mean().backward()):
                    try:
                        more()
                    except RunStopped as stop:
                        ends.append(str(stop))

            await session.run(train)
            assert codes == {0}
            assert set(ends) == {f"the run was asked to stop, and has stopped after {asked.step} steps"}
            assert len(ends) == 3, "nothing can be trained any more"
            await thread.submit(lambda: core.bridge.call(core.guard(core.finish()), "the end of the session"))
        finally:
            await core.close(thread)


@pytest.mark.parametrize("overlap", [None, True, False])
@pytest.mark.parametrize("kind", EXCHANGES)
async def test_a_script_that_is_stopped_leaves_the_runs_model(kind: str, overlap: bool | None, tmp_path: Path) -> None:
    topology = Topology.model_validate(
        {
            "job": {"name": "script", "timeout": 20.0, "oversubscribe": True, "elastic": False},
            "compute": {"groups": 3, "bucket_size": 64, "device": "cpu"},
            "exchange": EXCHANGES[kind],
            "optimizer": {"look_ahead": "none"},  # or asynchronous groups' steps would be a third
        }
    )
    models: dict[int, nn.Module] = {}
    network = MemoryNetwork()
    kinds: dict[str, list[int]] = {}

    def note(_peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            kinds.setdefault(event["kind"], []).append(event["step"])

    opened = open_run(topology, network=network, checkpoints=tmp_path / "checkpoints", on_report=note)
    async with opened as run, asyncio.TaskGroup() as tasks:
        asked = AskedToStop(run, after=5)
        for role in run.placement.roles:
            if role.kind == "worker":
                tasks.create_task(stopped_script(run, role.index, models, asked, overlap))
            else:
                tasks.create_task(run.role(role.peer))
        await asked.ask()
    assert asked.step is not None
    assert kinds["stopped"] == [asked.step] * 3
    assert "finish" not in kinds
    left = load_file(tmp_path / "model.safetensors")
    for model in models.values():
        assert all(torch.equal(left[name], tensor) for name, tensor in model.state_dict().items()), "each script holds it, too"
    gradients = sum(batch(rank, step).mean(0) for rank in range(3) for step in range(asked.step))
    assert isinstance(gradients, Tensor)
    expected = -LR * gradients / (1 if kind == "async" else 3)
    if kind != "elastic":
        torch.testing.assert_close(torch.cat([left["first"], left["second"]]), expected, rtol=1e-12, atol=1e-12)
    assert json.loads((tmp_path / "model.json").read_text())["step"] == asked.step


async def test_a_script_without_a_model_stops_at_no_step(tmp_path: Path) -> None:
    """Whoever asks is told at once."""
    topology = Topology.model_validate({"job": {"name": "script"}, "compute": {"groups": 1, "device": "cpu"}})
    async with open_run(topology, network=MemoryNetwork()) as run, run.context("worker/0") as context:
        core = Core(context)
        with pytest.raises(ConnectivityError, match="no replicated model"):
            await run.stop()
        await core.finish()
        await core.close()
