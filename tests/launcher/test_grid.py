"""Groups that divide their model, in processes over ZeroMQ: the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.launched import Launched

TASK = """
import torch, zmqtrain
from torch import nn
from torch.utils.data import TensorDataset

def task():
    def model():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 30), nn.ReLU(), nn.Linear(30, 5),
        ).double()
    x = torch.randn(96, 3, 15, 15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.randint(5, (96,), generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, y)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return zmqtrain.Task(
        model=model, loss=nn.functional.cross_entropy, optimizer=sgd, train_data=data, eval_data=data
    )
"""

TOPOLOGY = """
[job]
task = "task.py"
steps = 8
oversubscribe = true
timeout = "20 s"
[compute]
group_size = {size}
batch_size = 24
grid = "{grid}"
device = "cpu"
[parallel]
statistics = "whole"
verify = {verify}
{plan}
[exchange]
kind = "{kind}"
"""
PLAN = "".join(
    f'[[parallel.layers]]\nlayer = "{name}"\nchoice = "{choice}"\ngrid = "2x2"\n'
    for name, choice in (("0", "domain"), ("4", "domain"), ("7", "model"), ("9", "model"))
)


def losses(folder: Path, grid: str, plan: str = "") -> list[float]:
    """Of each step, by rank 0."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    rows, columns = map(int, grid.split("x"))
    text = TOPOLOGY.format(size=rows * columns, grid=grid, kind="allreduce", plan=plan, verify="true")
    (folder / "trial.toml").write_text(text)
    with Launched(folder, "trial.toml") as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        (evaluation,) = [event["values"] for event in events if event["kind"] == "eval"]
    means: dict[int, list[float]] = {}
    for event in events:
        if event["kind"] == "step" and event["rank"] % rows == 0:
            means.setdefault(event["step"], []).append(event["values"]["loss"])
    assert len(means) == 8
    return [*(sum(means[step]) / columns for step in range(8)), evaluation["eval_loss"]]


def evaluated(folder: Path, grid: str, *arguments: str) -> float:
    """The loss on the task's evaluation data at the end, of a run whose model servers clip gradients."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    rows, columns = map(int, grid.split("x"))
    plan = "shards = 2\n[optimizer]\nclip_norm = 0.3\n[data]\nshuffle = 'ring'\n"
    text = TOPOLOGY.replace("{plan}\n", "") + plan
    (folder / "trial.toml").write_text(text.format(size=rows * columns, grid=grid, kind="model_server", verify="false"))
    with Launched(folder, "trial.toml", *arguments) as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    (evaluation,) = [event["values"] for event in events if event["kind"] == "eval"]
    return float(evaluation["eval_loss"])


def test_a_clipped_run_on_the_ring_resumes_on_another_grid(tmp_path: Path) -> None:
    """With more workers, in processes: what one worker has at the end."""
    expected = evaluated(tmp_path / "alone", "1x1")
    evaluated(tmp_path / "first", "2x1", "--set", "job.steps=4", "--set", "job.checkpoint_every=4")
    found = evaluated(tmp_path / "second", "2x2", "--resume", str(tmp_path / "first" / "run"))
    assert found == pytest.approx(expected, rel=1e-10)


def test_a_grid_in_processes_trains_as_one_process(tmp_path: Path) -> None:
    """Domain-parallel convolutions, model-parallel linear layers. With model servers: the run on the ring."""
    expected = losses(tmp_path / "alone", "1x1")
    found = losses(tmp_path / "divided", "2x2", PLAN)
    assert found == pytest.approx(expected, rel=1e-10)
