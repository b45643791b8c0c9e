"""What is refused before there is a run, and which run ``--resume`` means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.cli.lead import lead, run_to_resume
from zmqtrain.errors import CheckpointError, UsageError
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology


def made(name: str, time: int, *, checkpoint: bool = True) -> None:
    folder = Path("runs") / name
    (folder / "checkpoints" / "step-00000010" if checkpoint else folder).mkdir(parents=True)
    (folder / "topology.toml").write_text("")
    os.utime(folder / "topology.toml", (time, time))


def test_latest_is_the_run_of_this_job_that_has_begun_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made("mnist-002", 3_000)
    made("mnist-001", 2_000)
    (Path("runs") / "mnist-001" / "report.html").write_text("")  # changes the folder's time
    made("mnist-003", 4_000, checkpoint=False)
    made("mnist-large-001", 5_000)  # another job's
    assert run_to_resume("latest", "mnist") == Path("runs/mnist-002")
    assert run_to_resume("latest", "mnist-large") == Path("runs/mnist-large-001")
    assert run_to_resume("mnist-001", "mnist") == Path("runs/mnist-001")
    with pytest.raises(UsageError, match="no run of digits"):
        run_to_resume("latest", "digits")


def test_weights_that_are_not_there_are_refused_without_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    topology = Topology.model_validate({"job": {"weights": "lost.safetensors", "task": "examples.digits:task"}})
    with pytest.raises(CheckpointError, match=r"\[job\] weights: lost.safetensors does not exist"):
        lead(Path("a.toml"), topology, place(topology), (), LaunchOptions(), data_path=None, emulation=None, engine=None)
    assert not Path("runs").exists()
