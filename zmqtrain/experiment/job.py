"""The job of a launch with ``groups = "auto"``: its trainings, each a run of its own, and their common progress."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmqtrain.experiment.runs import LaunchedRuns, Listening, diverged_as, read_if_there, timed
from zmqtrain.experiment.tuning import tuned
from zmqtrain.launcher.run import Launch
from zmqtrain.membership.description import RunDescription
from zmqtrain.net.loop import run
from zmqtrain.observe.live import LiveView, make_view
from zmqtrain.observe.run_directory import TRAINING, RunDirectory
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.plan.regroup import regrouped
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints, find_latest, step_of
from zmqtrain.tune.machine import Machine
from zmqtrain.tune.monitor import TrialMonitor
from zmqtrain.tune.trial import Outcome, Setting, Trial

#: The file with the job's progress, in the folder of its trainings.
PROGRESS = "progress.json"
#: Checkpoints of a job that asks for none: they are needed to continue after Ctrl-C, and to tune again.
PARTS = 10
#: Values of the summary that are added up over all trainings.
SUMS = ("samples", "seconds", "training_seconds", "bytes_sent")


class JobError(Exception):
    """The job's own run has failed and has reported the reason."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"exit code {code}")


@dataclass(slots=True)
class JobRuns:
    """Implements `zmqtrain.experiment.runs.Runs`: trials like any others, and the job itself as the final training."""

    probes: LaunchedRuns
    path: Path
    """The directory of the whole launch."""
    json_lines: bool
    updates: int | None
    """The job's updates, by all groups together; ``None`` if it ends by a metric."""
    elapsed_s: float = 0.0

    @property
    def through(self) -> bool:
        """Whether the job has been trained to its end."""
        return bool(self._progress()["through"])

    def shows(self, trial: Trial) -> bool:
        return _is_job(trial)

    def run(self, trial: Trial) -> Outcome:
        """Raises what `LaunchedRuns.run` does, and `JobError`."""
        if not _is_job(trial):
            return self.probes.run(trial)
        monitor = TrialMonitor(trial, regrouped(self.probes.topology, trial.setting.groups).compute.group_size)
        code, whole_s = self._train(trial.number, self._job(trial), monitor)
        folder = self.probes.folders.of(trial.number)
        diverged = diverged_as(folder) or monitor.diverged
        if code and not diverged:
            raise JobError(code)
        return monitor.outcome(whole_s=whole_s, diverged=diverged, finished=self.through)

    def train_rest(self, trial: Trial) -> None:
        """Train the rest of the job without a monitor. Raises `JobError`."""
        code, _ = self._train(trial.number, self._job(trial), None)
        if code:
            raise JobError(code)

    def train_plainly(self, groups: int) -> None:
        """Train the job as the file describes it, with ``groups`` groups. Raises `JobError`."""
        topology = regrouped(self.probes.topology, groups)
        job = topology.job.model_copy(update=lengths(topology, groups, self.updates))
        code, _ = self._train(0, topology.model_copy(update={"job": job}), None)
        if code:
            raise JobError(code)

    def summary(self, status: str, code: int) -> dict[str, Any]:
        """The summary of the last training, with the totals of all trainings. ``status``: used if there was no training."""
        trainings = [self.probes.folders.of(number) for number in self._progress()["trainings"]]
        found = [read_if_there(folder / "summary.json") for folder in trainings]
        values = {"status": status, "exit_code": code, "steps": 0, "samples": 0, "seconds": 0.0, "eval": {}}
        if found and found[-1]:
            values |= found[-1] | {name: sum(each.get(name, 0) for each in found) for name in SUMS}
        return values | {"trainings": [str(folder.relative_to(self.path)) for folder in trainings]}

    def _job(self, trial: Trial) -> Topology:
        left = None if self.updates is None else max(1, self.updates - self._progress()["updates"])
        topology = job_with(self.probes.topology, trial, left)
        weights = self.probes.folders.weights(trial)
        if weights is None:
            return topology
        return topology.model_copy(update={"job": topology.job.model_copy(update={"weights": str(weights)})})

    def _train(self, number: int, topology: Topology, monitor: TrialMonitor | None) -> tuple[int, float]:
        """Continue the run in the trial's folder if it was begun, or else begin it. Returns its exit code and its time."""
        folder, emulation = self.probes.folders.of(number), self.probes.emulation
        goes_on = bool(find_checkpoints(folder / "checkpoints"))
        if goes_on:
            directory = RunDirectory.go_on(folder)
        else:
            directory = RunDirectory.create(topology.job.name, exact=self.probes.folders.emptied(number))
        directory.write("topology.toml", topology.to_toml())
        progress = self._progress()
        if number not in progress["trainings"]:
            progress["trainings"].append(number)
            self._note(progress)
        _point(self.path / TRAINING, folder)
        placement = place(topology)
        groups = {role.peer: role.group for role in placement.workers}
        view = make_view(groups, json_lines=self.json_lines, every_steps=topology.observe.progress_every)
        resume = str(folder) if goes_on else None
        description = RunDescription(topology, placement, self.probes.folder, self.probes.data_path, resume=resume)
        watching = None if monitor is None else Watching(view, monitor)
        sinks = FanOut(topology.observe.to, topology.observe.options)
        prepared = self.probes.prepared
        launch = Launch(description, directory, watching or view, emulation=emulation, sinks=sinks, prepared=prepared)
        if watching is not None:
            watching.halt = launch.halt
        code, whole_s = run(timed(launch.run()), dilation=None if emulation is None else emulation.dilation)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        status = read_if_there(folder / "summary.json").get("status")
        if status == "done":
            progress["through"] = True
        elif status == "stopped" and not (monitor is not None and monitor.diverged):
            progress["updates"] += step_of(find_latest(directory.checkpoints)) * topology.compute.groups
        self._note(progress)
        return code, whole_s

    def _progress(self) -> dict[str, Any]:
        return {"updates": 0, "trainings": [], "through": False} | read_if_there(self.probes.folders.path / PROGRESS)

    def _note(self, progress: Mapping[str, Any]) -> None:
        (self.probes.folders.path / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


def job_with(topology: Topology, trial: Trial, updates: int | None) -> Topology:
    """The file's job with the settings that were found, for ``updates`` updates of all groups together (none: as long as the file
    says)."""
    job = tuned(topology, trial.setting)
    changes = {
        "seed": topology.job.seed + (0 if trial.start is None else trial.start + 1),
        **lengths(topology, trial.setting.groups, updates),
    }
    return job.model_copy(update={"job": job.job.model_copy(update=changes)})


def lengths(topology: Topology, groups: int, updates: int | None) -> dict[str, Any]:
    """The fields of ``[job]`` with which ``groups`` groups make ``updates`` updates together, with checkpoints in between."""
    fields: dict[str, Any] = {}
    period = topology.tune.period
    if updates is not None:
        fields |= {"steps": max(1, math.ceil(updates / groups)), "epochs": None}
        period = min(period, updates // PARTS)
    if not topology.job.checkpoint_steps:
        fields["checkpoint_every"] = max(1, period // groups)
    return fields


def rest(machine: Machine, setting: Setting, reason: str) -> Trial:
    """The trial that continues from the current training; trainings that diverged are not continued."""
    return Trial(len(machine.trials), setting, 1, "train", "train", reason, machine.start)


class Watching(Listening):
    """A listening view that also shows the run."""

    def __init__(self, view: LiveView, monitor: TrialMonitor, halt: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(monitor, halt)
        self._view = view

    def begin(self, title: str) -> None:
        self._view.begin(title)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        self._view.regroup(group_of)

    def note(self, text: str) -> None:
        self._view.note(text)

    def log(self, peer: str, text: str) -> None:
        self._view.log(peer, text)

    def end(self) -> None:
        self._view.end()

    def event(self, event: Mapping[str, Any], now: float) -> None:
        self._view.event(event, now)
        super().event(event, now)


def _is_job(trial: Trial) -> bool:
    """Whether the trial is training with the settings that were found, and not the short training before the search."""
    return trial.phase == "train"


def _point(link: Path, folder: Path) -> None:
    """Point the link to the folder atomically: readers always find a link."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
    os.replace(temporary, link)
