"""``zmqtrain launch FILE``: train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path

from zmqtrain.cli.emulation import emulation_of
from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.cli.overrides import load_with
from zmqtrain.cli.submit import run_submit
from zmqtrain.embed.script_settings import check_script
from zmqtrain.errors import UsageError
from zmqtrain.launcher.continued import Leadership, Left, NothingLeftError, nothing_left
from zmqtrain.launcher.detached import run_detached
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.engine import GatheringEngine, make_engine
from zmqtrain.launcher.local import LocalEngine
from zmqtrain.launcher.run import Launch, write_pid
from zmqtrain.launcher.slurm.engine import in_allocation, require_allocation
from zmqtrain.launcher.ssh.room import lacks_room, with_room, with_room_here
from zmqtrain.launcher.streams import survive_closed_streams
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.journal import NAME
from zmqtrain.net.loop import run
from zmqtrain.observe.live import make_view
from zmqtrain.observe.run_directory import RunDirectory, find_run
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.observe.sinks.make import make_sinks
from zmqtrain.plan.decided import decided
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import place, place_before
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints
from zmqtrain.train.data_path import data_path_of
from zmqtrain.world import wall_s


def run_launch(file: Path, script: Sequence[str] = (), options: LaunchOptions | None = None) -> int:
    """Launch a topology file, with a script of the user's own or the task that it names. Returns the exit code.

    Raises `UsageError` (and its children) before anything is started.
    """
    survive_closed_streams()
    options = options or LaunchOptions()
    if options.go_on and options.run_dir is None and not file.is_file():
        return run_continue(str(file), script, options)
    if options.go_on and options.run_dir is not None and (options.run_dir / NAME).exists():
        try:  # its processes may be alive: they must not run twice
            return _continue(options.run_dir, options)
        except NothingLeftError as error:
            _tell(str(error).partition(". ")[0])
            (options.run_dir / NAME).unlink(missing_ok=True)
    topology = load_with(file, options.all_settings()) if options.topology is None else options.topology
    emulation = emulation_of(topology, options.emulate, options.shaping, options.dilation)
    if (options.template is not None or options.dry_run) and not options.submit:
        raise UsageError(f"--{'dry-run' if options.dry_run else 'template'} is only for batch scripts: add --submit")
    if topology.engine.kind == "slurm" and emulation is None and not options.submit:
        topology = in_allocation(topology, require_allocation())
    if lacks_room(topology) and options.own_engine is None:
        topology = with_room_here(topology) if options.emulate else run(with_room(topology, _tell))
    _check_program(file, topology, script)
    if script:
        check_script(topology, resume=options.resume)
    if options.submit:
        return run_submit(topology, file, script, options)
    if topology.compute.auto_groups:
        return _launch_tuned(file, topology, script, emulation, options)
    return _launch(file, topology, script, emulation, options)


def _launch_tuned(
    file: Path, topology: Topology, script: Sequence[str], emulation: Emulation | None, options: LaunchOptions
) -> int:
    """Find the best number of groups, and train with it."""
    from zmqtrain.cli.tune_tables import Shown
    from zmqtrain.experiment.launch import launch_tuned

    if script or options.detach:
        raise UsageError(
            'groups = "auto" needs a task and a launch in the foreground: set [compute] groups to a number, or '
            "remove the script, --detach or --submit"
        )
    make_sinks(topology.observe.to)  # now rather than after the search
    begun = _begun(options)
    resume = options.resume if begun is None else str(begun)
    data = _data_path(topology, options)
    json_lines = options.json_lines
    shown = Shown(json_lines=json_lines)
    return launch_tuned(file, topology, emulation, shown, json_lines=json_lines, data=data, resume=resume, run_dir=options.run_dir)


def _launch(file: Path, topology: Topology, script: Sequence[str], emulation: Emulation | None, options: LaunchOptions) -> int:
    """Make the run directory, and train."""
    data_path = _data_path(topology, options)
    topology = decided(topology, file.resolve().parent, _absolute(data_path_of(options.data, topology), here=True))
    engine = options.own_engine
    if engine is None and emulation is None:
        engine = make_engine(topology.engine.kind)
    placement = place_before(topology) if isinstance(engine, GatheringEngine) else place(topology)
    if topology.job.task is not None:
        find_task(topology.job.task, (".", *topology.job.python_path))  # fail here and now, rather than in every worker
    if options.go_on and options.run_dir is None:
        raise UsageError("--continue needs the directory of the run to continue: add --run-dir DIR")
    sinks = FanOut(topology.observe.to, topology.observe.options)  # refuses what is not installed here
    begun = _begun(options)
    resume_from = _resume_from(begun, options.resume, topology.job.name)
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
        launch = Launch(description, directory, view, emulation=emulation, engine=engine, sinks=sinks, leadership=leadership)
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


def _data_path(topology: Topology, options: LaunchOptions) -> str | None:
    """Where tasks find their data, in the form that is sent to hosts."""
    return _absolute(data_path_of(options.data, topology), here=topology.engine.kind == "local" or options.emulate)


def _begun(options: LaunchOptions) -> Path | None:
    """The run to continue in its own directory, if it has begun."""
    folder = options.run_dir
    return folder if options.go_on and folder is not None and (folder / "topology.toml").exists() else None


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_program(file: Path, topology: Topology, script: Sequence[str]) -> None:
    """Check that there is exactly one program to run: a task, or the user's script."""
    if script and topology.job.task is not None:
        raise UsageError(f"{file} names a task, and the command line names the script {script[0]}: remove one of them")
    if not script and topology.job.task is None and topology.compute.device != "modelled":
        raise UsageError(f'{file} names no task: add task = "file.py:function" to [job], or give a script to run')
    if script and not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]} in {Path.cwd()}")


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


def _absolute(path: str | None, *, here: bool) -> str | None:
    """A path of data in the form that is sent to hosts. It need not exist here, since it may exist on other hosts. ``here``: all
    hosts are this machine; on other machines a relative path begins at the host's own folder."""
    if path is None:
        return None
    return str(Path(path).expanduser().absolute()) if here else str(Path(path).expanduser())


def _resume_from(begun: Path | None, resume: str | None, name: str) -> Path | None:
    """The checkpoint to resume from: that of the run that has begun, if it has one; otherwise the one that ``--resume`` names."""
    if begun is not None and find_checkpoints(begun / "checkpoints"):
        return begun
    return None if resume is None else _resume(resume, name)


def _resume(resume: str, name: str) -> Path:
    """``latest`` means the newest run of this name that has a checkpoint."""
    if resume != "latest":
        path = Path(resume)
        return path if path.exists() else find_run(resume)
    runs = sorted(Path("runs").glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in runs:
        if any((folder / "checkpoints").glob("step-*")):
            return folder
    raise UsageError(f"--resume latest: no run of {name} in {Path('runs').absolute()} has a checkpoint")
