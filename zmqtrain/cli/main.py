"""The ``zmqtrain`` command. Each command imports what it needs when it runs, so that ``--help`` is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from zmqtrain.cli.command import Command, Commands, ScriptCommand

app = typer.Typer(
    name="zmqtrain",
    cls=Commands,
    help="Train a PyTorch model on a few machines over an ordinary network.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"zmqtrain {version('zmqtrain')}")
        raise typer.Exit()


def _runs_like(incomplete: str) -> list[str]:
    """For the shell's completion: names of runs in ``runs``."""
    from zmqtrain.observe.run_directory import runs_of

    return [name for path in runs_of(Path("runs")) if (name := path.name).startswith(incomplete)] + ["latest"]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train a PyTorch model on a few machines over an ordinary network."""


Json = Annotated[bool, typer.Option("--json", help="Print JSON lines only, for other programs to read.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The topology file.")]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run directory, a run's name such as digits-001, or latest.", autocompletion=_runs_like),
]
Data = Annotated[str | None, typer.Option(help="Where the task finds its data. Default: the ZMQTRAIN_DATA variable.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the file. May be repeated.")
]
RunDirectory = Annotated[Path | None, typer.Option(help="The run directory. Default: the next runs/NAME-NNN.")]
Emulate = Annotated[
    bool, typer.Option("--emulate", help="Put all hosts on this machine, with a network like FILE's \\[network] between them.")
]


@app.command(cls=ScriptCommand, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def launch(
    context: typer.Context,
    file: File,
    json_lines: Json = False,
    data: Data = None,
    resume: Annotated[str | None, typer.Option(help="Continue from a checkpoint: a folder, a run, or latest.")] = None,
    run_dir: RunDirectory = None,
    settings: Settings = None,
    emulate: Emulate = False,
    shaping: Annotated[
        str | None,
        typer.Option(help="With --emulate: namespaces (of the Linux kernel; needs root), paced (by the endpoints), or auto."),
    ] = None,
    dilation: Annotated[
        float | None, typer.Option(help="With --emulate: run this many times more slowly, and divide reported times by it.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the run is under way; use zmqtrain attach, stop and logs to follow it.")
    ] = False,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Take over the run FILE, whose launcher has died; with --run-dir, continue that directory's run, or start it.",
        ),
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="The engine that starts the agents, instead of the file's \\[engine] kind.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="With --engine slurm: submit a batch script that launches.")] = False,
    template: Annotated[
        Path | None, typer.Option(help="With --submit: the batch script's template, instead of zmqtrain's own.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --submit: print the batch script.")] = False,
) -> None:
    """Train what FILE describes. A script of your own, and its arguments, may follow: zmqtrain launch FILE script.py ...

    Everything after the script's name is passed to the script. Exit codes: 0 done, 2 bad usage or topology, 3 the task's own code
    failed, 64 to 127 other permanent failures, 128 and above failures that may be temporary.
    """
    from zmqtrain.launcher.one_thread import import_numpy

    import_numpy()  # the launcher forks (`zmqtrain.launcher.prepared`)
    from zmqtrain.cli.launch import run_launch
    from zmqtrain.cli.launch_options import LaunchOptions

    options = LaunchOptions(
        json_lines=json_lines,
        data=data,
        resume=resume,
        run_dir=run_dir,
        settings=settings or (),
        emulate=emulate,
        shaping=shaping,
        dilation=dilation,
        detach=detach,
        go_on=go_on,
        engine=engine,
        submit=submit,
        template=template,
        dry_run=dry_run,
    )
    code = run_launch(file, context.args, options)
    raise typer.Exit(code)


@app.command(cls=Command)
def check(
    file: File,
    json_lines: Json = False,
    data: Annotated[str | None, typer.Option(help="Where the task will find its data, as for launch.")] = None,
    file_only: Annotated[bool, typer.Option("--file-only", help="Check only the file, and no other machine.")] = False,
    emulate: Annotated[bool, typer.Option("--emulate", help="Check hosts as launch --emulate would place them here.")] = False,
    load: Annotated[
        bool | None,
        typer.Option("--load/--no-load", help="Import the task and call its function. Default: if all hosts are this machine."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="The engine that starts the agents, instead of the file's \\[engine] kind.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Show what a launch of FILE would do, and what would prevent it.

    Hosts that are other machines are checked, too: names, ports, bandwidth and round trips, clocks, versions, free space, keys.
    """
    from zmqtrain.cli.check import run_check
    from zmqtrain.cli.launch_options import with_engine

    code = run_check(
        file,
        json_lines,
        data=data,
        file_only=file_only,
        emulate=emulate,
        load=load,
        settings=with_engine(settings or (), engine),
    )
    raise typer.Exit(code)


