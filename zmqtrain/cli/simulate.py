"""``zmqtrain simulate FILE``: the job on virtual time and modelled machines."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zmqtrain.cli.overrides import load_with
from zmqtrain.errors import InvariantError, SimulationError, UsageError
from zmqtrain.launcher.run import write_pid
from zmqtrain.launcher.signals import sigterm_interrupts
from zmqtrain.launcher.streams import survive_closed_streams
from zmqtrain.membership.description import RunDescription
from zmqtrain.observe.live import make_view
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.plan.decided import decided
from zmqtrain.processors import processors
from zmqtrain.run.ending import Ending
from zmqtrain.run.preemption import INTERRUPTED
from zmqtrain.run.record import RunRecord
from zmqtrain.run.report import report_of
from zmqtrain.simulate.explore import FaultSource, Trial, explore, faults_for, horizon_of
from zmqtrain.simulate.run import Options, resolved, simulate
from zmqtrain.strict_json import dumps
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import place
from zmqtrain.topology.plan import NOMINAL_FLOPS
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.topology.schema import Topology
from zmqtrain.train.data_path import data_path_of
from zmqtrain.train.device.profile import Profile
from zmqtrain.words import counted

SOURCES: tuple[FaultSource, ...] = ("file", "random", "none")
#: Exit code if an invariant was broken.
BROKEN = InvariantError.exit_code


@sigterm_interrupts()
def run_simulate(
    file: Path,
    *,
    seed: int | None = None,
    seeds: int = 0,
    faults: str = "file",
    jobs: int = 0,
    json_lines: bool = False,
    data: str | None = None,
    run_dir: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Simulate a topology file once, or with many seeds. Returns the exit code. Raises `UsageError`, `SimulationError`."""
    survive_closed_streams()
    topology = load_with(file, settings)
    source = next((known for known in SOURCES if known == faults), None)
    if source is None:
        raise UsageError(
            f"--faults {faults}: must be one of {', '.join(SOURCES)}; write a schedule of faults in the file, as [[faults]]"
        )
    if topology.job.task is None and topology.compute.device != "modelled":
        raise UsageError(
            f'{file} names no task: add task = "file.py:function" to [job], or set [compute] device = '
            '"modelled" and profile = "resnet50"'
        )
    if topology.compute.auto_groups:
        raise UsageError(f'{file} has groups = "auto": zmqtrain tune {file} --simulate finds the number')
    if topology.job.task is not None and topology.trains:
        find_task(topology.job.task, topology.job.folders())
    if topology.compute.profile is not None:
        Profile.load(topology.compute.profile)
    topology = decided(topology, file.resolve().parent, data, lambda text: print(text, file=sys.stderr))
    place(topology)
    first = topology.job.seed if seed is None else seed
    if seeds:
        again = shlex.join(
            ["zmqtrain", "simulate", str(file), "--faults", source, *(part for text in settings for part in ("--set", text))]
        )
        return _many(topology, range(first, first + seeds), source, jobs or processors(), again=again, json_lines=json_lines)
    return _once(topology, first, source, json_lines=json_lines, data=data, run_dir=run_dir)


