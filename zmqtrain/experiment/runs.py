"""Trials as runs: in the simulated world, emulated, or launched."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zmqtrain.errors import ConnectivityError, HostLostError, NonFiniteLossError, TaskError, UsageError, ZmqTrainError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.prepared import Prepared
from zmqtrain.launcher.run import Launch
from zmqtrain.membership.description import RunDescription
from zmqtrain.net.loop import run
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.run.faults import faults_of, later
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.simulate.run import Options, resolved, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.job import job_of
from zmqtrain.tune.monitor import TrialMonitor
from zmqtrain.tune.trial import Outcome, Trial

_NOT_FINITE = NonFiniteLossError.__name__
ERROR = "error.json"
#: The exception for a trial's failure, by exit code.
ERRORS: Mapping[int, type[ZmqTrainError]] = {
    each.exit_code: each for each in (UsageError, TaskError, ConnectivityError, HostLostError)
}


class Runs(Protocol):
    """A way to run the trials of a search: simulated or real."""

    elapsed_s: float
    """The time of all earlier trials, in the time of the world. Set by the caller."""

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end and return the outcome. Raises the error of the run (divergence is not an error), and
        ``KeyboardInterrupt``."""
        ...

    def shows(self, trial: Trial) -> bool:
        """Whether the progress of the trial is shown."""
        ...


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of trials: one for each, with the checkpoints of those that train."""

    path: Path

    def of(self, number: int) -> Path:
        """The folder of a trial. ``number``: the trial's number."""
        return self.path / f"{number:03d}"

    def emptied(self, number: int) -> Path:
        """A trial's folder, emptied of what an interrupted trial may have left there."""
        folder = self.of(number)
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def weights(self, trial: Trial) -> Path | None:
        """The checkpoints of the trial with whose weights ``trial`` begins; ``None`` if it begins anew."""
        return None if trial.start is None else self.of(trial.start) / "checkpoints"


@dataclass(slots=True)
class SimulatedRuns:
    """Implements `Runs` on virtual time. The times of the file's faults count from the start of the whole search."""

    topology: Topology
    folders: Folders
    data_path: str | None
    elapsed_s: float = 0.0

    def run(self, trial: Trial) -> Outcome:
        topology = job_of(self.topology, trial, self.folders.weights(trial))
        tune = topology.tune
        monitor = TrialMonitor(trial, topology.compute.group_size, tune.target_loss, tune.smooth)
        halt: list[Callable[[str], None]] = []

        def hear(peer: str, events: list[dict[str, Any]]) -> None:
            role, _, index = peer.partition("/")
            for event in events:
                monitor.observe(event, int(index) if role == "worker" else None)
            if monitor.stop is not None and halt:
                halt.pop()(monitor.stop)

        checkpoints = self.folders.emptied(trial.number) / "checkpoints"
        checkpoints.mkdir(parents=True)
        faults = later(faults_of(self.topology), self.elapsed_s)
        options = Options(
            faults=faults,
            data_path=self.data_path,
            checkpoints=checkpoints,
            on_report=hear,
            on_begin=lambda stop: halt.append(stop),
        )
        result = simulate(resolved(topology, topology.job.seed), options=options)
        gc.collect()  # models and data of all workers, which are in cycles: nothing else would make Python look for them
        error = result.ending.error or {}
        _require_sound(trial, result.ending.status, error, monitor)
        return monitor.outcome(whole_s=result.seconds, diverged=error.get("type") == _NOT_FINITE)

    def shows(self, trial: Trial) -> bool:
        return False


@dataclass(slots=True)
class LaunchedRuns:
    """Implements `Runs` with processes on the hosts, or (with ``emulation``) on this machine behind a network like theirs."""

    topology: Topology
    folders: Folders
    data_path: str | None
    folder: str
    """The folder from which relative paths in the file are resolved."""
    emulation: Emulation | None = None
    prepared: Prepared | None = None
    """Where the hosts are this machine: what all runs fork their roles from."""
    elapsed_s: float = 0.0

    def run(self, trial: Trial) -> Outcome:
        topology = job_of(self.topology, trial, self.folders.weights(trial))
        tune = topology.tune
        monitor = TrialMonitor(trial, topology.compute.group_size, tune.target_loss, tune.smooth)
        directory = RunDirectory.create(topology.job.name, exact=self.folders.emptied(trial.number))
        directory.write("topology.toml", topology.to_toml())
        description = RunDescription(topology, place(topology), self.folder, self.data_path)
        view = Listening(monitor)
        launch = Launch(description, directory, view, emulation=self.emulation, prepared=self.prepared)
        view.halt = launch.halt
        code, whole_s = run(timed(launch.run()), dilation=None if self.emulation is None else self.emulation.dilation)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        error = read_if_there(directory.path / ERROR)
        _require_sound(trial, "failed" if code else "done", error, monitor, directory.path)
        return monitor.outcome(whole_s=whole_s, diverged=error.get("type") == _NOT_FINITE)

    def shows(self, trial: Trial) -> bool:
        return False


@dataclass(slots=True)
class Listening:
    """A `zmqtrain.observe.live.LiveView` that listens instead of showing, and stops the run if the monitor gives a reason."""

    monitor: TrialMonitor
    halt: Callable[[str], None] = field(default=lambda _: None)
    _halted: bool = False

    def begin(self, title: str) -> None: ...

    def regroup(self, group_of: Mapping[str, int]) -> None: ...

    def note(self, text: str) -> None: ...

    def log(self, peer: str, text: str) -> None: ...

    def end(self) -> None: ...

    def event(self, event: Mapping[str, Any], now: float) -> None:
        self.monitor.observe(event, event.get("rank"))
        if self.monitor.stop is not None and not self._halted:
            self._halted = True
            self.note(f"stopping: {self.monitor.stop}")
            self.halt(self.monitor.stop)


def read_if_there(file: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if there is no such file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def diverged_as(folder: Path) -> bool:
    """Whether the run in the folder has failed because its loss was NaN or infinite."""
    return bool(read_if_there(folder / ERROR).get("type") == _NOT_FINITE)


async def timed(life: Awaitable[int]) -> tuple[int, float]:
    """Await ``life``. Returns its result, and the seconds that it took on the loop's clock."""
    clock = asyncio.get_running_loop().time
    start = clock()
    return await life, clock() - start


def _require_sound(trial: Trial, status: str, error: Mapping[str, Any], monitor: TrialMonitor, folder: Path | None = None) -> None:
    """Raise unless the run is done, was stopped on purpose, or diverged: an error with the exit code that the run had."""
    if status in ("done", "stopped") or monitor.stop is not None or error.get("type") == _NOT_FINITE:
        return
    lines = [f"a trial failed: {error.get('type', status)}: {error.get('message', 'no details are known')}"]
    lines.append(f"  trial {trial.number} ({trial.phase}): {trial.setting}")
    if folder is not None:
        lines.append(f"  output of its processes: {folder / 'logs'}")
    if error.get("shown"):
        lines.append(str(error["shown"]).rstrip())
    code = int(error.get("exit_code") or ZmqTrainError.exit_code)
    raise ERRORS.get(code, ZmqTrainError)("\n".join(lines))
