"""``groups = "auto"`` in a launch: find groups, momentum and learning rate, train with them, and watch that they stay right.

The search is that of `zmqtrain tune`, without its time limit. Where it would train, the job itself does, for as long as the file
says. Staleness and momentum are watched meanwhile: where they are no longer what the setting was chosen for, the run is stopped at
its next checkpoint, tuned again from there, and goes on with what is left of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zmqtrain.cli.tune import Tuning, searched, tuned
from zmqtrain.cli.tune_runs import Folders, LaunchedRuns, diverged_as, timed
from zmqtrain.cli.tune_tables import Shown
from zmqtrain.errors import UsageError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.run import INTERRUPTED, Launch
from zmqtrain.membership.description import RunDescription
from zmqtrain.net.loop import run
from zmqtrain.observe.live import View, make_view
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.plan.regroup import regrouped
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint import find_latest
from zmqtrain.train.task import load_task
from zmqtrain.tune.hear import Hearing
from zmqtrain.tune.search import Search
from zmqtrain.tune.trial import Outcome, Trial

#: How far the job has come, in the folder of its trials.
PROGRESS = "progress.json"


def launch_tuned(
    file: Path,
    topology: Topology,
    emulation: Emulation | None,
    *,
    json_lines: bool,
    data: str | None,
    resume: str | None,
    run_dir: Path | None,
) -> int:
    """Tune and train. ``resume``: the folder of a launch like this one. Returns the exit code. Raises what `run_tune` does."""
    if topology.job.task is None:
        raise UsageError(f'{file}: groups = "auto" needs [job] task: a search needs losses')
    find_task(topology.job.task, (".", *topology.job.python_path))
    place(regrouped(topology, 1))
    space = replace(searched(topology, data, measured=True), limit_s=math.inf)
    if resume is None:
        directory = RunDirectory.create(f"{topology.job.name}-auto", exact=run_dir)
        directory.write("topology.toml", topology.to_toml())
    elif (Path(resume) / "topology.toml").exists():
        directory = RunDirectory(Path(resume))
    else:
        raise UsageError(f'--resume {resume}: there is no such run; with groups = "auto" it is the whole run\'s folder')
    shown = Shown(json_lines=json_lines)
    shown.begin(topology, space, directory.path)
    folders = Folders(directory.path / "omnivore")
    probes = LaunchedRuns(topology, folders, data, str(file.resolve().parent), emulation)
    runs = JobRuns(probes, json_lines=json_lines, updates=_updates(topology, data))
    tuning = Tuning(topology, space, directory, shown)
    try:
        machine = tuning.resumed("omnivore", Search(space))
        done = tuning.drive("omnivore", machine, runs)
        tuning.end("omnivore", machine, done)
        tuning.compare()
        return 0 if done.reached else 64
    except JobError as error:
        return error.code
    except KeyboardInterrupt:
        shown.note(f"interrupted; zmqtrain launch {file} --resume {directory.path} goes on")
        return INTERRUPTED
    finally:
        directory.close()


class JobError(Exception):
    """The job's own run has failed, and said why."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"exit code {code}")


@dataclass(slots=True)
class JobRuns:
    """Implements `zmqtrain.cli.tune_runs.Runs`: probes as others do, and the job itself as the training that is asked for."""

    probes: LaunchedRuns
    json_lines: bool
    updates: int | None
    """The job's, by all groups together; none where it ends by a metric."""

    def run(self, trial: Trial) -> Outcome:
        """Raises what `LaunchedRuns.run` does, and `JobError`."""
        if trial.phase != "train":
            return self.probes.run(trial)
        made = self._made()
        topology = job_with(self.probes.topology, trial, None if self.updates is None else self.updates - made)
        weights = self.probes.folders.weights(trial)
        if weights is not None:
            topology = topology.model_copy(update={"job": topology.job.model_copy(update={"weights": str(weights)})})
        return self._launch(topology, trial, made)

    def _launch(self, topology: Topology, trial: Trial, made: int) -> Outcome:
        folder, emulation = self.probes.folders.of(trial.number), self.probes.emulation
        directory = RunDirectory.create(topology.job.name, exact=folder)
        directory.write("topology.toml", topology.to_toml())
        placement = place(topology)
        groups = {role.peer: role.group for role in placement.workers}
        hearing = Hearing(trial, topology.compute.group_size)
        view = Watching(make_view(groups, json_lines=self.json_lines, every_steps=topology.observe.progress_every), hearing)
        description = RunDescription(topology, placement, self.probes.folder, self.probes.data_path)
        launch = Launch(description, directory, view, emulation=emulation)
        view.halt = launch.halt
        code, whole_s = run(timed(launch.run()), dilation=None if emulation is None else emulation.dilation)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        diverged = diverged_as(directory.path) or hearing.diverged
        if code and not diverged:
            raise JobError(code)
        finished = hearing.stop is None and not diverged
        if not finished and not diverged:
            self._note(made + int(find_latest(directory.checkpoints).name.removeprefix("step-")) * topology.compute.groups)
        return hearing.outcome(whole_s=whole_s, diverged=diverged, finished=finished)

    def _made(self) -> int:
        file = self.probes.folders.path / PROGRESS
        return int(json.loads(file.read_text(encoding="utf-8"))["updates"]) if file.exists() else 0

    def _note(self, updates: int) -> None:
        (self.probes.folders.path / PROGRESS).write_text(json.dumps({"updates": updates}), encoding="utf-8")


def job_with(topology: Topology, trial: Trial, updates: int | None) -> Topology:
    """The file's job with what was found, for so many updates of all groups together (none: as long as the file says)."""
    job = tuned(topology, trial.setting)
    changes: dict[str, Any] = {"seed": topology.job.seed + (0 if trial.start is None else trial.start + 1)}
    if updates is not None:
        changes |= {"steps": max(1, math.ceil(updates / trial.setting.groups)), "epochs": None}
    if not topology.job.checkpoint_every:  # without any, it could not be tuned again
        changes["checkpoint_every"] = max(1, topology.tune.period // trial.setting.groups)
    return job.model_copy(update={"job": job.job.model_copy(update=changes)})


@dataclass(slots=True)
class Watching:
    """Implements `zmqtrain.observe.live.View`: shows the run, and stops it where its setting is no longer right."""

    view: View
    hearing: Hearing
    halt: Callable[[str], None] = field(default=lambda _: None)
    _halted: bool = False

    def begin(self, title: str) -> None:
        self.view.begin(title)

    def note(self, text: str) -> None:
        self.view.note(text)

    def log(self, peer: str, text: str) -> None:
        self.view.log(peer, text)

    def end(self) -> None:
        self.view.end()

    def event(self, event: Mapping[str, Any], now: float) -> None:
        self.view.event(event, now)
        self.hearing.hear(event, event.get("rank"))
        if self.hearing.stop is not None and not self._halted:
            self._halted = True
            self.view.note(f"stopping: {self.hearing.stop}")
            self.halt(self.hearing.stop)


def _updates(topology: Topology, data: str | None) -> int | None:
    """How many the job has. ``steps`` are those of all groups together, as of the one that the file describes."""
    job = topology.job
    if job.until is not None:
        return None
    if job.steps is not None:
        return job.steps
    assert job.task is not None
    samples = len(load_task(job.task, job.args, data, folders=(".", *job.python_path)).train_data)
    return math.ceil((job.epochs or 1) * samples / topology.compute.batch_size)
