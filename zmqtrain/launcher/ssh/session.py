"""A session with one host: requests to the remote program, and its answers, over any client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from zmqtrain.errors import HostsError, SshError
from zmqtrain.launcher.ssh.remote import MARK
from zmqtrain.launcher.ssh.target import Target

#: How much of the login shell's output before the remote program's is kept, in characters, to be shown in errors.
KEPT_BYTES = 2000
_MARK = MARK.encode()


class RemoteStreams(Protocol):
    """The remote program's standard streams."""

    async def write(self, data: bytes) -> None:
        """Send to its standard input. Raises `SshError`."""

    async def line(self) -> bytes:
        """The next line of its standard output; empty at the end. May be cancelled without losing data. Raises `SshError`."""
        ...

    async def ended(self) -> tuple[int | None, str]:
        """After the end: the exit status, if there is one, and the text on standard error."""
        ...

    async def close(self) -> None:
        """Close the connection. Processes that were detached on the other side continue. Idempotent."""


class Client(Protocol):
    """Logs in to hosts."""

    async def connect(self, target: Target, connect_s: float) -> RemoteStreams:
        """Log in, and start Python for the remote program. Raises `SshError`, which says what to do."""
        ...


#: ``take(text, offset)``: takes the agent's output, and the offset in its log after it.
TakeLog: TypeAlias = Callable[[str, int], None]


class Login:
    """One login. Make it by `open`; one caller at a time."""

    def __init__(self, target: Target, connection: RemoteStreams) -> None:
        self.target = target
        self.state: Mapping[str, Any] = {}
        """The answer to `begin`: the run's ``folder`` there, and the state of the ``agent``: none, running or ended (with its
        ``exit``)."""
        self._connection = connection
        self._take: TakeLog = lambda text, offset: None
        self._number = 0

    @classmethod
    async def open(cls, client: Client, target: Target, run: str, *, connect_s: float) -> Login:
        """Log in and begin a session about a run. Raises `SshError`."""
        try:
            async with asyncio.timeout(connect_s):
                connection = await client.connect(target, connect_s)
                try:
                    session = cls(target, connection)
                    await connection.write(target.program)
                    await session._greeting()
                    session.state = await session.ask("begin", run=run, host=target.name, environment=dict(target.environment))
                except BaseException:
                    await connection.close()
                    raise
        except TimeoutError as error:
            raise SshError(target.name, f"no answer within {connect_s:g} s", f"check that `{target.by_hand}` works") from error
        return session

    def on_log(self, take: TakeLog) -> None:
        """Set the function that takes the agent's output from now on."""
        self._take = take

    async def ask(self, do: str, *, data: bytes = b"", **arguments: Any) -> dict[str, Any]:
        """Send a request to the remote program and return its answer. ``data`` follows the request.

        Raises `HostsError`, with the reason, if it could not be done, and `SshError` if the connection is lost.
        """
        self._number += 1
        await self._connection.write(json.dumps({"do": do, "number": self._number, **arguments}).encode() + b"\n" + data)
        return await self._answer(self._number)

    async def follow(self, offset: int) -> int:
        """Wait for the agent's exit code; its log goes to the function given to `on_log`. Raises `SshError`.

        When this is cancelled the next `ask` ends it on the other side, too."""
        answer = await self.ask("follow", offset=offset)
        return int(answer["exit"])

    async def close(self) -> None:
        """Close the connection to the host. May be called repeatedly."""
        await self._connection.close()

    async def _answer(self, number: int) -> dict[str, Any]:
        while True:
            line = await self._connection.line()
            if not line:
                raise SshError(self.target.name, f"lost {self.target.way}")
            value = _parse(line)
            if value is None:
                continue
            if "log" in value:
                self._take(str(value["log"]), int(value["at"]))
            elif value.get("number") != number:
                continue  # of a request whose caller has been cancelled
            elif "error" in value:
                raise HostsError(f"{self.target.name}: {value['error']}")
            else:
                return value

    async def _greeting(self) -> None:
        kept = b""
        while line := await self._connection.line():
            value = _parse(line)
            if value is not None and "hello" in value:
                return
            kept = (kept + line)[-KEPT_BYTES:]
        status, said = await self._connection.ended()
        raise _no_greeting(self.target, status, kept.decode(errors="replace") + said)


def _parse(line: bytes) -> dict[str, Any] | None:
    """An answer of the remote program; ``None`` for any other text on its standard output."""
    # Not only at the start of the line: a prompt may come before it.
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _no_greeting(target: Target, status: int | None, said: str) -> SshError:
    """The error for a login after which Python did not run."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    lasting = True
    if status in (126, 127):
        what, remedy = f"there is no Python at {target.python}", "set python in [[hosts]] to its path"
    elif "SyntaxError" in said or "ModuleNotFoundError" in said:
        what, remedy = f"{target.python} is too old{last}", "set python in [[hosts]] to the path of a newer one"
    elif status in (255, None):  # ssh's own
        what, remedy = f"cannot log in{last}", f"check that `{target.by_hand}` works without a question"
        lasting = any(words in said for words in ("Permission denied", "verification failed", "Could not resolve", "Bad config"))
    else:
        what = f"{target.python} did not run (exit code {status}){last}"
        remedy = "check the login shell's startup files"
    return SshError(target.name, what, remedy, lasting=lasting)
