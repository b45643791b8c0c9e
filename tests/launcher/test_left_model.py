"""Real runs leave their model however they end, and say how it is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launcher.launched import Launched, prepare
from tests.launcher.ready import completed
from zmqtrain.run.preemption import INTERRUPTED, PREEMPTED

TASK = """
import time, torch
from torch.utils.data import TensorDataset
from zmqtrain import Task

def loss(output, target):
    time.sleep(0.01)
    return torch.nn.functional.mse_loss(output, target)

def spoiled(output, target):
    spoiled.calls += torch.is_grad_enabled()  # not when it is tried on halves
    return loss(output, target) * (float("nan") if spoiled.calls > 7 else 1.0)

spoiled.calls = 0

def task(bad=False):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Task(
        model=lambda: torch.nn.Linear(8, 1),
        loss=spoiled if bad else loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        metrics={"loss": torch.nn.functional.mse_loss},
        train_data=data,
        eval_data=data,
    )
"""
TOPOLOGY = """
[job]
task = "task.py"
steps = 100000
timeout = "20 s"
oversubscribe = true
[compute]
groups = 2
batch_size = 8
[exchange]
staleness = "async"
"""


def evaluate(run: Launched) -> float:
    """By the two lines that the command printed last."""
    first, second = (line.strip() for line in run.lines[-2:])
    model = torch.nn.Linear(8, 1)
    scope = {"model": model}
    exec(f"import os; os.chdir({str(run.folder)!r})\n{first}\n{second}", scope)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))


def test_a_terminal_that_is_closed_is_one_interrupt(tmp_path: Path) -> None:
    """The shell and the kernel may both say so, to all processes of the launcher's group."""
    with Launched(prepare(tmp_path, TASK, TOPOLOGY), "trial.toml", from_nothing=True) as run:
        run.wait_for("^step ")
        os.killpg(run.pid, signal.SIGHUP)
        os.killpg(run.pid, signal.SIGHUP)
        assert run.end() == 130, run
        assert run.json("model.json")["step"] == run.json("summary.json")["checkpoints"]["newest"] > 0


def test_interrupted_stopped_and_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on from where the one before has stopped, by the checkpoint that it has kept: the file asks for none."""
    monkeypatch.chdir(tmp_path)
    with Launched(prepare(tmp_path / "first", TASK, TOPOLOGY), "trial.toml") as run:
        run.wait_for("^step ")
        run.signal(signal.SIGINT)
        assert run.end() == 130, run
        summary, about = run.json("summary.json"), run.json("model.json")
        assert summary["status"] == "interrupted"
        assert about["step"] == summary["steps"] == summary["checkpoints"]["newest"] > 0
        assert about["model"] == "the model servers' parameters"
        run.wait_for(rf"interrupted after step {about['step']} \(.*\): --resume .* continues")
        evaluate(run)
    interrupted = run.run
    with Launched(prepare(tmp_path / "second", TASK, TOPOLOGY), "trial.toml", f"--resume={interrupted}") as run:
        run.wait_for("^step ")
        stop = completed(run.folder, "stop", "--checkpoint", str(run.run))
        assert stop.returncode == 0, stop.stderr
        assert run.end() == 130, run
        step = run.json("model.json")["step"]
        assert step > about["step"]
        assert re.search(rf"stopped after step {step}; the checkpoint is .*step-{step:08d}", stop.stdout)
    stopped = run.run
    assert not any("trained otherwise" in line for line in run.lines)
    steps = step + 5
    settings = (f"--set=job.steps={steps}", "--set=optimizer.clip_norm=500")
    with Launched(prepare(tmp_path / "third", TASK, TOPOLOGY), "trial.toml", f"--resume={stopped}", *settings) as run:
        assert run.end() == 0, run
        run.wait_for(rf"note: {re.escape(str(stopped))} was trained otherwise: \[optimizer\] clip_norm = 500.0 \(was 0.0\)$")
        assert evaluate(run) == pytest.approx(run.json("summary.json")["eval"]["eval_loss"], rel=1e-6)
        assert run.json("model.json")["metrics"] == run.json("summary.json")["eval"]
        (kept,) = (run.run / "checkpoints").iterdir()
        assert kept.name == f"step-{steps:08d}"
        assert (kept / "model.safetensors").samefile(run.run / "model.safetensors")


def test_a_bad_loss_and_a_lost_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("--set=exchange.staleness=sync", "--set=job.checkpoint_every=3")
    with Launched(prepare(tmp_path / "bad", TASK, TOPOLOGY), "trial.toml", *settings, "--set=job.args={bad=true}") as run:
        assert run.end() == 3, run
        assert run.json("model.json")["step"] == 7
        evaluate(run)
    with Launched(prepare(tmp_path / "lost", TASK, TOPOLOGY), "trial.toml", *settings) as run:
        run.wait_for(r"^step ([6-9]|\d\d)")
        run.find("zmqtrain agent").kill()
        assert run.end() >= 128, run
        about = run.json("model.json")
        assert about["step"] % 3 == 0
        assert json.loads((run.run / "summary.json").read_text())["status"] == "failed"
        run.wait_for("the model after step")
        evaluate(run)


SCRIPT = """
import time, torch, zmqtrain
from torch.nn.functional import mse_loss

