"""A search's strategies, one after another: their trials are run, and the results are saved and reported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.experiment.runs import Runs
from zmqtrain.launcher.run import write_pid
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.plan.decided import decided
from zmqtrain.plan.efficiency import fewest
from zmqtrain.plan.group_step import variants
from zmqtrain.plan.regroup import regrouped
from zmqtrain.plan.setup import source_of
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.baselines import StrategyName, strategies
from zmqtrain.tune.curves import EveryNumberOfGroups, penalties
from zmqtrain.tune.job import space_of
from zmqtrain.tune.machine import Machine
from zmqtrain.tune.plot import curves_svg, trials_svg
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, SearchDecision, Setting, Trial
from zmqtrain.world import wall_s

M = TypeVar("M", bound=Machine)

#: Emulated updates may take this many times the predicted time before a warning: predictions have errors, too.
LATE = 1.5


class Reporter(Protocol):
    """Reports the progress of a search."""

    def begin(self, topology: Topology, space: Space, folder: Path) -> None:
        """The search begins: what there is to choose from, and where its results will be."""

    def begins(self, trial: Trial) -> None:
        """Called when a trial begins."""

    def ends(self) -> None:
        """The trial is over, whatever its result."""

    def trial(self, name: str, trial: Trial, outcome: Outcome) -> None:
        """The result of a trial of the strategy ``name``."""

    def decision(self, name: str, decision: SearchDecision) -> None:
        """A decision of the strategy ``name``."""

    def done(self, row: dict[str, Any]) -> None:
        """Called with the result of a strategy, as a row of the table."""

    def compare(self, rows: Sequence[dict[str, Any]]) -> None:
        """Called once, at the end, with the results of all strategies."""

    def curves(self, rows: Sequence[dict[str, Any]]) -> None:
        """The trade-off over numbers of groups."""

    def note(self, text: str) -> None:
        """Anything else that the user should know."""


class Tuning:
    """One command's strategies, one after another."""

    def __init__(
        self, topology: Topology, space: Space, directory: RunDirectory, shown: Reporter, *, dilation: float | None = None
    ) -> None:
        """``dilation``: of an emulation whose times are all modelled, so that nothing may take longer than predicted."""
        self._topology, self._space, self._directory, self._shown = topology, space, directory, shown
        self._dilation = dilation
        self._rows: list[dict[str, Any]] = []

    @property
    def exit_code(self) -> int:
        """0 where each strategy has found something to train with."""
        return 0 if all(row["groups"] is not None for row in self._rows) else ZmqTrainError.exit_code

    def strategy(self, name: StrategyName, runs: Runs) -> None:
        """Run one to its end, and leave its table, plot and result."""
        tune = self._topology.tune
        make = strategies(self._space, trials=tune.bayesian_trials, seed=self._topology.job.seed)[name]
        machine = self.resumed(name, make())
        self.end(name, machine, self.drive(name, machine, runs))

    def end(self, name: StrategyName, machine: Machine, done: Done) -> None:
        """Its plot, its result, and a line for the table."""
        self._directory.write(f"{name}.svg", trials_svg(f"{self._topology.job.name}: {name}", machine.trials))
        if name == "omnivore" and done.setting is not None:
            self._directory.write("tuned.toml", tuned(self._topology, done.setting).to_toml())
            self._shown.note(f"zmqtrain launch {self._directory.path / 'tuned.toml'} trains with these settings")
        row = summary_row(name, machine, done)
        self._rows.append(row)
        self._shown.done(row)

    def compare(self, summary: Mapping[str, Any] | None = None) -> None:
        """All strategies in one table, and in summary.json, beside what else there is to say."""
        values = summary or self._summary(sum(row["updates"] for row in self._rows), sum(row["seconds"] for row in self._rows))
        self._directory.write_json("summary.json", {**values, "strategies": self._rows})
        self._shown.compare(self._rows)

    def ended_early(self, status: str, exit_code: int) -> None:
        """Say in summary.json that the search has not come to its end: of the strategies only those that have are in it."""
        row = self._summary(sum(row["updates"] for row in self._rows), sum(row["seconds"] for row in self._rows))
        self._directory.write_json("summary.json", {**row, "status": status, "exit_code": exit_code, "strategies": self._rows})

    def curves(self, runs: Runs) -> None:
        """The trade-off over groups."""
        tune = self._topology.tune
        machine = self.resumed("curves", EveryNumberOfGroups(self._space, tune.period, beyond=tune.beyond))
        self.drive("curves", machine, runs)
        rows = list(penalties(machine.points()))
        updates, seconds = sum(row["updates"] or 0 for row in rows), sum(row["seconds"] or 0.0 for row in rows)
        self._directory.write_json("summary.json", {**self._summary(updates, seconds), "curves": rows})
        self._directory.write("curves.svg", curves_svg(f"{self._topology.job.name}: time to the target", rows))
        self._shown.curves(rows)

    def _summary(self, updates: int, seconds: float) -> dict[str, Any]:
        """The summary values that every run has."""
        return {"status": "done", "exit_code": self.exit_code, "steps": updates, "seconds": seconds}

    def resumed(self, name: str, machine: M) -> M:
        """The machine in the state that an earlier command reached in this folder."""
        file = self._directory.path / f"{name}.json"
        if not file.exists():
            return machine
        try:
            machine.replay(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"--resume: {file} belongs to a different search than this topology file: {error}") from error
        return machine

    def drive(self, name: str, machine: Machine, runs: Runs) -> Done:
        """Run the machine's trials until it is done. Its state is saved after each trial."""
        while True:
            self._tell(name, machine)
            trial = machine.next()
            if isinstance(trial, Done):
                return trial
            runs.elapsed_s = sum(max(outcome.whole_s, outcome.seconds) for _, outcome in machine.trials)
            self._event(name, "trial begins", trial.reason, trial.to_value())
            if not runs.shows(trial):
                self._shown.begins(trial)
            try:
                outcome = runs.run(trial)
            finally:
                self._shown.ends()
            machine.result(trial, outcome)
            self._event(name, "trial", trial.reason, {**trial.to_value(), "outcome": outcome.to_value()})
            self._shown.trial(name, trial, outcome)
            self._warn_if_late(trial, outcome)
            self._directory.write_json(f"{name}.json", machine.to_value())

    def _warn_if_late(self, trial: Trial, outcome: Outcome) -> None:
        """Once."""
        if self._dilation is None or not outcome.updates:
            return
        late = outcome.update_s / self._space.update_s[trial.setting.groups]
        if late > LATE:
            more = math.ceil(2 * late * self._dilation)
            self._shown.note(
                f"      updates take {late:.1f} times as long as predicted: this machine may be too slow: try --dilation {more}"
            )
            self._dilation = None

    def decide(self, name: str, decision: SearchDecision) -> None:
        """Save and show a decision."""
        self._event(name, decision.what, decision.reason, dict(decision.values))
        self._shown.decision(name, decision)

    def _tell(self, name: str, machine: Machine) -> None:
        for decision in machine.decisions():
            self.decide(name, decision)

    def _event(self, name: str, kind: str, reason: str, values: dict[str, Any]) -> None:
        line = {"time": wall_s(), "host": "", "role": "tune", "rank": None, "step": None, "kind": kind}
        self._directory.event({**line, "values": {"strategy": name, "reason": reason, **values}})
        self._directory.flush()


