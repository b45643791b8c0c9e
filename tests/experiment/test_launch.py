"""Trials as launches, and ``groups = "auto"``: real processes on this machine."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_tune import TASK
from tests.launcher.ready import ReadyZygote
from zmqtrain.cli.launch import run_launch
from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.cli.report import run_report
from zmqtrain.cli.runs import run_logs, run_status
from zmqtrain.cli.simulate import run_simulate
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.experiment.job import Watching, job_with, rest
from zmqtrain.experiment.runs import LaunchedRuns
from zmqtrain.launcher import local
from zmqtrain.topology.load import load_topology
from zmqtrain.train.checkpoint.folder import find_checkpoints, find_latest
from zmqtrain.tune.drift import Drift
from zmqtrain.tune.monitor import TrialMonitor
from zmqtrain.tune.search import Search
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Outcome, Setting, Trial

#: So slow that a run can be stopped in its middle.
SLOW = """
    import time
    def loss(output, target):
        time.sleep(0.02)
        return nn.functional.cross_entropy(output, target)
"""


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


@pytest.fixture(autouse=True)
def roles_are_forked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Zygote", ReadyZygote)


def given(trial: Trial) -> Outcome:
    """What a probe would measure: two groups are faster, and better."""
    monitor = TrialMonitor(trial, 2 // trial.setting.groups)
    for number in range(trial.updates):
        for rank in range(2):
            seconds = 0.01 * (1.5 if trial.setting.groups == 1 else 2.0)
            values = {"loss": 1.0 / trial.setting.groups, "seconds": seconds}
            monitor.observe({"kind": "step", "time": number * seconds, "step": number, "values": values}, rank)
    return monitor.outcome(whole_s=1.0)


def test_a_short_job_is_trained_without_a_search(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one run takes is measured, and is too much already. What commands say of the launch is what they say of its training."""
    monkeypatch.setattr(LaunchedRuns, "run", lambda _, trial: given(trial))
    folder = tmp_path / "run"
    assert run_launch(file, options=LaunchOptions(run_dir=folder)) == 0
    shown = capsys.readouterr().out
    assert "s ([tune] share), but it needs 3 more runs of 1.0 s each: no search" in shown
    assert "setting: the most groups that still make it faster (g*), with the task's learning rate" in shown
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["trainings"]) == ("done", 0, ["omnivore/000"])
    assert (summary["groups"], summary["steps"], summary["samples"]) == (2, 30, 60 * 16)
    assert load_topology(folder / "omnivore" / "000" / "topology.toml").optimizer.momentum == "auto"
    assert run_status(str(folder)) == 0
    assert "done  30 steps  960 samples" in capsys.readouterr().out
    assert run_report([str(folder)]) == 0
    assert "run: the run has not ended" not in capsys.readouterr().err
    assert (folder / "report.html").exists()
    assert run_logs(str(folder)) == 0


