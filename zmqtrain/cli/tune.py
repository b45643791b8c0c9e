"""``zmqtrain tune FILE``: which number of groups, momentum and learning rate reach the target soonest, and why.

What searches (`zmqtrain.experiment`) is imported once the process is forked that all trials fork their roles from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from zmqtrain.cli.emulation import emulation_of
from zmqtrain.cli.overrides import load_with
from zmqtrain.errors import UsageError
from zmqtrain.launcher.prepared import Prepared
from zmqtrain.launcher.signals import sigterm_interrupts
from zmqtrain.launcher.streams import survive_closed_streams
from zmqtrain.train.data_path import data_path_of
from zmqtrain.tune.baselines import StrategyName

NAMES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True, slots=True)
class How:
    """The options of ``zmqtrain tune``."""

    simulate: bool = False
    emulate: bool = False
    shaping: str | None = None
    dilation: float | None = None
    strategies: tuple[StrategyName, ...] = ("omnivore",)
    curves: bool = False
    resume: Path | None = None


@sigterm_interrupts()
def run_tune(
    file: Path,
    how: How,
    *,
    json_lines: bool = False,
    data: str | None = None,
    run_dir: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Tune the job of a topology file. Returns the exit code. Raises `UsageError`, `TaskError` and the error by which a trial
    fails."""
    survive_closed_streams()
    topology = load_with(file, settings if how.dilation is None else [*settings, f"network.dilation={how.dilation!r}"])
    if topology.job.task is None:
        raise UsageError(f'{file} names no task: a search needs losses; add task = "file.py:function" to [job]')
    if how.simulate and how.emulate:
        raise UsageError("--simulate and --emulate cannot be combined: remove one of them")
    if how.curves and topology.tune.target_loss is None:
        raise UsageError("--curves needs a target: set [tune] target_loss")
    if how.simulate and any(fault.at is None for fault in topology.faults):
        raise UsageError(
            '[[faults]] cannot have a "step" in a search, since each trial counts its own steps: give "at" (a time) instead'
        )
    emulation = None if how.simulate else emulation_of(topology, how.emulate, how.shaping, how.dilation)
    if emulation is not None:
        emulation.check_search(topology)
    with Prepared() if how.simulate else Prepared.of_search(topology, emulation) as prepared:
        from zmqtrain.cli.tune_tables import Shown
        from zmqtrain.experiment.search import TuningRun
        from zmqtrain.experiment.tuning import require_trials
        from zmqtrain.observe.sinks.make import make_sinks

        require_trials(file, topology)
        make_sinks(topology.observe.to)  # now rather than after the search
        search = TuningRun(
            topology,
            folder=file.resolve().parent,
            data=data_path_of(data, topology),
            simulate=how.simulate,
            emulation=emulation,
            # If everything is modelled, the planner knows all times.
            measured=not (how.simulate or how.emulate) or topology.compute.device != "modelled" or topology.compute.profile is None,
            prepared=prepared,
        )
        shown = Shown(json_lines=json_lines)
        return search.run(shown, how.strategies, curves=how.curves, resume=how.resume, run_dir=run_dir)


def names_of(given: Sequence[str]) -> tuple[StrategyName, ...]:
    """The strategies that were asked for. Raises `UsageError`."""
    if not given:
        return ("omnivore",)
    if "all" in given:
        return NAMES
    known = {name: name for name in NAMES}
    for name in given:
        if name not in known:
            raise UsageError(f"--strategy {name}: must be one of {', '.join(NAMES)}, or all")
    return tuple(known[name] for name in NAMES if name in given)
