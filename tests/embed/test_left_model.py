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


async def script(run: OwnRun, rank: int, models: dict[int, nn.Module]) -> None:
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

            for step in range(STEPS):
                await session.run(train, step)
            session.report("eval", quality=0.25)
            await thread.submit(lambda: core.crossing.wait(core.guard(core.finish()), "the end of the session"))
        finally:
            await core.close()
            await thread.close(1.0)


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
