"""Launchers and zygotes for the launches of tests, from one process that has imported once what they need.

A launch by the command starts a process that imports torch, more than three seconds of processor time, beside the launcher's own,
half a second. `ReadyProcess` forks both from a process that has. The launcher finds the channel to its zygote in its environment
(`zmqtrain.launcher.zygote.RUNNING`). Launchers and agents that other programs start, as sshd or a scheduler does, find it at a path
(`warm`).
"""

from __future__ import annotations

import atexit
import itertools
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import msgpack

from tests import environment
from tests.environment import read_at_import
from tests.patience import PATIENCE_S
from zmqtrain.launcher.forkserver import ADOPTED, LARGEST_MESSAGE, channel_at
from zmqtrain.launcher.zygote import RUNNING, Zygote

#: What a fork is if not a ``zmqtrain`` command: the zygote of one launch, or an agent's fork server.
ZYGOTE, FORK_SERVER = "zygote", "fork server"
#: The first word of a command that is no ``zmqtrain`` command, but a Python program with its arguments.
PYTHON = "python"
#: What the process calls in each fork.
_ENTRY = "tests.launcher.ready_entry:main"
#: How long one thread that waits for a report may keep others from looking.
_LOOK_S = 0.05


class ReadyProcess:
    """The process, a fork server (`zmqtrain.launcher.forkserver`) whose children are zygotes and launchers."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = dict(environment.BEFORE or os.environ)  # not what the first test that launches has changed
        self._numbers = itertools.count(1)  # 0 is its own
        self._reading = threading.Lock()
        self._started: dict[int, int] = {}  # the processes, by the numbers of their requests
        self._ended: dict[int, int] = {}
        environ = {**self._environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = (sys.executable, "-m", "zmqtrain.launcher.forkserver", str(theirs.fileno()), _ENTRY, str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), env=environ, cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL
            )
        atexit.register(self._end)

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether what it has imported is what a process with this environment would."""
        return read_at_import(environ) == read_at_import(self._environ)

    def zygote(self, folder: Path, environ: Mapping[str, str], errors: int) -> tuple[Forked, socket.socket]:
        """Fork a zygote.

        Args:
            folder: the launcher's.
            environ: the launcher's.
            errors: the file for what the zygote and the fork servers print.

        Returns it, and the channel for the launcher to inherit.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            return self._fork(ZYGOTE, folder, environ, errors, theirs.fileno()), ours

    def serve(self, what: str, channel: socket.socket) -> None:
        """Fork a zygote or a fork server for whoever has connected.

        Args:
            what: `ZYGOTE` or `FORK_SERVER`.
            channel: the connection. The process that it belongs to has the folder.
        """
        pid, _, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        with suppress(OSError):  # it is gone already
            self._fork(what, Path(f"/proc/{pid}/cwd").readlink(), self._environ, 2, channel.fileno())

    def command(
        self, words: Sequence[str], folder: Path, environ: Mapping[str, str], output: int, errors: int, channel: int
    ) -> Forked:
        """Fork a process that runs ``zmqtrain`` with these words, or what comes after `PYTHON`.

        Args:
            folder: where it runs.
            environ: its environment. Of a launch, it names no channel.
            output, errors: the files for what it prints.
            channel: of a launch, the channel to its zygote.
        """
        return self._fork(words, folder, environ, errors, output, channel)

    def _fork(self, what: str | Sequence[str], folder: Path, environ: Mapping[str, str], errors: int, *files: int) -> Forked:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = next(self._numbers)
        with ours, theirs:
            socket.send_fds(self._channel, [msgpack.packb([number, {}])], [errors, theirs.fileno()])
            message = msgpack.packb([str(folder), dict(environ), what if isinstance(what, str) else list(what)])
            socket.send_fds(ours, [message], files)
            while number not in self._started:
                self._read(_LOOK_S)
        return Forked(self, number, self._started.pop(number))

    def exit_of(self, number: int, timeout_s: float) -> int | None:
        """How the process of this request has ended; ``None`` if it has not within so many seconds."""
        end = time.monotonic() + timeout_s
        while number not in self._ended:
            left = max(0.0, end - time.monotonic())
            if not self._read(min(left, _LOOK_S)) and left == 0.0:
                return None
        return self._ended[number]

    def _read(self, timeout_s: float) -> bool:
        """Take one report, by whichever thread; whether there was one in time."""
        with self._reading:
            if not select.select([self._channel], [], [], timeout_s)[0]:
                return False
            data = self._channel.recv(LARGEST_MESSAGE)
            assert data, "the process has died"
            number, pid, status = msgpack.unpackb(data)
            if status is None:
                self._started[number] = pid
            else:
                self._ended[number] = status
            return True

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()


class Forked:
    """One of its children, as `subprocess.Popen` has it."""

    def __init__(self, ready: ReadyProcess, number: int, pid: int) -> None:
        self._ready, self._number, self.pid = ready, number, pid

    def poll(self) -> int | None:
        return self._ready.exit_of(self._number, 0.0)

    def wait(self, timeout: float) -> int:
        code = self._ready.exit_of(self._number, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("zmqtrain", timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Program:
    """A program in a process that is forked once torch is imported, in place of `subprocess.Popen`.

    Args:
        words: of a ``zmqtrain`` command, or `PYTHON` with a file and its arguments.
        folder: where it runs, and finds modules.
        environ: its environment. What Python itself reads there, it does not heed.
    """

    def __init__(self, words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        output, write = os.pipe()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when it has ended
        with open(write, "wb") as printed, open(os.devnull, "rb") as nothing:
            files = printed.fileno(), self._errors.fileno(), nothing.fileno()
            self._process = ready_process().command(words, folder, environ, *files)
        self.stdout = open(output, encoding="utf-8")  # noqa: SIM115
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end. Returns what it has printed, but for what was read before, and its errors."""
        try:
            with self.stdout, self._errors:
                said = self.stdout.read()
                self.returncode = self._process.wait(timeout)
                self._errors.seek(0)
                return said, self._errors.read()
        finally:
            self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


