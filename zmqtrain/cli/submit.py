"""``zmqtrain launch FILE --engine slurm --submit``: let Slurm launch the run when nodes are free."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path

from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.errors import UsageError
from zmqtrain.launcher.slurm.submit import Submission, job_command, read_template, render, submit
from zmqtrain.launcher.ssh.target import launching_python
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology


def run_submit(topology: Topology, file: Path, script: Sequence[str], options: LaunchOptions) -> int:
    """Make the run directory, and submit the job that launches there; or only print its script. Returns the exit code.

    Raises `UsageError` (and its children) before anything is submitted."""
    if topology.engine.kind != "slurm":
        raise UsageError(f'--submit is for Slurm, but [engine] kind = "{topology.engine.kind}": add --engine slurm')
    place(topology)  # errors show now, rather than when the job begins
    text = read_template(options.template)

    def rendered(directory: Path) -> str:
        command = job_command(
            file,
            script,
            python=launching_python(),
            directory=directory,
            settings=options.settings,
            data=options.data,
            resume=None if options.resume is None else _whole(options.resume),
            json_lines=options.json_lines,
        )
        return render(text, Submission(topology, Path.cwd(), directory, command))

    run_dir = options.run_dir
    if options.dry_run:
        print(rendered(run_dir or Path("runs") / f"{topology.job.name}-NNN"), end="")
        return 0
    rendered(run_dir or Path("runs"))  # before the directory is made, so that a bad template leaves nothing behind
    directory = RunDirectory.create(topology.job.name, exact=run_dir)
    directory.write("topology.toml", topology.to_toml())
    directory.close()
    job = submit(rendered(directory.path), directory.path)
    if options.json_lines:
        print(dumps({"run": str(directory.path), "status": "submitted", "job": job}))
    else:
        print(f"submitted as job {job}; run directory {directory.path}", file=sys.stdout)
        print(f"zmqtrain status {directory.path} shows its state, zmqtrain stop {directory.path} ends it")
    return 0


def _whole(resume: str) -> str:
    """An absolute path, which means the same to the job; names of runs stay as they are."""
    return str(Path(resume).absolute()) if Path(resume).exists() else resume
