"""Trials as launches, and ``groups = "auto"``: real processes on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_tune import TASK
from zmqtrain.cli.launch import run_launch
from zmqtrain.cli.simulate import run_simulate
from zmqtrain.cli.tune_launch import JobRuns, Watching, job_with
from zmqtrain.cli.tune_runs import Folders, LaunchedRuns
from zmqtrain.errors import UsageError
from zmqtrain.topology.load import load_topology
from zmqtrain.tune.hear import Hearing
from zmqtrain.tune.trial import Setting, Trial


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(TASK)
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
[job]
task = "work.py:task"
python_path = ["{tmp_path}"]
steps = 60
timeout = "20 s"
oversubscribe = true
[compute]
groups = "auto"
group_size = 2
batch_size = 16
[tune]
momenta = [0.0]
learning_rates = [0.1]
probe = 4
cold = 0
"""
    )
    return path


def test_a_launch_finds_its_groups_and_then_trains_to_its_end(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One probe and the training are real; what the other probes measure is given."""
    real = LaunchedRuns.run
    probed: list[Trial] = []

    def probe(runs: LaunchedRuns, trial: Trial):  # type: ignore[no-untyped-def]
        probed.append(trial)
        if trial.phase == "learning rate":
            return real(runs, trial)
        hearing = Hearing(trial, 2 // trial.setting.groups)
        for number in range(trial.updates):
            for rank in range(2):
                seconds = 0.01 * (1.5 if trial.setting.groups == 1 else 2.0)
                values = {"loss": 1.0 / trial.setting.groups, "seconds": seconds}
                hearing.hear({"kind": "step", "time": number * seconds, "step": number, "values": values}, rank)
        return hearing.outcome()

    monkeypatch.setattr(LaunchedRuns, "run", probe)
    folder = tmp_path / "run"
    assert run_launch(file, run_dir=folder) == 0
    shown = capsys.readouterr().out
    assert "done: the job is through" in shown
    row = json.loads((folder / "summary.json").read_text())["strategies"][0]
    assert (row["reached"], row["groups"]) == (True, 2)
    trained = folder / "omnivore" / f"{row['trials'] - 1:03d}"
    job = load_topology(trained / "topology.toml")
    assert (job.compute.groups, job.compute.group_size, job.job.steps, job.optimizer.lr) == (2, 1, 30, 0.1)
    summary = json.loads((trained / "summary.json").read_text())
    assert (summary["status"], summary["samples"]) == ("done", 60 * 16)


def test_a_job_goes_on_with_what_is_left_of_it(file: Path) -> None:
    topology = load_topology(file)
    trial = Trial(7, Setting(2, 0.3, 0.05), 10**6, "train", "train", "because", start=3)
    job = job_with(topology, trial, 25)
    assert (job.job.steps, job.job.seed, job.compute.groups, job.compute.auto_groups) == (13, 1 + 4, 2, False)
    assert (job.optimizer.lr, job.optimizer.momentum, job.job.checkpoint_every) == (0.05, 0.3, 1000)
    assert job_with(topology, trial, None).job.steps == 60


def test_drift_stops_the_job_once(file: Path) -> None:
    class View:
        def __init__(self) -> None:
            self.notes: list[str] = []

        def begin(self, title: str) -> None: ...
        def log(self, peer: str, text: str) -> None: ...
        def end(self) -> None: ...
        def event(self, event: object, now: float) -> None: ...

        def note(self, text: str) -> None:
            self.notes.append(text)

    trial = Trial(0, Setting(2, 0.3, 0.05), 10**6, "train", "train", "because")
    view, halted = View(), []
    watching = Watching(view, Hearing(trial, 1), halt=halted.append)
    for number in range(300):
        for rank in range(2):
            values = {"loss": 1.0, "seconds": 1.0, "staleness": 5.0}
            watching.event({"kind": "step", "time": float(number), "step": number, "rank": rank, "values": values}, 0.0)
    assert not halted
    for rank in (0, 1, 0, 1):
        watching.event({"kind": "checkpoint", "time": 300.0, "rank": rank, "values": {}}, 0.0)
    assert halted == ["staleness is 5.00 in the mean, not 1 as of 2 groups that are equally fast"]
    assert view.notes == [f"stopping: {halted[0]}"]


def test_progress_is_kept(file: Path, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "omnivore")
    folders.path.mkdir()
    runs = JobRuns(LaunchedRuns(load_topology(file), folders, None, str(tmp_path)), json_lines=True, updates=60)
    assert runs._made() == 0
    runs._note(24)
    assert runs._made() == 24


def test_what_cannot_be_automatic(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="foreground"):
        run_launch(file, detach=True)
    with pytest.raises(UsageError, match="there is no such run"):
        run_launch(file, resume=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"zmqtrain tune .* --simulate"):
        run_simulate(file)
