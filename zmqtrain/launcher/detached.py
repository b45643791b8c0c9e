"""``zmqtrain launch --detach``: the launcher in a process of its own, independent of the terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

#: The file in the run directory with the output of a detached launcher.
LOG = "launcher.log"
_LOOK_S = 0.05


def run_detached(directory: Path, launch: Callable[[], int], *, is_running: Callable[[], bool], out: TextIO) -> int | None:
    """Call ``launch`` in a child that outlives this process and its terminal.

    Returns ``None`` as soon as the run ``is_running``, or its exit code if it ended before that. Until then its output also goes to
    ``out``.

    The caller must not have started any threads.
    """
    log = directory / LOG
    log.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            leave_terminal(log)
            code = launch()
        except BaseException:  # noqa: BLE001 - no caller is left to show it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    with log.open(encoding="utf-8", errors="replace") as said:
        while True:
            try:
                running = is_running()
                number, status = os.waitpid(child, os.WNOHANG)
                print(said.read(), end="", file=out, flush=True)
                if number:
                    return os.waitstatus_to_exitcode(status)
                if running:
                    return None
                time.sleep(_LOOK_S)
            except KeyboardInterrupt:  # until the run has started, its output is shown here
                os.kill(child, signal.SIGINT)


def leave_terminal(log: Path) -> None:
    """Detach this process from the terminal, and print to a file instead."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(file)
