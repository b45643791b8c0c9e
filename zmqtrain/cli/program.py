"""The launcher of a run that a program has started (`zmqtrain.launch`): ``python -m zmqtrain.cli.program``, for no person.

Standard input has one line, a JSON object that says what to launch, and then stays open for as long as the program lives: where it
ends, so does the run, as by Ctrl-C. Standard output and error are those of ``zmqtrain launch``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import Any

from zmqtrain.launcher.one_thread import import_numpy

import_numpy()  # before modules below do: this process forks

from zmqtrain.cli.launch import run_launch  # noqa: E402
from zmqtrain.cli.launch_options import LaunchOptions  # noqa: E402
from zmqtrain.errors import ZmqTrainError  # noqa: E402
from zmqtrain.run.preemption import INTERRUPTED  # noqa: E402
from zmqtrain.run.report import report_of  # noqa: E402
from zmqtrain.topology.schema import Topology  # noqa: E402


def main() -> int:
    """Returns the exit code."""
    program = FileIO(os.dup(0))  # its own number, since standard input is for the processes below
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    request = json.loads(program.readline())
    report: int = request["report"]
    os.set_inheritable(report, False)
    watching = Thread(target=_end_with, args=(program,), name="end with the program", daemon=True)
    try:
        return run_launch(Path(request["file"]), (), _options(request, watching.start))
    except ZmqTrainError as error:
        os.write(report, json.dumps(report_of(error, "launcher")).encode())
        print(f"zmqtrain: {error}", file=sys.stderr)
        return error.exit_code


def _options(request: dict[str, Any], forked: Callable[[], None]) -> LaunchOptions:
    return LaunchOptions(
        topology=Topology.from_dict(request["topology"]),
        data=request["data"],
        resume=request["resume"],
        run_dir=Path(request["folder"]),
        emulate=request["emulate"],
        forked=forked,
    )


def _end_with(program: FileIO) -> None:
    """Stop the run when the program has ended: a pipe tells, however it ended."""
    while program.read(1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:  # before there was a run to stop
        code = INTERRUPTED
    sys.exit(code)
