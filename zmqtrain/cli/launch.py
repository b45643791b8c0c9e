"""``zmqtrain launch FILE``: train.

What leads the run (`zmqtrain.cli.lead`) is imported once the processes that the run needs are forked: they import torch meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from zmqtrain.cli.emulation import emulation_of
from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.cli.overrides import load_with
from zmqtrain.errors import UsageError
from zmqtrain.launcher.elsewhere import require_here
from zmqtrain.launcher.emulate import EmulatedHosts, Emulation
from zmqtrain.launcher.engine import GatheringEngine, make_engine
from zmqtrain.launcher.local import LocalEngine
from zmqtrain.launcher.streams import survive_closed_streams
from zmqtrain.membership.journal import NAME
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import place, place_before
from zmqtrain.topology.schema import Topology
from zmqtrain.train.data_path import data_path_of

#: Options of the command that hardly any script has itself.
_OURS = frozenset({"--set", "--run-dir", "--emulate", "--detach"})


def run_launch(file: Path, script: Sequence[str] = (), options: LaunchOptions | None = None) -> int:
    """Launch a topology file, with a script of the user's own or the task that it names. Returns the exit code.

    Raises `UsageError` (and its children) before anything is started.
    """
    survive_closed_streams()
    options = options or LaunchOptions()
    if options.go_on and options.run_dir is None and not file.is_file():
        from zmqtrain.cli.lead import run_continue

        return run_continue(str(file), script, options)
    if options.go_on and options.run_dir is not None and (options.run_dir / NAME).exists():
        from zmqtrain.cli.lead import continued_there

        code = continued_there(options.run_dir, options)
        if code is not None:
            return code
    topology = load_with(file, options.all_settings()) if options.topology is None else options.topology
    emulation = emulation_of(topology, options.emulate, options.shaping, options.dilation)
    if (options.template is not None or options.dry_run) and not options.submit:
        raise UsageError(f"--{'dry-run' if options.dry_run else 'template'} is only for batch scripts: add --submit")
    if emulation is None and options.own_engine is None:
        require_here(topology)
    if topology.engine.kind == "slurm" and emulation is None and not options.submit:
        from zmqtrain.launcher.slurm.engine import in_allocation, require_allocation

        topology = in_allocation(topology, require_allocation())
    if topology.engine.kind == "ssh" and options.own_engine is None:
        topology = _with_room(topology, options)
    _check_program(file, topology, script)
    if script:
        from zmqtrain.embed.script_settings import check_script

        check_script(topology, resume=options.resume)
        if emulation is not None:
            emulation.check_script(topology)
        _note_options(script)
    if options.submit:
        from zmqtrain.cli.submit import run_submit

        return run_submit(topology, file, script, options)
    if topology.compute.auto_groups:
        return _launch_tuned(file, topology, script, emulation, options)
    return _launch(file, topology, script, emulation, options)


def _launch_tuned(
    file: Path, topology: Topology, script: Sequence[str], emulation: Emulation | None, options: LaunchOptions
) -> int:
    """Find the best number of groups, and train with it."""
    if script or options.detach:
        raise UsageError(
            'groups = "auto" needs a task and a launch in the foreground: set [compute] groups to a number, or '
            "remove the script, --detach or --submit"
        )
    if emulation is not None:
        emulation.check_search(topology)
    from zmqtrain.launcher.prepared import Prepared

    with Prepared.of_search(topology, emulation) as prepared:
        from zmqtrain.cli.lead import begun_run
        from zmqtrain.cli.tune_tables import Shown
        from zmqtrain.experiment.launch import launch_tuned
        from zmqtrain.observe.sinks.make import make_sinks

        make_sinks(topology.observe.to)  # now rather than after the search
        begun = begun_run(options)
        return launch_tuned(
            file,
            topology,
            emulation,
            Shown(json_lines=options.json_lines),
            json_lines=options.json_lines,
            data=_data_path(topology, options),
            resume=options.resume if begun is None else str(begun),
            run_dir=options.run_dir,
            prepared=prepared,
        )


def _launch(file: Path, topology: Topology, script: Sequence[str], emulation: Emulation | None, options: LaunchOptions) -> int:
    """Decide what is left to decide, and lead the run."""
    data_path = _data_path(topology, options)
    if topology.undecided:
        from zmqtrain.plan.decided import decided

        data = _absolute(data_path_of(options.data, topology), here=True)
        topology = decided(topology, file.resolve().parent, data, _tell)
    engine = options.own_engine
    if engine is None and emulation is None:
        engine = make_engine(topology.engine.kind)
    placement = place_before(topology) if isinstance(engine, GatheringEngine) else place(topology)
    if topology.job.task is not None:
        find_task(topology.job.task, topology.job.folders())  # fail here and now, rather than in every worker
    if options.go_on and options.run_dir is None:
        raise UsageError("--continue needs the directory of the run to continue: add --run-dir DIR")
    with ExitStack() as stack:
        here = emulation is not None or isinstance(engine, LocalEngine)
        if here and options.own_engine is None and not options.detach:  # one that is detached is forked itself
            from zmqtrain.launcher.entries import entry_for
            from zmqtrain.launcher.prepared import Prepared

            agents = len({role.host for role in placement.roles})
            prepared = stack.enter_context(Prepared.of(agents=agents, entry=entry_for(script[0] if script else None)))
            engine = LocalEngine(prepared=prepared) if emulation is None else EmulatedHosts(emulation, prepared)
        if options.forked is not None:
            options.forked()
        from zmqtrain.cli.lead import lead

        return lead(file, topology, placement, script, options, data_path=data_path, emulation=emulation, engine=engine)


def _with_room(topology: Topology, options: LaunchOptions) -> Topology:
    """The topology in which no host lacks ``slots``."""
    from zmqtrain.launcher.ssh.room import lacks_room, with_room, with_room_here
    from zmqtrain.net.loop import run

    if not lacks_room(topology):
        return topology
    return with_room_here(topology) if options.emulate else run(with_room(topology, _tell))


def _data_path(topology: Topology, options: LaunchOptions) -> str | None:
    """Where tasks find their data, in the form that is sent to hosts."""
    return _absolute(data_path_of(options.data, topology), here=topology.engine.kind == "local" or options.emulate)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_program(file: Path, topology: Topology, script: Sequence[str]) -> None:
    """Check that there is exactly one program to run: a task, or the user's script."""
    if script and script[0].endswith(".toml"):
        raise UsageError(
            f"{script[0]} looks like another topology file, where a script may follow {file}: launch one file at a time"
        )
    if script and topology.job.task is not None:
        raise UsageError(f"{file} names a task, and the command line names the script {script[0]}: remove one of them")
    if not script and topology.job.task is None and topology.compute.device != "modelled":
        raise UsageError(f'{file} names no task: add task = "file.py:function" to [job], or give a script to run')
    if script and not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]} in {Path.cwd()}")


def _absolute(path: str | None, *, here: bool) -> str | None:
    """A path of data in the form that is sent to hosts. It need not exist here, since it may exist on other hosts. ``here``: all
    hosts are this machine; on other machines a relative path begins at the host's own folder."""
    if path is None:
        return None
    return str(Path(path).expanduser().absolute()) if here else str(Path(path).expanduser())


def _note_options(script: Sequence[str]) -> None:
    """Say on standard error that options which look like the command's own go to the script."""
    given = [name for name in (argument.partition("=")[0] for argument in script[1:]) if name in _OURS]
    if given:
        print(
            f"note: {', '.join(dict.fromkeys(given))} comes after {script[0]}, so it goes to the script: options of zmqtrain "
            "launch stand before the script",
            file=sys.stderr,
        )
