"""Another worker, or another model server, takes part in a run of real processes while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launched import Launched
from tests.launcher.ready import warm
from tests.patience import PATIENCE_S
from zmqtrain.cli.drain import run_drain
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


SERVERS = """
[job]
task = "task.py"
steps = 10000000
timeout = "60 s"
oversubscribe = true
[compute]
groups = 2
batch_size = 12
[exchange]
kind = "model_server"
shards = 2
replicas = 1
max_servers = 3
"""


def test_another_model_server_joins_gets_a_shard_and_leaves_again(tmp_path: Path) -> None:
    """This machine has two servers, and the one that joins counts as another host."""
    (tmp_path / "task.py").write_text(TASK.replace("Linear(8, 4), torch.nn.BatchNorm1d(4)", "Linear(8, 4), torch.nn.Tanh()"))
    (tmp_path / "trial.toml").write_text(SERVERS)
    with warm() as started, Launched(tmp_path, "trial.toml") as run:
        run.wait_for(r"worker/\d \| trains", 2)
        environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), ADOPTED: started.variables[ADOPTED]}
        command = (sys.executable, "-m", "zmqtrain", "join", str(run.run))
        other = subprocess.Popen(command, cwd=tmp_path.parent, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            moved = await_moves(run, 1)
            assert moved[0]["server"] == "server/2"
            with pytest.raises(UsageError, match="max_servers = 3"):
                run_join(str(run.run), show=False)
            assert run_drain(str(run.run), "joined-1") == 0
            assert [each["shard"] for each in await_moves(run, 2)] == [moved[0]["shard"]] * 2
            said, _ = other.communicate(timeout=120)
            assert other.returncode == 0, said
            run.signal(signal.SIGINT)
            assert run.end() == INTERRUPTED, run
        finally:
            other.kill()
            other.wait()
        checkpoint = Checkpoint(find_latest(run.run / "checkpoints"))
        assert {path.name for path in checkpoint.folder.glob("server-*.msgpack")} == {"server-0.msgpack", "server-1.msgpack"}


def await_moves(run: Launched, count: int) -> list[dict[str, Any]]:
    """What the first events say by which a shard was on another server."""
    end = time.monotonic() + PATIENCE_S
    while True:
        lines = (run.run / "events.jsonl").read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [event["values"] for event in events if event["kind"] == "moved"]
        if len(found) >= count or time.monotonic() > end:
            return found
        time.sleep(0.02)
