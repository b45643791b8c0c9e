"""Zygotes for the launches of tests, from one process that has imported once what roles need.

A launch by the command starts a process that imports torch, more than three seconds of processor time. `ReadyProcess.zygote` forks
a process that has, and the launcher finds the channel to it in its environment (`zmqtrain.launcher.zygote.RUNNING`).
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgpack

from zmqtrain.launcher.forkserver import LARGEST_MESSAGE

#: What the process calls in each fork.
_ENTRY = "tests.launcher.ready_entry:main"
#: Tells a fork where the launcher is.
FOLDER = "ZMQTRAIN_TEST_FOLDER"
#: What Python and torch read when they are imported: a launch that differs in it needs processes of its own.
_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "TORCH", "CUDA_", "ZMQTRAIN_TEST_DEVICE")


class ReadyProcess:
    """The process, a fork server (`zmqtrain.launcher.forkserver`) whose children are zygotes."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = dict(os.environ)
        self._number = 0
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = (sys.executable, "-m", "zmqtrain.launcher.forkserver", str(theirs.fileno()), _ENTRY, str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), env=environ, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL
            )
        atexit.register(self._end)

    def zygote(self, folder: Path, environ: Mapping[str, str], errors: int) -> tuple[int, socket.socket] | None:
        """Fork a zygote.

        Args:
            folder: the launcher's.
            environ: the launcher's.
            errors: the file for what the zygote and the fork servers print.

        Returns its process, and the channel for the launcher to inherit; ``None`` if ``environ`` needs other imports.
        """
        names = {name for name in {*environ, *self._environ} if name.startswith(_AT_IMPORT) and name != "PYTHONUNBUFFERED"}
        if any(environ.get(name) != self._environ.get(name) for name in names):
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._number += 1
        request = msgpack.packb([self._number, {**environ, FOLDER: str(folder)}])
        with theirs:
            socket.send_fds(self._channel, [request], [errors, theirs.fileno()])
        while True:
            data = self._channel.recv(LARGEST_MESSAGE)
            assert data, "the process has died"
            number, pid, status = msgpack.unpackb(data)
            if number == self._number and status is None:
                return pid, ours

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


@cache
def ready_process() -> ReadyProcess:
    """Of this process of tests."""
    return ReadyProcess()