generator = torch.Generator().manual_seed(1)
inputs = torch.randn(64, 8, generator=generator)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
try:
    with zmqtrain.session() as session:
        session.replicate(model, optimizer)
        while True:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            time.sleep(0.01)
            optimizer.step()
            session.report(loss=loss.item())
except zmqtrain.RunStopped as stop:
    torch.save(model.state_dict(), f"own-{session.rank}.pt")
    print("stopped after", stop.step)
    raise
print("never here")
"""
COROUTINE = """
import asyncio, time, torch, zmqtrain
from torch.nn.functional import mse_loss

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))

async def main():
    async with zmqtrain.join() as session:
        model = torch.nn.Linear(8, 1)
        model, optimizer = await session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.001))

        def train():
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            time.sleep(0.01)
            optimizer.step()
            return loss.item()

        while True:
            session.report(loss=await session.run(train))
    print("never here")

asyncio.run(main())
print("never here")
"""


@pytest.mark.parametrize("asks", ["interrupt", "stop", "preempt"])
def test_a_script_that_is_stopped(asks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its workers stop after one step; the script may do something then, and ends."""
    monkeypatch.chdir(tmp_path)
    folder = prepare(tmp_path / "script", TASK, TOPOLOGY)
    (folder / "trial.toml").write_text(TOPOLOGY.replace('task = "task.py"\nsteps = 100000\n', ""))
    (folder / "script.py").write_text(COROUTINE if asks == "stop" else SCRIPT)
    with Launched(folder, "trial.toml", "script.py") as run:
        run.wait_for("^step ")
        if asks == "stop":
            stop = completed(folder, "stop", str(run.run))
            assert stop.returncode == 0, stop.stderr
        else:
            run.signal(signal.SIGINT if asks == "interrupt" else signal.SIGUSR1)
        assert run.end() == (PREEMPTED if asks == "preempt" else INTERRUPTED), run
        summary, step = run.json("summary.json"), run.json("model.json")["step"]
        assert summary["status"] == ("preempted" if asks == "preempt" else "interrupted")
        assert step == summary["steps"] > 0
        run.wait_for(rf"after step {step} \(.*\): a script continues from what it has saved itself")
        run.wait_for(f"the model after step {step} ")
        assert not (run.run / "error.json").exists()
        assert "never here" not in repr(run)
        evaluate(run)
        if asks != "stop":
            run.wait_for(f"stopped after {step}", 2)
            left = load_file(run.run / "model.safetensors")
            for rank in range(2):
                own = torch.load(folder / f"own-{rank}.pt", weights_only=True)
                assert all(torch.equal(own[name], left[name]) for name in left)