def _once(topology: Topology, seed: int, source: FaultSource, *, json_lines: bool, data: str | None, run_dir: Path | None) -> int:
    horizon_s = horizon_of(topology) if source == "random" else 0.0  # of the file's seed, as if this were one seed of many
    topology = resolved(topology, seed)
    placement = place(topology)
    schedule = faults_for(topology, seed, source, horizon_s)
    sinks = FanOut(topology.observe.to, topology.observe.options)
    directory = RunDirectory.create(topology.job.name, exact=run_dir)
    directory.write("topology.toml", topology.to_toml())
    write_pid(directory)
    data_path = data_path_of(data, topology)
    description = RunDescription(topology, placement, os.getcwd(), data_path)
    groups = {role.peer: role.group for role in placement.everyone}
    view = make_view(groups, json_lines=json_lines, every_steps=topology.observe.progress_every)
    # Progress is shown by real time, not by virtual time.
    record = RunRecord(description, directory, view, world="simulated", clock=time.monotonic, sinks=sinks)
    try:
        for begun in sinks.begin(record.facts()):
            begun.result(topology.job.timeouts.join_s)
    except UsageError:
        view.end()
        sinks.abandon()
        directory.discard()
        raise
    options = Options(
        faults=schedule,
        usual_s=horizon_s or None,
        compare_model=source == "random",
        data_path=data_path,
        checkpoints=directory.checkpoints,
        on_event=record.membership_event,
        on_report=record.report,
        on_checkpoint=record.checkpoint_event,
        on_restart=record.begins_again,
    )
    view.begin(f"simulated: {record.title()}")
    began = time.monotonic()
    try:
        result = simulate(topology, seed=seed, options=options)
    except SimulationError as error:
        view.end()
        report = {**report_of(error, "simulation"), "host": "", "pid": 0}
        record.write_up(Ending("failed", error.exit_code, report), getattr(error, "now_s", 0.0), {"seed": seed})
        return error.exit_code
    except KeyboardInterrupt:
        view.end()
        record.write_up(Ending("interrupted", INTERRUPTED), record.newest_s, {"seed": seed})
        return INTERRUPTED
    finally:
        (directory.path / "pid").unlink(missing_ok=True)
    view.end()
    took_s = time.monotonic() - began
    more = {"seed": seed, "faults": [str(fault) for fault in result.faults], "broken": result.broken}
    record.write_up(result.ending, result.seconds, more)
    for fault in result.faults:
        view.note(f"fault: {fault}")
    if topology.compute.profile is None:
        view.note(
            f"computation takes the time of a nominal device of {NOMINAL_FLOPS / 1e9:g} GFLOP/s: give [compute] profile a shipped "
            "profile, or what zmqtrain profile --out has measured, for a real one's"
        )
    per_s = result.callbacks / took_s if took_s > 0 else 0.0
    view.note(
        f"{result.seconds:.6g} virtual seconds (seed {seed}) took {rounded_duration(took_s)}, {per_s:,.0f} callbacks a second"
    )
    if result.broken:
        raise InvariantError(seed, result.broken)
    return record.exit_code(result.ending)


def _many(topology: Topology, seeds: Sequence[int], source: FaultSource, jobs: int, *, again: str, json_lines: bool) -> int:
    """Try all seeds. Ctrl-C ends the search, and the results so far are printed. ``again``: the command that repeats one, without
    its seed."""
    began = time.monotonic()
    endings: Counter[str] = Counter()
    broken: list[Trial] = []
    interrupted = False
    try:
        for trial in explore(topology, seeds, faults=source, jobs=jobs):
            endings[trial.status] += 1
            if trial.broken:
                broken.append(trial)
            if json_lines:
                line = {"seed": trial.seed, "status": trial.status, "seconds": trial.seconds, "faults": trial.faults}
                print(dumps({**line, "error": trial.error, "broken": trial.broken}), flush=True)
            elif trial.broken:
                print(_about(trial), flush=True)
            elif endings.total() % 100 == 0:
                print(f"{endings.total():,} seeds, {rounded_duration(time.monotonic() - began)}", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    if not json_lines:
        told = ", ".join(f"{count} {status}" for status, count in endings.most_common()) or "none"
        took = f"{counted(endings.total(), 'seed')} in {rounded_duration(time.monotonic() - began)}"
        print(f"{'interrupted after ' if interrupted else ''}{took}: {told}; {len(broken)} broke an invariant")
    if broken:
        first = broken[0].seed
        print(f"zmqtrain: seed {first} can be replayed with: {again} --seed {first}", file=sys.stderr)
        return BROKEN
    return INTERRUPTED if interrupted else 0


def _about(trial: Trial) -> str:
    faults = "".join(f"\n  fault: {fault}" for fault in trial.faults)
    return f"seed {trial.seed}: {trial.status} after {trial.seconds:.6g} s {trial.error}{faults}" + "".join(
        f"\n  broken: {text}" for text in trial.broken
    )