def completed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a ``zmqtrain`` command that starts no processes on this machine."""
    program = Program(words, folder, os.environ)
    said, errors = program.communicate(PATIENCE_S)
    assert program.returncode is not None
    return subprocess.CompletedProcess(words, program.returncode, said, errors)


class ReadyZygote(Zygote):
    """As `zmqtrain.launcher.zygote.Zygote`, in this process, with one that is forked."""

    async def __aenter__(self) -> Self:
        if ready_process().serves(os.environ):
            _, channel = ready_process().zygote(Path.cwd(), os.environ, 2)  # what it prints goes where this process says
            os.environ[RUNNING] = str(channel.detach())
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        if (channel := os.environ.pop(RUNNING, None)) is not None:
            channel_at(channel).close()


@dataclass(frozen=True)
class Warm:
    """How launchers and agents that are started by others find the process."""

    variables: Mapping[str, str]
    """`RUNNING` for launchers and `ADOPTED` for agents, with their values."""
    python: str
    """A program that is Python with these variables, for machines that get no variables of ours."""


@contextmanager
def warm() -> Iterator[Warm]:
    """Fork for launchers and agents that are started by others, until the end of the block."""
    ready = ready_process()
    ours, end = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, ours, end:
        doors: dict[socket.socket, str] = {}
        for what in (ZYGOTE, FORK_SERVER):
            door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            door.bind(f"{folder}/{what}")
            door.listen(100)
            doors[door] = what

        def accept() -> None:
            while end not in (can := select.select([end, *doors], [], [])[0]):
                for door in can:
                    with door.accept()[0] as channel:
                        ready.serve(doors[door], channel)

        variables = {RUNNING: f"{folder}/{ZYGOTE}", ADOPTED: f"{folder}/{FORK_SERVER}"}
        python = Path(folder, "python")
        set_them = [shlex.quote(f"{name}={value}") for name, value in variables.items()]
        python.write_text(f'#!/bin/sh\nexec env {" ".join(set_them)} {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield Warm(variables, str(python))
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            thread.join()
            for door in doors:
                door.close()


@cache
def ready_process() -> ReadyProcess:
    """Of this process of tests."""
    return ReadyProcess()