@app.command(cls=Command)
def simulate(
    file: File,
    json_lines: Json = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the simulation instead of the job's; with --seeds, the first one.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=0, metavar="N", help="Try this many seeds, and report those that break an invariant.")
    ] = 0,
    faults: Annotated[
        str, typer.Option(help="file: the schedule in FILE; random: one drawn from each seed; none: no faults.")
    ] = "file",
    jobs: Annotated[int, typer.Option(min=0, metavar="N", help="Processes that try seeds. 0: one per processor.")] = 0,
    data: Data = None,
    run_dir: RunDirectory = None,
    settings: Settings = None,
) -> None:
    """Run FILE's job on virtual time in this process, with modelled devices and network and any number of hosts.

    The same seed gives the same run, event by event.
    """
    from zmqtrain.cli.simulate import run_simulate

    code = run_simulate(
        file,
        seed=seed,
        seeds=seeds,
        faults=faults,
        jobs=jobs,
        json_lines=json_lines,
        data=data,
        run_dir=run_dir,
        settings=settings or (),
    )
    raise typer.Exit(code)


@app.command(cls=Command)
def plan(
    file: File,
    json_lines: Json = False,
    batch: Annotated[str | None, typer.Option(help="Samples per step instead of the file's; several, separated by commas.")] = None,
    processes: Annotated[
        str | None, typer.Option(help="Processes of the group instead of the file's; several, separated by commas.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Show strong and weak scaling, and scaling beyond the batch size.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the parts of a step for each grid, as an SVG file.")] = None,
    price: Annotated[Path | None, typer.Option(help="Price this plan (JSON, as written by --save) instead of planning.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file, as JSON.")] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also run the plan on the simulated network, and show predicted, counted and measured costs."
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also compare the divided model with the undivided one, on a few samples.")
    ] = False,
    data: Data = None,
    settings: Settings = None,
) -> None:
    """Choose how to divide each layer over FILE's compute group (by model, domain or batch, and on which grid), and show why.

    The answer comes from a cost model; nothing runs, except with --measure and --verify. FILE needs a task, a profile, or a table
    of layers (plan.layers).
    """
    from zmqtrain.cli.plan import run_plan

    code = run_plan(
        file,
        json_lines=json_lines,
        plot=plot,
        sweep_it=sweep,
        batches=batch,
        processes=processes,
        given=price,
        save=save,
        measure=measure,
        verify=verify,
        data=data,
        settings=settings or (),
    )
    raise typer.Exit(code)


@app.command(cls=Command)
def tune(
    file: File,
    json_lines: Json = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run trials on virtual time, as zmqtrain simulate does.")] = False,
    emulate: Emulate = False,
    shaping: Annotated[str | None, typer.Option(help="With --emulate: namespaces, paced or auto.")] = None,
    dilation: Annotated[float | None, typer.Option(help="With --emulate: run this many times more slowly.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="omnivore (default), default, sync, async, bayesian, or all. May be repeated to compare several in one table.",
        ),
    ] = None,
    curves: Annotated[
        bool,
        typer.Option(
            "--curves", help="Instead of searching, train to the target with every number of groups, and show the trade-off."
        ),
    ] = False,
    resume: Annotated[Path | None, typer.Option(help="Continue the search in this folder.")] = None,
    data: Data = None,
    run_dir: Annotated[Path | None, typer.Option(help="The search's folder. Default: the next runs/NAME-tune-NNN.")] = None,
    settings: Settings = None,
) -> None:
    """Find the number of compute groups, momentum and learning rate that reach the target soonest, and train with them.

    This is Omnivore's automatic optimizer: short trials from one checkpoint, which take at most a tenth of the time. See
    docs/tuning.md.
    """
    from zmqtrain.launcher.one_thread import import_numpy

    import_numpy()  # the search forks (`zmqtrain.launcher.prepared`)
    from zmqtrain.cli.tune import How, names_of, run_tune

    how = How(simulate, emulate, shaping, dilation, names_of(strategy or ()), curves, resume)
    raise typer.Exit(run_tune(file, how, json_lines=json_lines, data=data, run_dir=run_dir, settings=settings or ()))


