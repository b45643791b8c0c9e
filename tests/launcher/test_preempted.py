"""Real runs whose machines are taken away: they stop with a checkpoint, and go on where they were."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.launcher.launched import Launched, prepare
from zmqtrain.run.preemption import PREEMPTED

TASK = """
import os, time, torch
from torch.utils.data import TensorDataset
from zmqtrain import Task

def loss(output, target):
    time.sleep(0.02)
    return torch.nn.functional.mse_loss(output, target)

def task():
    print("ready", os.getpid())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    return Task(
        model=lambda: torch.nn.Linear(8, 1),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        train_data=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    )
"""
TOPOLOGY = """
[job]
task = "task.py"
steps = 60
checkpoint_every = 60
timeout = "20 s"
oversubscribe = true
[compute]
groups = 2
batch_size = 8
[exchange]
staleness = "sync"
"""
STAYS = """
import time, zmqtrain
with zmqtrain.session() as session:
    print("ready")
    while True:
        session.barrier()
        time.sleep(0.05)
"""


def test_a_run_that_is_preempted_goes_on_in_its_directory(tmp_path: Path) -> None:
    """First the launcher is told, and every process of it; then an agent, by the other signal. In the end all is as if nothing had
    been."""
    folder, straight = prepare(tmp_path / "preempted", TASK, TOPOLOGY), prepare(tmp_path / "straight", TASK, TOPOLOGY)
    with Launched(folder, "trial.toml", "--continue") as run:
        run.wait_for("^step ")
        for process in run.processes():
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.send_signal(signal.SIGUSR1)
        assert run.end() == PREEMPTED, run
        summary = run.json("summary.json")
        assert summary["status"] == "preempted"
        assert 0 < summary["steps"] < 60
        (kept,) = (run.run / "checkpoints").iterdir()
        assert kept.name == f"step-{summary['steps']:08d}"
        assert (kept / "model.safetensors").samefile(run.run / "model.safetensors")
        assert run.json("model.json")["step"] == summary["steps"]
        run.wait_for("the model after step")
        run.wait_for(r"preempted after .* --resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZMQTRAIN_ON_TERM", "checkpoint")
        with Launched(folder, "trial.toml", "--continue") as run:
            run.wait_for("^step ")
            agent = run.find("zmqtrain agent")
            for process in [agent, *agent.children(recursive=True)]:
                process.send_signal(signal.SIGTERM)
            assert run.end() == PREEMPTED, run
            run.wait_for("agent/localhost asks to stop")
            assert summary["steps"] < run.json("summary.json")["steps"] < 60
    with Launched(folder, "trial.toml", "--continue") as run, Launched(straight, "trial.toml") as other:
        assert run.end() == other.end() == 0, run
        models = [each.run / "checkpoints" / "step-00000060" / "model.safetensors" for each in (run, other)]
        assert models[0].read_bytes() == models[1].read_bytes()
        assert not (run.run / "error.json").exists()


def test_a_script_without_a_model_is_halted(tmp_path: Path) -> None:
    (tmp_path / "trial.toml").write_text(
        TOPOLOGY.replace('task = "task.py"\n', "").replace("steps = 60\ncheckpoint_every = 60\n", "")
    )
    (tmp_path / "script.py").write_text(STAYS)
    with Launched(tmp_path, "trial.toml", "script.py") as run:
        run.wait_for("ready", 2)
        os.kill(run.pid, signal.SIGUSR1)
        assert run.end() == PREEMPTED, run
        assert "no model could be left: there is no replicated model yet" in run.error_text
