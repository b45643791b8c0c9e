"""Nodes that a scheduler has started, for tests: processes of this machine, each with the variables that it would have."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.launcher.family import Family
from tests.patience import PATIENCE_S

TOKEN = "token of a test, 0123456789abcdef"
#: What this machine's own scheduler, or a test before, may have left.
_FOREIGN = ("ZMQTRAIN_", "SLURM", "PET_", "SKYPILOT_", "JOBSET", "MASTER_", "POD_IP")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Nodes:
    """Processes in ``folder``. Use it in a ``with`` block: whatever is left at its end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._family = Family()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._family.kill()
        for started in self._processes.values():
            started.wait()

    def start(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], within: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start ``zmqtrain`` with these arguments; what it prints goes to a file. ``within``: what brings it to its machine."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        variables = {**clean, "PYTHONUNBUFFERED": "1", "ZMQTRAIN_TOKEN": TOKEN, **environ}
        with (self.folder / f"{name}.out").open("wb") as file:
            process = subprocess.Popen(
                [*within, sys.executable, "-m", "zmqtrain", *command], cwd=self.folder, env=variables, stdout=file, stderr=file
            )
        self._processes[name] = process
        self._family.add(process.pid)
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something."""
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError(f"not within {PATIENCE_S:g} s\n{self!r}")
            time.sleep(0.05)

    def end(self, name: str) -> int:
        """Wait for the exit code of one."""
        try:
            return self._processes[name].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} does not end\n{self!r}") from None
        finally:
            self.processes()

    def processes(self) -> set[psutil.Process]:
        """All processes that were seen so far."""
        return self._family.seen()

    def all_gone(self) -> None:
        """Nothing is left behind."""
        self._family.all_gone(PATIENCE_S)

    def __repr__(self) -> str:
        return "\n".join(f"--- {name}\n{self.said(name)}" for name in self._processes)