@app.command(cls=Command)
def profile(
    target: Annotated[
        str, typer.Argument(metavar="TASK_OR_FILE", help="A task such as file.py:task, or a topology file with one.")
    ],
    out: Annotated[Path | None, typer.Option(help="Write the profile to this file, as JSON for compute.profile.")] = None,
    batches: Annotated[
        str | None, typer.Option(help="Batch sizes to try, such as 1,2,4,8. Default: doubled until throughput stops growing.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Batch size for the table of layers. Default: a worker's part in FILE, or else the best."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of threads. Default: try several.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N instead of the file's.")] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the network between FILE's hosts instead of the model.")] = False,
    emulate: Annotated[bool, typer.Option("--emulate", help="With --links: between emulated hosts, on this machine.")] = False,
    shaping: Annotated[str | None, typer.Option(help="With --emulate: namespaces, paced, or auto.")] = None,
    data: Data = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=600, metavar="SECONDS", help="Time for each batch size and number of threads.")
    ] = 1.0,
    json_lines: Json = False,
    settings: Settings = None,
) -> None:
    """Measure a task's model on this machine: each layer forward and backward, the best batch and threads, the processor's peak.

    With --links, measure bandwidth and latency between hosts instead. The planner and modelled devices read what --out writes.
    """
    from zmqtrain.cli.profile import run_profile

    code = run_profile(
        target,
        out=out,
        batches=batches,
        batch=batch,
        threads=threads,
        device=device,
        links=links,
        emulate=emulate,
        shaping=shaping,
        data=data,
        seconds=seconds,
        json_lines=json_lines,
        settings=settings or (),
    )
    raise typer.Exit(code)


@app.command(cls=Command)
def render(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="kubernetes: a JobSet with its Secret and ConfigMap.")],
    file: File,
    settings: Settings = None,
) -> None:
    """Print the manifest with which a scheduler runs FILE: zmqtrain render kubernetes FILE | kubectl apply -f -"""
    from zmqtrain.cli.render import run_render

    raise typer.Exit(run_render(kind, file, settings=settings or ()))


@app.command(cls=Command)
def schema() -> None:
    """Print the topology file's schema as JSON Schema."""
    from zmqtrain.cli.schema import run_schema

    raise typer.Exit(run_schema())


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench() -> None:
    """Say where the benchmarks are now."""
    from zmqtrain.errors import UsageError

    raise UsageError("benchmarks are not part of the package: run `python -m benchmarks NAME` in a checkout of zmqtrain")


@app.command(cls=Command)
def status(run: Run = "latest", json_lines: Json = False) -> None:
    """Show the state of a run."""
    from zmqtrain.cli.runs import run_status

    raise typer.Exit(run_status(run, json_lines=json_lines))


@app.command("runs", cls=Command)
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the run directories are.")] = Path("runs"),
    json_lines: Json = False,
) -> None:
    """List the runs in a folder, oldest first, with their states and results."""
    from zmqtrain.cli.runs import run_list

    raise typer.Exit(run_list(folder, json_lines=json_lines))


@app.command(cls=Command)
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Runs: paths, names such as NAME-NNN, or latest. Several are drawn on one page."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file to write. Default: report.html in the directory of the (first) run.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json_lines: Json = False,
) -> None:
    """Write one self-contained page about a run: curves, step times, traffic, staleness, and what went wrong."""
    from zmqtrain.cli.report import run_report

    raise typer.Exit(run_report(runs or ["latest"], output=output, json_lines=json_lines, open_it=open_it))


@app.command(cls=Command)
def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="The run to show first, or a folder of runs. Default: runs.", autocompletion=_runs_like),
    ] = None,
    address: Annotated[str, typer.Option(help="Where to listen. Other machines reach the default only through ssh.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Default: 8790, or any free port if that is taken. 0: any free port."),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json_lines: Json = False,
) -> None:
    """Show runs in the browser, while they train and afterwards: curves, step times, workers, events; or two runs compared.

    The printed address contains a token, without which nothing is shown. Buttons write a checkpoint, stop a run or drain a host.
    """
    from zmqtrain.cli.dashboard import run_dashboard

    raise typer.Exit(run_dashboard(run, address=address, port=port, open_it=open_it, json_lines=json_lines))


