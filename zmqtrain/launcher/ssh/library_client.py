"""Log in by asyncssh: many hosts from one process, with ``~/.ssh/config``, the key agent and known hosts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import asyncssh

from zmqtrain.errors import SshError
from zmqtrain.launcher.ssh.target import ALIVE_MISSING, ALIVE_S, Target, options_as_config, remote_command

_KEPT_BYTES = 4000


class LibraryClient:
    """Implements `zmqtrain.launcher.ssh.session.Client`."""

    async def connect(self, target: Target, connect_s: float) -> LibraryConnection:
        with tempfile.TemporaryDirectory(prefix="zmqtrain-ssh-") as folder:
            try:
                login = await asyncssh.connect(
                    target.host,
                    () if target.port is None else target.port,
                    username=() if target.user is None else target.user,
                    tunnel=() if target.jump is None else target.jump,
                    config=_configuration(Path(folder), target),
                    connect_timeout=connect_s,
                    keepalive_interval=ALIVE_S,
                    keepalive_count_max=ALIVE_MISSING,
                    agent_forwarding=False,
                    x11_forwarding=False,
                )
            except (asyncssh.Error, OSError, ValueError) as error:  # ValueError: the configuration or a key cannot be read
                raise _no_login(target, error) from error
        try:
            process = await login.create_process(remote_command(target.python), encoding=None, request_pty=False)
        except (asyncssh.Error, OSError) as error:
            login.abort()
            raise SshError(target.name, f"the login succeeded, but running a command is not allowed: {error}") from error
        return LibraryConnection(target, login, process)


class LibraryConnection:
    """A channel of asyncssh (`zmqtrain.launcher.ssh.session.RemoteStreams`)."""

    def __init__(self, target: Target, login: asyncssh.SSHClientConnection, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self._target, self._login, self._process = target, login, process

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (asyncssh.Error, OSError):
            return  # its output says why it has ended

    async def line(self) -> bytes:
        try:
            return await self._process.stdout.readline()
        except (asyncssh.Error, OSError) as error:
            raise SshError(self._target.name, f"the ssh connection is lost: {error}") from error

    async def ended(self) -> tuple[int | None, str]:
        try:
            said = await self._process.stderr.read(_KEPT_BYTES)
        except (asyncssh.Error, OSError):
            said = b""
        await self._process.wait_closed()
        return self._process.returncode, said.decode(errors="replace")

    async def close(self) -> None:
        self._login.close()
        await self._login.wait_closed()


def _configuration(folder: Path, target: Target) -> list[Path]:
    """Configuration files, of which the first with a setting counts: the topology file's options, the user's own, and the default
    files of host keys."""
    own = folder / "options"
    own.write_text(options_as_config(target), encoding="utf-8")
    user = Path("~/.ssh/config").expanduser()
    usual = folder / "usual"
    lines = ["Host *"]
    for name, paths in (
        ("UserKnownHostsFile", ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")),
        ("GlobalKnownHostsFile", ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")),
    ):
        there = [path for path in (Path(text).expanduser() for text in paths) if os.access(path, os.R_OK)]
        if there:
            lines.append(f"  {name} " + " ".join(f'"{path}"' for path in there))
    usual.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [own, *([user] if os.access(user, os.R_OK) else []), usual]


def _no_login(target: Target, error: Exception) -> SshError:
    """The error for a failed login: what went wrong, and what to do."""
    by_hand = target.by_hand
    lasting = True
    match error:
        case asyncssh.PermissionDenied():
            what = f"the login was refused ({error})"
            remedy = (
                f"use a key without a passphrase (IdentityFile), or load yours with ssh-add, so that `{by_hand}` works without a "
                f"question"
            )
        case asyncssh.HostKeyNotVerifiable():
            what, remedy = str(error), f"log in once by hand (`{by_hand}`) and check the key that it shows"
        case asyncssh.ConfigParseError() | asyncssh.KeyImportError():
            what = f"asyncssh cannot use ~/.ssh/config, or a key that it names ({error})"
            remedy = 'set client = "system" in [engine]'
        case TimeoutError() | asyncssh.TimeoutError():
            what, remedy = (
                f"no answer from {target.host}",
                f"check that it is running and that sshd's port is open: try `{by_hand}`",
            )
            lasting = False
        case _:
            what, remedy = f"cannot log in ({error})", f"check that `{by_hand}` works without a question"
            lasting = False
    return SshError(target.name, what, remedy, lasting=lasting)
