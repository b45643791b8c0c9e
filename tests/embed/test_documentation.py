"""The programs of docs/embedding.md and docs/sessions.md, run as they stand there."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import zmqtrain
from tests.embed.world import topology_of
from zmqtrain.net.memory import MemoryNetwork

DOCS = Path(__file__).parents[2] / "docs"
MODELLED = """
[job]
steps = 20
[[hosts]]
name = "h[1-2]"
address = "10.0.0.1"
slots = 1
[compute]
groups = 2
device = "modelled"
profile = "lenet"
[exchange]
kind = "allreduce"
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
"""


def page(name: str) -> dict[str, Any]:
    """What the page's programs define, one after another. Those without a definition are parts of a loop."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL):
        if "def " in block:
            exec(block, found)
    return found


async def test_the_scheduler_runs_its_jobs(tmp_path: Path) -> None:
    scheduler = await page("embedding.md")["schedule"](tmp_path)
    assert set(scheduler.errors) == {"too-large-a-batch"}, "one that fails does not end the others"
    assert isinstance(scheduler.errors["too-large-a-batch"], zmqtrain.ZmqTrainError)
    for name in ("one-group", "two-groups"):
        losses = scheduler.losses[name]
        assert len(losses) == 30
        assert losses[-1] < losses[0]
        assert load_file(tmp_path / name / "model.safetensors")["weight"].shape == (1, 8)


def test_the_job_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(MODELLED)
    seconds = page("embedding.md")["seconds_of"](str(tmp_path / "job.toml"))
    assert seconds > 0
    assert math.isfinite(seconds)


async def test_the_divided_model_is_the_whole_one() -> None:
    divided_forward = page("embedding.md")["divided_forward"]
    topology = topology_of(compute={"group_size": 2, "batch_size": 6})
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def model() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    models = [model() for _ in range(2)]  # before the threads begin, which share torch's generator
    async with zmqtrain.open_run(topology, network=MemoryNetwork(), model=False) as run, asyncio.TaskGroup() as tasks:
        outputs = [tasks.create_task(divided_forward(run, rank, models[rank], inputs)) for rank in range(2)]
    whole = model()(inputs)
    for rank, output in enumerate(outputs):
        mine = output.result()
        assert mine.shape[0] == 6
        torch.testing.assert_close(mine, whole if mine.shape == whole.shape else whole.tensor_split(2, 1)[rank])


@pytest.mark.parametrize("name", ["train", "train_on", "train_and_keep"])
def test_the_sessions_train(name: str) -> None:
    """In a world of one, where the last one is not stopped."""
    train = page("sessions.md")[name]
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(160, 6, generator=generator), torch.arange(160) % 3)
    if name == "train_on":
        assert isinstance(train(data, batch_size=16, epochs=2), nn.Module)
    else:
        train(torch.utils.data.DataLoader(data, batch_size=16))
