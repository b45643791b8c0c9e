"""The launcher of a detached run is killed, and another one takes over: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launcher.ready import completed, warm
from tests.patience import PATIENCE_S
from zmqtrain.launcher.continued import Left
from zmqtrain.launcher.forkserver import ADOPTED

TASK = """
import os, sys, time
import torch
from torch import nn
import zmqtrain

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        while index == 0 and not os.path.exists("go"):  # as long as the test takes
            time.sleep(0.01)
        return torch.full((4,), float(index % 7)), torch.ones(1)

def task():
    print("a worker begins")
    return zmqtrain.Task(
        model=lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.001),
        train_data=Data(), eval_data=None,
    )
"""
TOPOLOGY = """
[job]
name = "trial"
task = "task.py:task"
steps = 60
timeout = "30 s"
checkpoint_every = 20
alone = "{alone}"
[[hosts]]
name = "a"
slots = 2
[compute]
groups = 2
batch_size = 64
[exchange]
kind = "model_server"
shards = 1
"""


def zmqtrain(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command, variables = [sys.executable, "-m", "zmqtrain", *words], {**os.environ, **environ}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


class Detached:
    """A detached run that waits for the file ``go``."""

    def __init__(self, folder: Path, alone: str = "10 min", **environ: str) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "task.py").write_text(TASK)
        (folder / "trial.toml").write_text(TOPOLOGY.format(alone=alone))
        launched = zmqtrain(folder, "launch", "trial.toml", "--run-dir", "run", "--detach", **environ)
        assert launched.returncode == 0, launched
        self.launcher = int((self.run / "pid").read_text().split()[0])

    def kill_launcher(self) -> None:
        self.until("both workers have begun", lambda: self.kinds()["start"] == 2)
        os.kill(self.launcher, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(self.launcher)] if psutil.pid_exists(self.launcher) else [], timeout=PATIENCE_S)

    def until(self, what: str, happens: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while not happens():
            assert time.monotonic() < end, f"{what} does not happen"
            time.sleep(0.05)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    def kinds(self) -> Counter[str]:
        return Counter(event["kind"] for event in self.events())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    Left.of(tmp_path / "run").stop()


@pytest.fixture(scope="module")
def warmed() -> Iterator[dict[str, str]]:
    """The environment with which agents find their fork server; the test of nothing that is left starts it anew."""
    with warm() as started:
        yield {ADOPTED: started.variables[ADOPTED]}


def test_another_launcher_takes_over_and_everything_is_recorded_once(folder: Path, warmed: dict[str, str]) -> None:
    run = Detached(folder, **warmed)
    refused = completed(folder, "launch", "--continue", "run")
    assert (refused.returncode, "another launcher leads this run" in refused.stderr) == (74, True), refused
    run.kill_launcher()
    (folder / "go").touch()  # they train on alone
    continued = zmqtrain(folder, "launch", "--continue", "run")
    assert continued.returncode == 0, continued
    assert "this launcher has taken over (epoch 2)" in continued.stdout
    summary = json.loads((run.run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["samples"]) == ("done", 60, 2 * 60 * 64)
    steps = Counter((event["rank"], event["step"]) for event in run.events() if event["kind"] == "step")
    assert steps == {(rank, step): 1 for rank in range(2) for step in range(60)}
    assert {kind: run.kinds()[kind] for kind in ("join", "running", "continued", "leave", "exit", "ended")} == {
        "join": 4,
        "running": 1,
        "continued": 1,
        "leave": 4,
        "exit": 3,
        "ended": 1,
    }
    for rank in range(2):
        assert (run.run / "logs" / f"worker-{rank}.log").read_text().count("a worker begins") == 1
    assert [path.name for path in sorted((run.run / "checkpoints").iterdir())] == ["step-00000040", "step-00000060"]
    assert not (run.run / "journal").exists()
    assert not Left.of(run.run).processes
    again = completed(folder, "launch", "--continue", "run")
    assert (again.returncode, "it has ended" in again.stderr) == (74, True), again


def test_what_a_dead_launcher_has_left_is_stopped(folder: Path) -> None:
    run = Detached(folder)
    run.kill_launcher()
    left = Left.of(run.run).processes
    assert len(left) == 1
    family = [*left, *left[0].children(recursive=True)]
    stopped = completed(folder, "stop", "run")
    assert stopped.returncode == 0, stopped
    assert "stopped 1 agent on this machine, with all roles" in stopped.stdout
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def test_nobody_takes_over(folder: Path, warmed: dict[str, str]) -> None:
    """All processes end by themselves once the time alone is over."""
    run = Detached(folder, alone="1 s", **warmed)
    left = Left.of(run.run).processes
    family = [*left, *left[0].children(recursive=True)]
    run.kill_launcher()
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    late = completed(folder, "launch", "--continue", "run")
    assert (late.returncode, "none of its agents is left" in late.stderr) == (74, True), late
