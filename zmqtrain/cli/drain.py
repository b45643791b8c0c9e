"""``zmqtrain drain RUN HOST``: let a host leave an elastic run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import psutil

from zmqtrain.cli.runs import lives, require_launcher
from zmqtrain.launcher.asked import ask
from zmqtrain.observe.run_directory import find_run, training_of


def run_drain(name: str, host: str) -> int:
    """Ask the launcher of a run to let ``host`` leave, and wait until it has.

    Raises `UsageError` if the run has ended, has no such host, or cannot continue without it, and `HostLostError` if its launcher
    ends before it answers."""
    path = find_run(name)
    launcher = require_launcher(path)
    try:
        print(drained(path, launcher, host))
    except KeyboardInterrupt:
        print(f"{host} may still leave; see zmqtrain status {path}", file=sys.stderr)
        return 130
    return 0


def drained(path: Path, launcher: psutil.Process, host: str) -> str:
    """Ask the launcher of the run in ``path``, and wait. Returns what it says; raises as `run_drain`."""
    return ask(training_of(path), launcher.pid, {"what": "drain", "host": host}, lives=partial(lives, launcher))
