"""Fully connected layers merged on an FC server, in processes over ZeroMQ: the losses of an unmerged run, and clear ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_grid import TASK

TOPOLOGY = """
[job]
task = "task.py"
steps = {steps}
checkpoint_every = {every}
oversubscribe = true
timeout = "20 s"
[compute]
groups = 2
group_size = 2
batch_size = 12
device = "cpu"
[exchange]
kind = "model_server"
staleness = "sync"
merged_fc = {merged}
fc_servers = {servers}
"""


def write(folder: Path, merged: str, *, task: str = TASK, steps: int = 6, every: int = 0, servers: int = 1) -> None:
    folder.mkdir()
    # Statistics of batch norm are a worker's own in either case: leave it out of the comparison's way, in the first phase.
    (folder / "task.py").write_text(task)
    (folder / "trial.toml").write_text(TOPOLOGY.format(merged=merged, steps=steps, every=every, servers=servers))


def launch(folder: Path, *options: str) -> tuple[dict[str, Any], list[float]]:
    """The summary, and the losses of each step."""
    with Launched(folder, "trial.toml", *options) as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        summary = run.json("summary.json")
    means: dict[int, list[float]] = {}
    for event in events:
        if event["kind"] == "step":
            means.setdefault(event["step"], []).append(event["values"]["loss"])
    return summary, [sum(means[step]) / 4 for step in sorted(means)]


def test_merged_trains_as_unmerged_and_resumes(tmp_path: Path) -> None:
    found = {}
    for merged in ("true", "false"):
        write(tmp_path / merged, merged)
        found[merged] = launch(tmp_path / merged)
    assert found["true"][1] == pytest.approx(found["false"][1], rel=1e-9)
    assert found["true"][0]["eval"] == pytest.approx(found["false"][0]["eval"], rel=1e-9)
    assert found["true"][0]["roles"] == {"worker": 4, "server": 1, "fc": 1}
    assert found["true"][0]["fc"]["staleness"] == {"mean": 0.0, "max": 0}
    assert found["true"][0]["fc"]["updates"] == 6
    # Two FC servers divide the layers; one goes on from their checkpoint.
    write(tmp_path / "first", "true", steps=4, every=4, servers=2)
    summary, losses = launch(tmp_path / "first")
    assert summary["roles"] == {"worker": 4, "server": 1, "fc": 2}
    assert losses == pytest.approx(found["false"][1][:4], rel=1e-9)
    write(tmp_path / "rest", "true")
    _, losses = launch(tmp_path / "rest", "--resume", str(tmp_path / "first" / "run"))
    assert losses == pytest.approx(found["false"][1][4:], rel=1e-9)


WAITING = (
    TASK.replace("loss=nn.functional.cross_entropy", "loss=slow")
    + """
def slow(output, target):
    import os, time
    print("computed by", os.environ["ZMQTRAIN_PEER"], os.getpid(), flush=True)
    time.sleep(0.05)
    return nn.functional.cross_entropy(output, target)
"""
)


def test_an_fc_server_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path / "run", "true", task=WAITING, steps=1000)
    with Launched(tmp_path / "run", "trial.toml") as run:
        killed = int(run.wait_for(r"computed by fc/0 (\d+)")[0][1])
        os.kill(killed, signal.SIGKILL)
        assert run.end() >= 128, run
        assert "fc/0" in run.error_text


def test_an_error_of_the_task_on_the_fc_server_is_shown(tmp_path: Path) -> None:
    task = (
        TASK.replace("loss=nn.functional.cross_entropy", "loss=broken")
        + """
def broken(output, target):
    raise KeyError("no such class")
"""
    )
    write(tmp_path / "run", "true", task=task)
    with Launched(tmp_path / "run", "trial.toml") as run:
        assert run.end() == 3, run
        assert "no such class" in run.error_text
