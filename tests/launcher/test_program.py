"""Runs that a program starts: what cannot be launched is refused before any process, and one small run, followed to its model."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zmqtrain
from tests.launcher.ready import warm
from tests.patience import PATIENCE_S
from zmqtrain.errors import CheckpointError, RunFailedError, TopologyError, UsageError
from zmqtrain.launcher.program.run import INSIDE
from zmqtrain.launcher.zygote import RUNNING
from zmqtrain.topology.target import job_of

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task(wrong=False):
    if wrong:
        raise ValueError("this task is wrong")
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Task(model=lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=data, eval_data=data)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a task and a topology file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_task.py").write_text(TASK)
    (tmp_path / "job.toml").write_text('[job]\ntask = "own_task.py"\nsteps = 5\n')
    return tmp_path


@pytest.fixture(scope="module")
def warmed() -> Iterator[str]:
    """Where launchers find a zygote; `test_a_run_is_followed_to_its_model` starts all from nothing."""
    with warm() as started:
        yield started.variables[RUNNING]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that only this program's search path has."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    yield importlib.import_module("far_task")
    del sys.modules["far_task"]


def test_settings_replace_those_of_a_file(folder: Path) -> None:
    job = job_of("job.toml", {"epochs": 3, "groups": 2, "oversubscribe": True}, {"exchange.kind": "gossip"})
    assert (job.topology.job.epochs, job.topology.job.steps) == (3, None)
    assert (job.topology.compute.groups, job.topology.exchange.kind) == (2, "gossip")
    assert job.topology.job.name == "job"
    assert job.file == folder / "job.toml"


def test_a_mapping_and_a_topology_are_jobs(folder: Path) -> None:
    values = {"job": {"task": "own_task.py:task"}, "hosts": [{"name": "one", "slots": 4}]}
    job = job_of(values, {"compute": {"groups": 2}}, {})
    assert job.topology.compute.groups == 2
    assert values == {"job": {"task": "own_task.py:task"}, "hosts": [{"name": "one", "slots": 4}]}
    again = job_of(job.topology, {"seed": 7}, {})
    assert (again.topology.job.seed, again.topology.hosts) == (7, job.topology.hosts)


def test_a_function_is_named_as_workers_import_it(folder: Path, module: ModuleType) -> None:
    job = job_of(module.task, {"args": {"wrong": False}}, {})
    assert job.topology.job.task == "far_task:task"
    assert job.topology.job.python_path == (str(folder / "elsewhere"),)
    assert job.topology.job.name == "far_task"


def _cell() -> Any:
    """A function as a cell of a notebook defines it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def task(): pass", "<ipython-input-1>", "exec"), names)
    return names["task"]


@pytest.mark.parametrize(
    ("target", "settings", "changes", "says"),
    [
        ("no-such.toml", {}, {}, "does not exist"),
        ("digits", {}, {}, "neither a topology file nor a task"),
        ("own_task.py:tusk", {}, {}, "did you mean 'task'"),
        ("own_task.py", {"group": 2}, {}, "did you mean 'groups'"),
        ("own_task.py", {"epochs": "many"}, {}, r"launch\(epochs='many'\)"),
        ("own_task.py", {}, {"kind": "gossip"}, "write section.key"),
        ("own_task.py", {}, {"exchange.kind": "gosip"}, "exchange.kind"),
        ("own_task.py", {"args": {"x": object()}}, {}, "an object cannot be a setting"),
        ("own_task.py", {"groups": "auto"}, {}, "cannot search"),
        ({"job": {"steps": 1}}, {}, {}, "names no task"),
        (3, {}, {}, "give a topology file"),
        (lambda: None, {}, {}, "no lambda"),
        (_cell(), {}, {}, "%%writefile task.py"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    folder: Path, target: Any, settings: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        zmqtrain.launch(target, set=changes, **settings)
    assert not (folder / "runs").exists()


def test_faults_of_a_file_have_their_lines(folder: Path) -> None:
    (folder / "job.toml").write_text('[job]\ntask = "own_task.py"\nstep = 5\n')
    with pytest.raises(TopologyError, match=r"job.toml:3"):
        zmqtrain.launch("job.toml", groups=2)


def test_a_process_of_a_run_launches_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSIDE, str(os.getpid()))
    with pytest.raises(UsageError, match="__main__"):
        zmqtrain.launch("job.toml")


def test_a_directory_in_use_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        zmqtrain.launch("job.toml", run_dir=folder)


def test_a_run_that_a_sink_refuses_leaves_nothing(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {"prometheus": {"port": taken.getsockname()[1]}}
        run = zmqtrain.launch("own_task.py:task", observe={"to": ["prometheus", "csv"], "options": options})
        with pytest.raises(RunFailedError, match="already in use") as caught:
            run.wait(PATIENCE_S)
    assert (caught.value.verdict, caught.value.exit_code) == ("topology", 2)
    assert not run.folder.exists()


async def test_a_run_is_followed_to_its_model(folder: Path) -> None:
    """Files beside the task that are named like modules of Python's and others break no process of the run."""
    for name in ("argparse", "json", "random", "select", "zmqtrain"):
        (folder / f"{name}.py").write_text("raise ImportError('this is another module')\n")
    parents = "import psutil\nprint([process.cmdline()[0] for process in psutil.Process().parents()[:2]])\n"
    (folder / "own_task.py").write_text(TASK + parents)
    async with zmqtrain.launch("own_task.py:task", steps=6, batch_size=16, threads=1, device="cpu") as run:
        with pytest.raises(CheckpointError, match="no model"):
            run.model()
        ended = asyncio.ensure_future(run)
        lines = [line async for line in run]
        summary = await ended
        assert run.wait(PATIENCE_S) == summary
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(6))
    assert [line["values"]["eval_loss"] for line in lines if line["kind"] == "eval"] == [summary["eval"]["eval_loss"]]
    assert (summary["status"], run.summary, run.running) == ("done", summary, False)
    assert run.folder == folder / "runs" / "own_task-001"
    # The fork server, and what imports torch: forked from the launcher, as by the command.
    assert "['zmqtrain zygote', 'zmqtrain zygote']" in (run.folder / "logs" / "worker-0.log").read_text()
    before = torch.random.get_rng_state()
    model = run.model()
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, value in load_file(run.folder / "model.safetensors").items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_a_failure_is_raised_with_its_verdict(folder: Path, warmed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNING, warmed)
    with (
        pytest.raises(RunFailedError, match="this task is wrong") as caught,
        zmqtrain.launch("own_task.py:task", args={"wrong": True}, threads=1, device="cpu") as run,
    ):
        list(run)
    assert (caught.value.verdict, caught.value.exit_code, caught.value.folder) == ("user code", 3, run.folder)
    assert run.summary is not None


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_run_is_stopped(folder: Path, checkpoint: bool, warmed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNNING, warmed)
    with zmqtrain.launch("own_task.py:task", steps=10**6, batch_size=16, threads=1, device="cpu") as run:
        next(line for line in run if line["kind"] == "step")
        with pytest.raises(TimeoutError, match="goes on"):
            run.wait(0)
        run.stop(checkpoint=checkpoint)
        summary = run.wait()
    assert summary["status"] == "interrupted"
    if checkpoint:
        assert summary["checkpoints"]["newest"] == summary["steps"]