def test_a_launch_finds_its_groups_trains_and_is_tuned_again(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training goes on from is made, and all training; what probes measure is given, and that the first training drifts.
    Somebody interrupts the second one, once it has a checkpoint."""
    task = TASK.replace("    return Task(", f"{SLOW}\n    return Task(")
    (tmp_path / "work.py").write_text(task)
    launched, hears, watched = LaunchedRuns.run, Watching.event, list[Drift]()
    folder, interrupted = tmp_path / "run", list[Path]()

    def reason(drift: Drift) -> str | None:
        watched.append(drift)
        return "a host has become slow" if drift is watched[0] else None

    def probe(runs: LaunchedRuns, trial: Trial) -> Outcome:
        if trial.keeps:
            launched(runs, trial)
        return given(trial)

    def heard(view: Watching, event: Mapping[str, Any], now: float) -> None:
        hears(view, event, now)
        if interrupted or not watched or watched[-1] is watched[0]:
            return  # it is not the second training yet
        second = max(folder.glob("omnivore/[0-9]*"))
        if find_checkpoints(second / "checkpoints"):  # complete, and not only sent
            interrupted.append(second)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LaunchedRuns, "run", probe)
    monkeypatch.setattr(Watching, "event", heard)
    monkeypatch.setattr(Drift, "reason", property(reason))
    settings = ["tune.time_limit='1 h'", "job.steps=300", "job.checkpoint_every=10"]
    assert run_launch(file, options=LaunchOptions(run_dir=folder, settings=settings)) == 130
    assert f"interrupted; to continue, run the same command with --resume {folder}" in capsys.readouterr().out
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert run_launch(file, options=LaunchOptions(resume=str(folder), settings=settings)) == 0
    shown = capsys.readouterr().out
    assert "done: the job is complete" in shown
    summary = json.loads((folder / "summary.json").read_text())
    row = summary["strategies"][0]
    assert (row["reached"], row["groups"], summary["status"]) == (True, 2, "done")
    first, second = (folder / path for path in summary["trainings"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (drift,) = (event["values"]["reason"] for event in events if event["kind"] == "drift")
    assert drift == "a host has become slow"
    made = 2 * int(find_latest(first).name.removeprefix("step-"))
    assert 20 <= made < 300
    job = load_topology(second / "topology.toml")
    assert (job.compute.groups, job.compute.group_size, job.job.steps, job.optimizer.lr) == (2, 1, (300 - made) // 2, 0.1)
    assert job.job.weights == str(first / "checkpoints")
    own = [json.loads(line) for line in (second / "events.jsonl").read_text().splitlines()]
    begins = [event["values"]["restored"] for event in own if event["kind"] == "start"]
    assert sorted(begins) == [False, False, True, True]


def test_a_job_goes_on_with_what_is_left_of_it(file: Path) -> None:
    topology = load_topology(file)
    trial = Trial(7, Setting(2, 0.3, 0.05), 10**6, "train", "train", "because", start=3)
    job = job_with(topology, trial, 25)
    assert (job.job.steps, job.job.seed, job.compute.groups, job.compute.auto_groups) == (13, 1 + 4, 2, False)
    assert (job.optimizer.lr, job.optimizer.momentum, job.job.checkpoint_every) == (0.05, 0.3, 1)
    assert job_with(topology, trial, None).job.steps == 60
    assert job_with(topology, trial, 10**6).job.checkpoint_every == 1000  # of [tune] period


def test_what_is_left_is_trained_from_where_training_stands() -> None:
    """Not from the end of one that diverged."""
    search = Search(Space({1: 1.0}, saturation=1, rates=(0.05,), cold=5))
    assert rest(search, Setting(1, 0.9, 0.05), "the time is up").start is None
    trainings = [0.5, math.inf]  # the cold start, and what comes after it
    while trainings:
        trial = search.next()
        assert isinstance(trial, Trial)
        search.result(trial, Outcome(9, 1.0, 2.0, 1.0 if trial.kind == "probe" else trainings.pop(0)))
    sound = next(trial.number for trial, _ in search.trials if trial.kind == "train")
    left = rest(search, Setting(1, 0.9, 0.05), "the time is up")
    assert (left.number, left.start, left.phase) == (len(search.trials), sound, "train")


def test_drift_stops_the_job_once(file: Path) -> None:
    class View:
        def __init__(self) -> None:
            self.notes: list[str] = []

        def begin(self, title: str) -> None: ...
        def regroup(self, group_of: Mapping[str, int]) -> None: ...
        def log(self, peer: str, text: str) -> None: ...
        def end(self) -> None: ...
        def event(self, event: object, now: float) -> None: ...

        def note(self, text: str) -> None:
            self.notes.append(text)

    trial = Trial(0, Setting(2, 0.3, 0.05), 10**6, "train", "train", "because")
    view, halted = View(), []
    watching = Watching(view, TrialMonitor(trial, 1), halt=halted.append)
    for number in range(300):
        for rank in range(2):
            values = {"loss": 1.0, "seconds": 1.0, "staleness": 5.0}
            watching.event({"kind": "step", "time": float(number), "step": number, "rank": rank, "values": values}, 0.0)
    assert not halted
    for rank in (0, 1, 0, 1):
        watching.event({"kind": "checkpoint", "time": 300.0, "rank": rank, "values": {}}, 0.0)
    assert halted == ["the mean staleness is 5.00, but 2 groups that compute all the time would have 1"]
    assert view.notes == [f"stopping: {halted[0]}"]


def test_a_task_that_fails_in_a_trial_ends_the_launch(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with pytest.raises(TaskError, match=r"a trial failed: TaskError: .*no loss today") as raised:
        run_launch(file, options=LaunchOptions(run_dir=folder, settings=["job.args={ fails = true }"]))
    assert raised.value.exit_code == 3
    assert str(folder / "speeds" / "000" / "logs") in str(raised.value)
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert run_status(str(folder)) == 0
    assert "  failed" in capsys.readouterr().out


def test_what_cannot_be_automatic(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="foreground"):
        run_launch(file, options=LaunchOptions(detach=True))
    with pytest.raises(UsageError, match="there is no run"):
        run_launch(file, options=LaunchOptions(resume=str(tmp_path / "nowhere")))
    with pytest.raises(UsageError, match=r"zmqtrain tune .* --simulate"):
        run_simulate(file)
