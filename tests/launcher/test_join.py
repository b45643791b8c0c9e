"""Another worker takes part in a run of real processes while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.launched import Launched
from tests.launcher.ready import warm
from zmqtrain.cli.join import run_join
from zmqtrain.errors import UsageError
from zmqtrain.launcher.forkserver import ADOPTED
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.train.checkpoint.folder import Checkpoint, RunShape, find_latest

#: Every worker says when it computes its first loss. Those that train leave the processors to the one that comes.
TASK = """
import time
import torch
from torch.utils.data import TensorDataset
from zmqtrain import Task

calls = 0

def loss(output, target):
    global calls
    calls += 1
    if calls == 1:
        print("trains")
    time.sleep(0.02)
    return torch.nn.functional.mse_loss(output, target)

def task():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 8, generator=generator)
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001),
        train_data=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    )
"""
TOPOLOGY = """
[job]
task = "task.py"
steps = 10000000
timeout = "60 s"
oversubscribe = true
elastic = true
max_workers = 3
[compute]
groups = 1
group_size = 2
batch_size = 12
[exchange]
kind = "allreduce"
"""


def test_one_more_joins_trains_and_is_in_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "trial.toml").write_text(TOPOLOGY)
    with warm() as started, Launched(tmp_path, "trial.toml") as run:
        run.wait_for(r"worker/\d \| trains", 2)
        with pytest.raises(UsageError, match="no other machine can join"):
            run_join(str(run.run), show=True)
        capsys.readouterr()
        environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), ADOPTED: started.variables[ADOPTED]}
        command = (sys.executable, "-m", "zmqtrain", "join", str(run.run))
        other = subprocess.Popen(command, cwd=tmp_path.parent, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            run.wait_for(r"worker/2 \| trains")
            with pytest.raises(UsageError, match="max_workers = 3"):
                run_join(str(run.run), show=False)
            run.signal(signal.SIGINT)
            assert run.end() == INTERRUPTED, run
            said, _ = other.communicate(timeout=120)
            assert other.returncode == 0, said
        finally:
            other.kill()
            other.wait()
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        members = [event["values"]["members"] for event in events if event["kind"] == "view"]
        assert members[-1] == ["worker/0", "worker/1", "worker/2"]
        checkpoint = Checkpoint(find_latest(run.run / "checkpoints"))
        checkpoint.require(RunShape("allreduce", 1, 2, 0))
        assert {path.name for path in checkpoint.folder.glob("worker-*.msgpack")} == {f"worker-{rank}.msgpack" for rank in range(3)}
