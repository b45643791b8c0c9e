"""``zmqtrain tune``, as a person calls it, on a small simulated cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tune.landscape import Landscape
from zmqtrain.cli.runs import run_status, state_of_run
from zmqtrain.cli.tune import How, names_of, run_tune
from zmqtrain.errors import TaskError, UsageError, ZmqTrainError
from zmqtrain.experiment.runs import Folders, SimulatedRuns
from zmqtrain.topology.load import load_topology
from zmqtrain.tune.trial import Outcome, Setting, Trial

TASK = """
import torch
from torch import nn
from zmqtrain import Task

def task(fails: bool = False, count: int = 1024):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator)
    y = (x @ torch.randn(8, 3, generator=generator)).argmax(1)

    def loss(output, target):
        if fails:
            raise RuntimeError("no loss today")
        return nn.functional.cross_entropy(output, target)

    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 3)),
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        train_data=torch.utils.data.TensorDataset(x, y),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(TASK)
    profile = {"layers": [{"name": "0", "numel": 27, "forward_s": 0.01, "backward_s": 0.02}], "batch_size": 16}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
[job]
task = "work.py:task"
python_path = ["{tmp_path}"]
timeout = "20 s"
[[hosts]]
name = "h[1-5]"
slots = 1
[compute]
groups = 4
batch_size = 16
device = "modelled"
profile = "{tmp_path / "profile.json"}"
noise = {{ kind = "normal", spread = 0.1 }}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[simulation]
payload = "real"
[tune]
target_loss = 0.35
learning_rates = [0.1, 1.0]
momenta = [0.0, 0.6]
probe = 12
period = 40
cold = 12
time_limit = "40 s"
"""
    )
    return path


def rows(capsys: pytest.CaptureFixture[str], kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["row"] == kind]


def test_a_search_in_the_simulated_world(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run_tune(file, How(simulate=True), run_dir=folder, settings=["tune.momenta=[0.6]", "tune.cold=40"]) == 0
    shown = capsys.readouterr().out
    assert "4 workers as 1, 2, 4 groups" in shown
    assert "saturation: the smallest number of groups that is as fast as any, as far as is known" in shown
    assert "done: the target is reached" in shown
    summary = json.loads((folder / "summary.json").read_text())["strategies"][0]
    assert (summary["strategy"], summary["reached"]) == ("omnivore", True)
    assert summary["search_s"] < summary["seconds"] <= 45
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert all(event["values"]["reason"] for event in events)
    trials = [event["values"] for event in events if event["kind"] == "trial"]
    assert [trial["number"] for trial in trials] == list(range(len(trials)))
    sweep = [trial["outcome"] for trial in trials if trial["phase"] == "learning rate"]
    for outcome in sweep:  # a quarter of the work for each worker, beside what synchronizing takes
        assert 0.0075 <= outcome["seconds"] / outcome["updates"] < 0.03
    found = load_topology(folder / "tuned.toml")
    assert (found.compute.groups, found.optimizer.momentum, found.optimizer.lr) == (
        summary["groups"], summary["momentum"], summary["lr"]
    )  # fmt: skip
    assert (folder / "omnivore.svg").read_text().startswith("<svg")
    assert f"zmqtrain launch {folder / 'tuned.toml'} trains with these settings" in shown
    assert run_status(str(folder)) == 0
    assert "  done  " in capsys.readouterr().out


def test_a_search_that_was_interrupted_goes_on(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    land, count = Landscape({1: 0.03, 2: 0.015, 4: 0.01}, rate=0.1, diverges_from=0.5), [0]
    monkeypatch.setattr(SimulatedRuns, "run", lambda _, trial: land.run(trial, 0.35))
    assert run_tune(file, How(simulate=True), run_dir=whole, json_lines=True) == 0
    trials = rows(capsys, "trial")
    assert len(trials) > 10

    def interrupted(_: SimulatedRuns, trial: Trial) -> Outcome:
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt
        return land.run(trial, 0.35)

    land = Landscape(land.update_s, rate=land.rate, diverges_from=land.diverges_from)
    monkeypatch.setattr(SimulatedRuns, "run", interrupted)
    assert run_tune(file, How(simulate=True), run_dir=parts, json_lines=True) == 130
    first = rows(capsys, "trial")
    assert len(first) == 4
    assert state_of_run(parts)["status"] == "interrupted"
    assert run_tune(file, How(simulate=True, resume=parts), json_lines=True) == 0
    assert state_of_run(parts)["status"] == "done"
    assert first + rows(capsys, "trial") == trials
    other = ["tune.learning_rates=[0.5]", "tune.time_limit=1.0"]
    with pytest.raises(UsageError, match="belongs to a different search than this topology file"):
        run_tune(file, How(simulate=True, resume=parts), settings=other)


def test_several_strategies_in_one_table(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = How(simulate=True, strategies=names_of(["sync", "default"]))
    assert run_tune(file, how, run_dir=tmp_path / "run", settings=["tune.time_limit=3.0"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["strategies"]
    assert [row["strategy"] for row in summary] == ["default", "sync"]
    assert summary[0]["search_share"] == 0
    shown = capsys.readouterr().out
    assert "of the time" in shown


def test_the_trade_off_over_groups(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["tune.momenta=[0.6]", "tune.learning_rates=[0.3]", "tune.period=200"]
    assert run_tune(file, How(simulate=True, curves=True), run_dir=tmp_path / "run", settings=settings, json_lines=True) == 0
    curve = rows(capsys, "curve")
    assert [row["groups"] for row in curve] == [1, 2, 4]
    assert all(row["seconds"] is not None for row in curve)
    assert min(row["total"] for row in curve) == 1.0
    for row in curve:
        assert row["predicted_update_s"] == pytest.approx(row["update_s"], rel=0.3)
    assert (tmp_path / "run" / "curves.svg").read_text().count("<polyline") == 3


def test_trials_begin_where_training_ended(file: Path, tmp_path: Path) -> None:
    """With another number of groups, and with the parameters that the model server had."""
    runs = SimulatedRuns(load_topology(file), Folders(tmp_path / "trials"), None)
    trained = runs.run(Trial(0, Setting(4, 0.0, 0.3), 80, "train", "cold", "because"))
    assert trained.updates > 40  # it may be stopped at the target
    assert trained.loss < 0.8 * trained.first
    for groups in (1, 2, 4):
        probe = runs.run(Trial(groups, Setting(groups, 0.0, 1e-6), 8, "probe", "grid", "because", start=0))
        assert probe.first == pytest.approx(trained.loss, rel=0.35)
        assert probe.first < 0.8 * trained.first


def test_a_trial_that_diverges_is_cut_early(file: Path, tmp_path: Path) -> None:
    runs = SimulatedRuns(load_topology(file), Folders(tmp_path / "trials"), None)
    outcome = runs.run(Trial(0, Setting(4, 0.9, 1e4), 400, "probe", "grid", "because", give_up_above=3.0))
    assert outcome.diverged
    assert outcome.updates < 200


def test_the_tasks_own_error_comes_out(file: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"a trial failed: TaskError: .*no loss today") as raised:
        run_tune(file, How(simulate=True), run_dir=tmp_path / "run", settings=["job.args={ fails = true }"])
    assert raised.value.exit_code == 3
    assert "trial 0 (learning rate): 1 group, momentum 0.6, learning rate 1" in str(raised.value)
    assert "work.py" in str(raised.value)  # where in the person's own code


def test_a_host_that_is_lost_in_a_trial(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = '\n[[faults]]\nkind = "kill"\ntarget = "h2"\nat = 0.3\n'
    file.write_text(file.read_text() + fault)
    with pytest.raises(ZmqTrainError, match=r"a trial failed: HostLostError: .*h2") as raised:
        run_tune(file, How(simulate=True), run_dir=tmp_path / "run")
    assert raised.value.exit_code >= 128  # worth another try
    assert f"to continue, run the same command with --resume {tmp_path / 'run'}" in capsys.readouterr().out


def test_a_host_that_becomes_slow_leads_to_another_search(file: Path, tmp_path: Path) -> None:
    """The fault comes in the middle of training. That ends at a checkpoint; the search goes on from there, and so does training."""
    fault = '[[faults]]\nkind = "slow"\ntarget = "h1"\nfactor = 6.0\nat = 9.0\n'
    text = file.read_text().replace("h[1-5]", "h[1-3]").replace("groups = 4", "groups = 2")
    # Two groups are better for certain: one waits for the network twice an update. Large batches: next to no noise.
    text = text.replace("100 us", "20 ms").replace("batch_size = 16", "batch_size = 256")
    file.write_text(f"{text}{fault}")
    profile = tmp_path / "profile.json"
    profile.write_text(profile.read_text().replace('"batch_size": 16', '"batch_size": 256'))
    settings = [
        "learning_rates=[0.05]",  # the loss falls, and training does not stand still
        "momenta=[0.0]",
        "probe=24",
        "period=600",
        "cold=0",
        "share=0.5",
        "time_limit='40 s'",
        "target_loss=1e-6",  # never near: the learning rate stays
    ]
    folder = tmp_path / "run"
    assert run_tune(file, How(simulate=True), run_dir=folder, settings=[f"tune.{each}" for each in settings]) == 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (at,) = (index for index, event in enumerate(events) if event["kind"] == "drift")
    reason = events[at]["values"]["reason"]
    first, now = map(float, re.findall(r"the staleness of group 0 went from (\S+) to (\S+):", reason)[0])
    assert first == pytest.approx(1.0, abs=0.2)
    assert now > 2
    assert reason.endswith("compared with the others it has become slower")
    ended = events[at - 1]["values"]
    assert (ended["kind"], ended["outcome"]["drifted"]) == ("train", reason)
    assert ended["outcome"]["updates"] < ended["updates"]
    after = [event["values"] for event in events[at:] if event["kind"] == "trial"]
    assert [trial["phase"] for trial in after[:2]] == ["speed", "speed"]  # which is no longer what it was
    (again,) = (index for index, trial in enumerate(after) if trial["kind"] == "train" and after[index - 1]["kind"] == "probe")
    assert {trial["start"] for trial in after[2 : again + 1]} == {ended["number"]}
    assert {trial["kind"] for trial in after[again:]} == {"train"}
    assert len(after) > 1
    assert after[-1]["outcome"]["first"] < 1.3 * ended["outcome"]["loss"]  # with what was learned before
    assert events[-1]["values"]["reason"] == "the time is up: 40 s"


def test_bad_input(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        run_tune(file, How(simulate=True, emulate=True))
    (tmp_path / "other.toml").write_text(file.read_text().replace("target_loss = 0.35", ""))
    with pytest.raises(UsageError, match="--curves needs a target"):
        run_tune(tmp_path / "other.toml", How(simulate=True, curves=True))
    with pytest.raises(UsageError, match="--strategy best: must be one of omnivore, default, sync, async, bayesian, or all"):
        names_of(["best"])
    assert names_of(["all"])[0] == "omnivore"
    assert names_of([]) == ("omnivore",)
    with pytest.raises(TaskError, match="train_data is empty"):
        run_tune(file, How(simulate=True), settings=["job.args={ count = 0 }"])
    with pytest.raises(UsageError, match=r"computes no losses, which a search needs"):
        run_tune(file, How(simulate=True), settings=["simulation.payload=phantom"])
    for grid in ("4x1", "auto"):
        with pytest.raises(UsageError, match=rf"\[compute\] grid = '{grid}' divides the model .*: remove the grid"):
            run_tune(file, How(simulate=True), settings=["compute.groups=1", "compute.group_size=4", f'compute.grid="{grid}"'])
    with pytest.raises(UsageError, match=r"this folder contains no search"):
        run_tune(file, How(simulate=True, resume=tmp_path))
    steps = tmp_path / "steps.toml"
    steps.write_text(file.read_text() + '\n[[faults]]\nkind = "kill"\ntarget = "h2"\nstep = 3\n')
    with pytest.raises(UsageError, match=r'give "at" \(a time\) instead'):
        run_tune(steps, How(simulate=True))
    empty = tmp_path / "empty.toml"
    empty.write_text("[job]\n")
    with pytest.raises(UsageError, match="names no task"):
        run_tune(empty, How(simulate=True))


def test_trials_of_a_merged_fc_phase_begin_where_training_ended(file: Path, tmp_path: Path) -> None:
    """The FC server takes its layers from the checkpoint, too."""
    (tmp_path / "work.py").write_text(TASK.replace("nn.Linear(8, 3)", "nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)"))
    (tmp_path / "two.toml").write_text(
        file.read_text()
        .replace("h[1-5]", "h[1-6]")
        .replace(f'profile = "{tmp_path / "profile.json"}"\n', "")
        .replace('device = "modelled"', "")
        .replace("[network]", '[exchange]\nkind = "model_server"\nmerged_fc = true\nsplit = "2"\n[network]')
    )
    runs = SimulatedRuns(load_topology(tmp_path / "two.toml"), Folders(tmp_path / "trials"), None)
    trained = runs.run(Trial(0, Setting(4, 0.0, 0.3), 80, "train", "cold", "because"))
    assert trained.loss < 0.6 * trained.first
    probe = runs.run(Trial(1, Setting(2, 0.0, 1e-6), 8, "probe", "grid", "because", start=0))
    assert probe.first == pytest.approx(trained.loss, rel=0.5)