@contextmanager
def search_folder(topology: Topology, kind: str, *, resume: Path | None, run_dir: Path | None) -> Iterator[RunDirectory]:
    """The folder of a search, open until the end of the block; `zmqtrain status` and `stop` find this process there meanwhile.

    Args:
        kind: a new folder is called ``NAME-KIND-NNN``.
        resume: the folder of a search that is to go on.
        run_dir: a new search's folder; ``None``: the next free one.

    Raises `UsageError` if ``resume`` is not such a folder.
    """
    if resume is None:
        directory = RunDirectory.create(f"{topology.job.name}-{kind}", exact=run_dir)
        directory.write("topology.toml", topology.to_toml())
    else:
        directory = _begun(resume)
    write_pid(directory)
    try:
        yield directory
    finally:
        (directory.path / "pid").unlink(missing_ok=True)
        directory.close()


def _begun(folder: Path) -> RunDirectory:
    """The folder of a command to continue. Raises `UsageError` if it is not one."""
    if not (folder / "topology.toml").exists():
        raise UsageError(f"--resume {folder}: this folder contains no search; give the folder that the first command printed")
    return RunDirectory.go_on(folder)


def again(folder: Path) -> str:
    """A hint how to continue after a failure that may be temporary."""
    return f"to continue, run the same command with --resume {folder}"


