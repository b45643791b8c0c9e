"""Log in by the system's ``ssh``: whatever the user has configured for it works."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from zmqtrain.errors import SshError, UsageError
from zmqtrain.launcher.ssh.target import Target, system_arguments

#: The longest line of an answer: a log text in JSON.
LONGEST_LINE = 1 << 20
#: How much of its standard error is kept, in bytes.
_KEPT_BYTES = 4000


class SystemClient:
    """Implements `zmqtrain.launcher.ssh.session.Client`."""

    def __init__(self) -> None:
        """Raises `UsageError` if there is no ``ssh``."""
        if shutil.which("ssh") is None:
            raise UsageError("there is no ssh command here: install OpenSSH's client, or the library: pip install zmqtrain[ssh]")

    async def connect(self, target: Target, connect_s: float) -> SystemConnection:
        return SystemConnection(target, *await start_client(system_arguments(target, connect_s=connect_s)))


async def start_client(
    words: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[asyncio.subprocess.Process, IO[bytes]]:
    """Start a program that connects its standard streams with a remote program.

    ``words``: its command line. ``environ``: its environment; by default this process's. Returns the process, which has pipes and
    a session of its own (Ctrl-C is for the launcher, and there is no terminal on which it could ask), and the file that gets its
    standard error. The caller closes the file.
    """
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - the connection closes it
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,
            limit=LONGEST_LINE,
        )
    except BaseException:
        errors.close()
        raise
    return process, errors


class SystemConnection:
    """An ``ssh`` process (`zmqtrain.launcher.ssh.session.RemoteStreams`)."""

    def __init__(self, target: Target, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.target, self.process, self._errors = target, process, errors

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError):  # uvloop raises RuntimeError for a closed transport
            return  # its output says why it has ended

    async def line(self) -> bytes:
        assert self.process.stdout is not None
        try:
            return await self.process.stdout.readline()
        except (ConnectionError, ValueError) as error:  # ValueError: a line is too long
            raise SshError(self.target.name, f"lost {self.target.way}: {error}") from error

    async def ended(self) -> tuple[int | None, str]:
        status = await self.process.wait()
        self._errors.seek(0)
        return status, self._errors.read(_KEPT_BYTES).decode(errors="replace")

    async def close(self) -> None:
        if self._errors.closed:
            return
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self._errors.close()
        # Its end of the pipe is closed by the transport's own callback, which has run when the reader has seen the end.
        assert self.process.stdout is not None
        try:
            await self.process.stdout.read()
        except ConnectionError:
            return
