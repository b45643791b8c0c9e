"""The part of ``zmqtrain launch`` that leads a run: a new one, or one that is taken over from a launcher that has died."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path

from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.errors import UsageError
from zmqtrain.launcher.continued import Leadership, Left, NothingLeftError, nothing_left
from zmqtrain.launcher.detached import run_detached
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.engine import Engine
from zmqtrain.launcher.local import LocalEngine
from zmqtrain.launcher.run import Launch, write_pid
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.journal import NAME
from zmqtrain.net.loop import run
from zmqtrain.observe.live import make_view
from zmqtrain.observe.run_directory import RunDirectory, began, find_run, runs_of
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints
from zmqtrain.train.checkpoint.weights import Weights
from zmqtrain.world import wall_s


def lead(
    file: Path,
    topology: Topology,
    placement: Placement,
    script: Sequence[str],
    options: LaunchOptions,
    *,
    data_path: str | None,
    emulation: Emulation | None,
    engine: Engine | None,
) -> int:
    """Make the run directory, and train. Returns the exit code.

    Args:
        file: the topology file.
        topology: what it describes, with nothing left to decide.
        placement: its roles on its hosts.
        script: of the user's own, with its arguments, in place of a task.
        options: those of the command.
        data_path: where tasks find their data, in the form that is sent to hosts.
        emulation: how all hosts are emulated on this machine.
        engine: what starts the agents; ``None``: what the topology or the emulation says.

    Raises `UsageError` (and its children) and `CheckpointError` before anything is started.
    """
    sinks = FanOut(topology.observe.to, topology.observe.options)  # refuses what is not installed here
    begun = begun_run(options)
    resume_from = _resume_from(begun, options.resume, topology.job.name)
    if resume_from is None:
        Weights.of_job(topology)  # raises here, where no run directory is left behind
    directory = RunDirectory.create(topology.job.name, exact=options.run_dir) if begun is None else RunDirectory.go_on(begun)
    events_before = (directory.path / "events.jsonl").stat().st_size
    directory.write("topology.toml", topology.to_toml())
    alone_s = 0.0
    if emulation is None and options.own_engine is None and topology.job.alone:
        if topology.engine.kind == "local" and options.detach:
            engine, alone_s = LocalEngine(outlive=True), topology.job.alone
        elif topology.engine.kind == "ssh":
            alone_s = topology.job.alone
    description = RunDescription(
        topology,
        placement,
        folder=str(file.resolve().parent),
        data_path=data_path,
        resume=None if resume_from is None else str(resume_from),
        script=tuple(script),
        alone_s=alone_s,
    )

    def go() -> int:
        write_pid(directory)
        groups = {role.peer: role.group for role in placement.everyone}
        view = make_view(groups, json_lines=options.json_lines, every_steps=topology.observe.progress_every)
        leadership = Leadership.begin(directory, description, began=wall_s()) if alone_s else None
        launch = Launch(
            description,
            directory,
            view,
            emulation=emulation,
            engine=engine,
            sinks=sinks,
            leadership=leadership,
            refusable=begun is None and not options.detach,  # a detached one has only its directory to say why
        )
        return run(launch.run(), dilation=None if emulation is None else emulation.dilation)

    return _go_detached(directory.path, go, events_before, json_lines=options.json_lines) if options.detach else go()


def run_continue(name: str, script: Sequence[str] = (), options: LaunchOptions | None = None) -> int:
    """Take over a run whose launcher is gone. Returns the exit code.

    Raises `JournalError` if the launcher still leads the run, or if nothing of the run is left, and `UsageError`."""
    options = options or LaunchOptions()
    try:
        path = find_run(name)
    except UsageError as error:
        raise UsageError(
            f"--continue takes a run whose launcher has died ({error}); or a topology file, and with --run-dir the directory of "
            "the run to continue or to begin"
        ) from error
    given = {
        "a script": bool(script),
        "--resume": options.resume is not None,
        "--data": options.data is not None,
        "--set": bool(options.settings),
        "--engine": options.engine is not None,
        "--emulate": options.emulate,
        "--submit": options.submit,
    }
    if any(given.values()):
        what = ", ".join(option for option, there in given.items() if there)
        raise UsageError(f"--continue {name} takes over the run as it is: leave out {what}")
    return _continue(path, options)


def continued_there(path: Path, options: LaunchOptions) -> int | None:
    """Take over the run in this directory, whose processes may be alive: they must not run twice. Returns the exit code, or
    ``None`` if nothing of it is left, which is said."""
    try:
        return _continue(path, options)
    except NothingLeftError as error:
        _tell(str(error).partition(". ")[0])
        (path / NAME).unlink(missing_ok=True)
        return None


def _continue(path: Path, options: LaunchOptions) -> int:
    leadership = Leadership.take_over(path)
    description = leadership.description()
    if description.topology.engine.kind == "local" and not leadership.has_ended and not Left.of(path).processes:
        leadership.journal.close()
        raise nothing_left(path)
    observe = description.topology.observe
    sinks = FanOut(observe.to, observe.options)  # refuses what is not installed here
    events_before = (path / "events.jsonl").stat().st_size

    def go() -> int:
        leadership.begin_epoch()
        directory, shorter = RunDirectory.take_over(path, leadership.sizes())
        write_pid(directory)
        groups = {role.peer: role.group for role in description.placement.everyone}
        view = make_view(groups, json_lines=options.json_lines, every_steps=description.topology.observe.progress_every)
        launch = Launch(description, directory, view, sinks=sinks, leadership=leadership)
        if shorter:
            view.note(f"warning: the end of {', '.join(shorter)} was lost with the launcher's machine")
        try:
            return run(launch.run())
        except NothingLeftError as error:
            if not options.detach:
                raise
            _tell(str(error))
            return error.exit_code

    return _go_detached(path, go, events_before, json_lines=options.json_lines) if options.detach else go()


def begun_run(options: LaunchOptions) -> Path | None:
    """The run to continue in its own directory, if it has begun."""
    folder = options.run_dir
    return folder if options.go_on and folder is not None and (folder / "topology.toml").exists() else None


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _go_detached(run: Path, go: Callable[[], int], events_before: int, *, json_lines: bool) -> int:
    """Wait until all roles have joined; after that the launcher continues alone."""
    code = run_detached(
        run,
        go,
        is_running=lambda: _has_joined(run, events_before),
        out=sys.stderr if json_lines else sys.stdout,  # JSON alone, for machines
    )
    if code is not None:
        return code
    if json_lines:
        print(dumps({"run": str(run), "status": "running"}))
    else:
        print(f"detached. zmqtrain attach {run} shows it, zmqtrain stop {run} stops it")
    return 0


def _has_joined(path: Path, before: int) -> bool:
    """Whether all roles have joined, or the run was taken over. That is among the first events after the ``before`` that were
    there, so the file is still short."""
    with (path / "events.jsonl").open("rb") as events:
        events.seek(before)
        return any(b'"running"' in line or b'"continued"' in line for line in events)


def _resume_from(begun: Path | None, resume: str | None, name: str) -> Path | None:
    """The checkpoint to resume from: that of the run that has begun, if it has one; otherwise the one that ``--resume`` names."""
    if begun is not None and find_checkpoints(begun / "checkpoints"):
        return begun
    return None if resume is None else run_to_resume(resume, name)


def run_to_resume(resume: str, name: str) -> Path:
    """What ``--resume`` names. ``latest`` means the newest run of this name that has a checkpoint. Raises `UsageError`."""
    if resume != "latest":
        path = Path(resume)
        return path if path.exists() else find_run(resume)
    own = re.compile(re.escape(name) + r"-\d+")  # and not those of a job called NAME-large
    runs = [path for path in runs_of() if own.fullmatch(path.name)]
    for folder in sorted(runs, key=began, reverse=True):
        if any((folder / "checkpoints").glob("step-*")):
            return folder
    raise UsageError(f"--resume latest: no run of {name} in {Path('runs').absolute()} has a checkpoint")