def require_trials(file: Path, topology: Topology) -> None:
    """Raises `UsageError` if trials would compute nothing or divide the model, if the task cannot be found, or if workers cannot be
    placed."""
    if not topology.trains:
        raise UsageError(
            f'{file}: [compute] device = "modelled" computes no losses, which a search needs: '
            'set [simulation] payload = "real" to train in the time that the profile gives'
        )
    if topology.compute.rows > 1 or topology.compute.grid == "auto":
        raise UsageError(
            f"{file}: [compute] grid = {topology.compute.grid!r} divides the model over the workers of a group, and a search tries "
            "groups of workers that each compute the whole model: remove the grid, or launch without a search"
        )
    assert topology.job.task is not None
    find_task(topology.job.task, topology.job.folders())
    place(regrouped(topology, 1))


def with_compression(topology: Topology, folder: Path, data_path: str | None, shown: Reporter) -> Topology:
    """The job of all trials: ``compression = "auto"`` is decided once, for the number of groups that is predicted to be the
    fastest, so that trials differ only in what is searched."""
    exchange = topology.exchange
    if exchange.compression != "auto" or exchange.kind != "model_server":  # trials use model servers, as `regrouped` has it
        return topology
    groups = fewest(searched(topology, data_path, measured=False).update_s)
    found = decided(regrouped(topology, groups), folder, data_path, shown.note).exchange.compression
    return topology.model_copy(update={"exchange": exchange.model_copy(update={"compression": found})})


def searched(topology: Topology, data_path: str | None, *, measured: bool) -> Space:
    """The space of the search. Raises `UsageError`, and `TaskError` if the task's own code fails."""
    return space_of(topology, variants(topology, source_of(topology, data_path).layers)["as it is"], measured=measured)


def summary_row(name: str, machine: Machine, done: Done) -> dict[str, Any]:
    """A strategy's result: when it reached the target, and how much of the time the search took."""
    last = machine.trials[-1][1] if machine.trials else None
    setting = done.setting
    return {
        "strategy": name,
        "reached": done.reached,
        "seconds": machine.search_s + machine.train_s,
        "updates": sum(outcome.updates for trial, outcome in machine.trials if trial.kind == "train"),
        "search_s": machine.search_s,
        "search_share": machine.share,
        "around_s": sum(outcome.around_s for _, outcome in machine.trials),
        "trials": len(machine.trials),
        "loss": None if last is None or last.diverged else last.loss,
        "groups": None if setting is None else setting.groups,
        "momentum": None if setting is None else setting.momentum,
        "lr": None if setting is None else setting.lr,
        "reason": done.reason,
    }


def tuned(topology: Topology, setting: Setting) -> Topology:
    """The job with the settings that were found, ready to be launched."""
    grouped = regrouped(topology, setting.groups)
    optimizer = grouped.optimizer.model_copy(update={"lr": setting.lr, "momentum": setting.momentum})
    return grouped.model_copy(update={"optimizer": optimizer})