@app.command(cls=Command)
def top(run: Run = "latest") -> None:
    """Show runs in the terminal, while they train and afterwards: the dashboard without a browser. q or Ctrl-C leaves it.

    RUN may also be a folder of runs. Keys ask for a checkpoint, stop the run or drain a host, as the dashboard's buttons do.
    Leaving changes nothing. Without a terminal the command prints the run's current state once.
    """
    from zmqtrain.cli.top import run_top

    raise typer.Exit(run_top(run))


@app.command(cls=Command)
def attach(run: Run = "latest", json_lines: Json = False) -> None:
    """Follow a run that was launched in another terminal, or with --detach. Ctrl-C stops following; the run goes on."""
    from zmqtrain.cli.attach import run_attach

    raise typer.Exit(run_attach(run, json_lines=json_lines))


@app.command(cls=Command)
def stop(
    run: Run,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Fail (code 66) if no checkpoint of the last step was kept.")
    ] = False,
) -> None:
    """Stop a run on all its hosts, as Ctrl-C would, even if its launcher is gone.

    Where it can, the run writes a checkpoint first. To stop it at once, use the command twice.
    """
    from zmqtrain.cli.runs import run_stop

    raise typer.Exit(run_stop(run, checkpoint=checkpoint))


@app.command(cls=Command)
def drain(run: Run, host: Annotated[str, typer.Argument(metavar="HOST", help="Its name in the topology file.")]) -> None:
    """Take a host out of an elastic run, which trains on without it. Returns when the host can be switched off.

    Its workers end as lost ones do, but nobody waits for them. A host with model servers cannot leave.
    """
    from zmqtrain.cli.drain import run_drain

    raise typer.Exit(run_drain(run, host))


@app.command(cls=Command)
def join(
    run: Run = "latest",
    show: Annotated[
        bool,
        typer.Option("--show", help="Print the command for another machine instead. It has the run's token: keep it secret."),
    ] = False,
) -> None:
    """Add a worker on this machine to an elastic all-reduce run that is training, or a model server to a run with model servers,
    until it ends.

    [job] max_workers says how many workers it may have, and [exchange] max_servers how many model servers. Ctrl-C leaves; the
    others train on.
    """
    from zmqtrain.cli.join import run_join

    raise typer.Exit(run_join(run, show=show))


@app.command(cls=Command)
def logs(
    run: Run = "latest",
    role: Annotated[str | None, typer.Argument(metavar="ROLE", help="One role, such as worker/3.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends. Ctrl-C does not stop the run.")
    ] = False,
) -> None:
    """Print what the processes of a run have printed."""
    from zmqtrain.cli.runs import run_logs

    raise typer.Exit(run_logs(run, role, follow=follow))


@app.command(cls=ScriptCommand, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def agent(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The topology file, if all nodes run this command: the first node launches it."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="As in zmqtrain launch.")] = None,
    resume: Annotated[str | None, typer.Option(help="As in zmqtrain launch.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="As in zmqtrain launch.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="As in zmqtrain launch.")] = None,
) -> None:
    """Take part in a run as one of its hosts. The environment says where the launcher is, and which host this is.

    It knows the variables of Slurm, Kubeflow, SkyPilot, Kubernetes JobSets and torch.distributed; ZMQTRAIN_COORDINATOR (HOST:PORT),
    ZMQTRAIN_NAME or ZMQTRAIN_NODE_RANK, and ZMQTRAIN_NODES take precedence over them. ZMQTRAIN_TOKEN or ZMQTRAIN_TOKEN_FILE
    holds the run's secret. With FILE, and perhaps a script and its arguments, node 0 is the launcher, too.
    """
    from zmqtrain.cli.agent import run_agent_command

    code = run_agent_command(file, context.args, data=data, resume=resume, run_dir=run_dir, settings=settings or ())
    raise typer.Exit(code)


@app.command(cls=Command)
def version() -> None:
    """Print the versions that hosts must agree on."""
    from zmqtrain.versions import PACKAGES, versions

    found = versions()
    for package in (*PACKAGES, "python"):
        print(package, found.get(package, "not installed"))


def _stand_somewhere() -> None:
    """Raises `UsageError` where relative paths would lead nowhere."""
    from zmqtrain.errors import UsageError

    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder does not exist any more: change to another one") from error


def main() -> None:
    """Run the command. Errors of zmqtrain are printed as one message, without a traceback."""
    from zmqtrain.errors import ZmqTrainError

    try:
        _stand_somewhere()
        app()
    except ZmqTrainError as error:
        print(f"zmqtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
