"""Starts roles by forking a process that has imported torch once.

Importing torch takes over a second and 200 MB a process; a fork takes milliseconds and shares the memory. The standard library's
forkserver would do the forking, but it imports the agent's main module again in every child, passes no files for output, and its
children do not end with it; what is needed is small: requests and answers on one socket, accompanied by files.

The agent's side is `ForkServer`. The server's side, `serve`, has one thread and no event loop: it forks safely.
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgpack
from setproctitle import getproctitle

from zmqtrain.death import adopt_descendants, die_with_parent, end_descendants, end_group, outlive_parent
from zmqtrain.errors import HostLostError, UsageError
from zmqtrain.launcher.entries import SCRIPT_ENTRY
from zmqtrain.launcher.preload import preload
from zmqtrain.launcher.signals import heed_no_preemption, wanted_on_sigterm

#: An environment, a few KiB, is the largest message.
LARGEST_MESSAGE = 1 << 20
#: The variable that says where the channel is (`channel_at`) at whose other end a fork server is or will be.
ADOPTED = "ZMQTRAIN_FORK_CHANNEL"
#: Seconds that a server may take to end the processes that are left.
END_S = 5.0
_READY = 0


@dataclass(slots=True)
class Child:
    """A process that the fork server has started."""

    pid: int
    exited: asyncio.Future[int]
    """Its exit code; negative for a signal."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if it has exited."""
        if not self.exited.done():
            with suppress(ProcessLookupError):  # its exit is known to the server, but not yet here
                os.kill(self.pid, number)


class ForkServer:
    """The agent's side. ``async with ForkServer() as server: child = await server.start(environ, output, report)``."""

    def __init__(self, entry: str = SCRIPT_ENTRY, *, threads: int = 1) -> None:
        """``entry``: the function that every child calls; its module is imported before forking.

        If the environment names a channel (`ADOPTED`), it is used, and no process is started."""
        self._entry, self._threads = entry, threads
        self._process: asyncio.subprocess.Process | None = None  # the process that this object has started
        self._socket: socket.socket | None = None
        self._ready: asyncio.Future[int] | None = None
        self._starting: dict[int, asyncio.Future[int]] = {}
        self._importing: dict[int, asyncio.Future[str]] = {}
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}  # exits of children whose start has not been read yet
        self._number = 0

    async def __aenter__(self) -> ForkServer:
        running = os.environ.get(ADOPTED)
        if running is None:
            await self._start()
        else:
            self._adopt(channel_at(running))
        return self

    def _adopt(self, channel: socket.socket) -> None:
        from zmqtrain.launcher.zygote import adopt

        loop = asyncio.get_running_loop()
        self._socket, self._ready = channel, loop.create_future()
        adopt(channel)
        channel.setblocking(False)
        loop.add_reader(channel.fileno(), self._read)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._socket, self._ready = ours, loop.create_future()
        environ = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with theirs:
            command = (sys.executable, "-P", "-m", __name__, str(theirs.fileno()), self._entry, str(os.getpid()))
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), env=environ, stdin=asyncio.subprocess.DEVNULL
            )
        loop.add_reader(ours.fileno(), self._read)

    async def __aexit__(self, *_exc: object) -> None:
        serving = self._ready is not None and self._ready.done()
        self._close()
        if self._process is not None:
            await ended_by_itself(self._process, END_S if serving else 0.0)

    async def pid(self) -> int:
        """The server's process, once it is ready. Raises `HostLostError` if it died before that."""
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def start(self, environ: Mapping[str, str], output: int, report: int) -> Child:
        """Fork a process with these variables set, its output to the file ``output``, its error report to ``report``.

        The caller closes both files on its side. Raises `HostLostError` if the server has died.
        """
        channel = await self._serving()
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starting[self._number] = started
        socket.send_fds(channel, [msgpack.packb([self._number, dict(environ)])], [output, report])
        pid = await started
        child = Child(pid, asyncio.get_running_loop().create_future())
        self._children[pid] = child
        if pid in self._early:
            child.exited.set_result(self._early.pop(pid))
        return child

    async def preload(self, modules: Sequence[str], folders: Sequence[str], environ: Mapping[str, str], seed: int) -> None:
        """Import modules in the server, for all processes that are forked from then on.

        Args:
            modules: their names.
            folders: from which modules are imported before all others.
            environ: variables that are set meanwhile.
            seed: of the generators from which they may draw.

        Raises `UsageError` if a module cannot be imported there, and `HostLostError` if the server has died.
        """
        channel = await self._serving()
        imported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._importing[self._number] = imported
        channel.send(msgpack.packb([self._number, list(modules), list(folders), dict(environ), seed]))
        if why := await imported:
            raise UsageError(f"[job] preload: {why}")

    async def _serving(self) -> socket.socket:
        """Wait until the server is ready. Returns the channel, for a request with the next number."""
        assert self._ready is not None
        await asyncio.shield(self._ready)
        if self._socket is None:
            raise _died()
        self._number += 1
        return self._socket

    def _read(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(LARGEST_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._close()
                return
            self._take(*msgpack.unpackb(data))

    def _take(self, number: int, pid: int, status: int | str | None) -> None:
        if isinstance(status, str):
            imported = self._importing.pop(number)
            if not imported.done():
                imported.set_result(status)
        elif number == _READY and status is None:
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(pid)
        elif status is None:
            started = self._starting.pop(number)
            if not started.done():
                started.set_result(pid)
        else:
            child = self._children.pop(pid, None)
            if child is None:
                self._early[pid] = status
            elif not child.exited.done():
                child.exited.set_result(status)

    def _close(self) -> None:
        """Close the channel: the server has died, or is not needed any more. Its children die with it."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        waiting: list[asyncio.Future[Any]] = [*self._starting.values(), *self._importing.values()]
        for future in [*waiting, *([self._ready] if self._ready else [])]:
            if not future.done():
                future.set_exception(_died())
                future.exception()  # raised only to callers that await it
        for child in self._children.values():
            if not child.exited.done():
                child.exited.set_result(-signal.SIGKILL)
        self._starting.clear()
        self._importing.clear()
        self._children.clear()


class ServerProcess(Protocol):
    """What this module needs of ``asyncio.subprocess.Process``, which others have, too."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...

    def kill(self) -> None: ...


async def ended_by_itself(process: ServerProcess, patience_s: float) -> None:
    """Wait for the end of a server whose channel was closed, which first ends the processes below it; after ``patience_s`` seconds
    kill it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await process.wait()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _died() -> HostLostError:
    return HostLostError(
        "the process that starts roles (zmqtrain.launcher.forkserver) has died; it may have been killed "
        "because memory ran out (see dmesg)"
    )


# The server's side ------------------------------------------------------------------------------------------------------------


def serve(channel: socket.socket, entry: Callable[[int], int]) -> None:
    """Fork or import for every request until the other side closes; then kill all processes that are left, also those that children
    have started."""
    children: dict[int, int] = {}  # pid -> number of the request

    def imported(message: bytes) -> bool:
        number, *request = msgpack.unpackb(message)
        if len(request) == 1:  # the environment of a child
            return False
        channel.send(msgpack.packb([number, os.getpid(), preload(*request)]))
        return True

    def become(message: bytes, files: list[int]) -> NoReturn:
        _become(msgpack.unpackb(message)[1], files[0], files[1], entry)

    def forked(message: bytes, pid: int) -> None:
        number = children[pid] = msgpack.unpackb(message)[0]
        channel.send(msgpack.packb([number, pid, None]))

    def ended(pid: int, status: int) -> None:
        number = children.pop(pid, None)  # there is none for a process that was adopted
        if number is not None:
            channel.send(msgpack.packb([number, pid, os.waitstatus_to_exitcode(status)]))

    adopt_descendants()
    outlive_parent()  # whose end closes the channel
    try:
        with suppress(ConnectionError):  # the other side has closed
            channel.send(msgpack.packb([_READY, os.getpid(), None]))
            fork_for_messages(channel, become, files=2, forked=forked, ended=ended, here=imported)
    finally:
        end_descendants()


def channel_at(place: str) -> socket.socket:
    """The channel to a process that forks, which runs already.

    Args:
        place: the number of the file that this process has inherited; or the path of a Unix socket (``SOCK_SEQPACKET``), at which
            each connection is a channel of its own.

    Raises `HostLostError` if nothing listens there.
    """
    if place.isdecimal():
        return socket.socket(fileno=int(place))
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect(place)
    except OSError as error:
        channel.close()
        raise HostLostError(f"no process forks at {place} ({error.strerror})") from error
    return channel


def fork_for_messages(
    channel: socket.socket,
    become: Callable[[bytes, list[int]], NoReturn],
    *,
    files: int,
    forked: Callable[[bytes, int], None],
    ended: Callable[[int, int], None],
    here: Callable[[bytes], bool] = lambda _: False,
) -> None:
    """Fork for every message until the other side closes, but those that ``here(message)`` has dealt with in this process.

    ``become(message, files)`` is the child's life; ``files`` is the number of files that come with a message, which only the child
    keeps. In this process, ``forked(message, pid)`` is called for each child, and ``ended(pid, status)`` at its end.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only the wake-up matters
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    os.read(wake_read, 4096)
                    _reap(ended)
                    continue
                message, received, _flags, _address = socket.recv_fds(channel, LARGEST_MESSAGE, files)
                if not message:
                    return
                if here(message):
                    for file in received:
                        os.close(file)
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    channel.close()
                    os.close(wake_read)
                    os.close(wake_write)
                    become(message, received)
                for file in received:
                    os.close(file)
                forked(message, pid)


def _reap(ended: Callable[[int, int], None]) -> None:
    while True:
        try:
            # It is looked at before it is reaped: until then no other process can have its number, or its group's.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        end_group(found.si_pid)  # what it has started itself
        pid, status = os.waitpid(found.si_pid, 0)
        ended(pid, status)


def _become(environ: Mapping[str, str], output: int, report: int, entry: Callable[[int], int]) -> NoReturn:
    """The forked child: never returns."""
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not wanted_on_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which stops everything in order
        die_with_parent(int(os.environ["ZMQTRAIN_FORKSERVER_PID"]))
        os.setpgid(0, 0)  # what it starts itself ends with it
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(environ)
        code = entry(report)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - no caller is left to show it
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is None or stream.closed:  # by the user's code; Python itself does not mind either
                continue
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 70
        # Not sys.exit: this process must not run the parent's exit handlers.
        os._exit(code)


def import_entry(entry: str) -> Callable[[int], int]:
    """Import the function, and with its module everything that children need, into memory that they share."""
    gc.disable()  # imports produce no garbage
    module, _, name = entry.partition(":")
    function: Callable[[int], int] = getattr(__import__(module, fromlist=[name]), name)
    # The current folder is importable in children (tasks are there), but must not shadow modules of this process.
    here = str(Path.cwd())
    if sys.path[0] != here:
        sys.path.insert(0, here)
    # All objects that exist now stay for good. Collections in the children would only copy their pages.
    gc.freeze()
    gc.enable()
    return function


def main() -> None:
    """``python -m zmqtrain.launcher.forkserver FD ENTRY AGENT_PID``."""
    getproctitle()  # finds the command line, by the environment, which changes later; roles write their names over it
    channel = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heed_no_preemption()
    os.environ["ZMQTRAIN_FORKSERVER_PID"] = str(os.getpid())
    serve(channel, import_entry(sys.argv[2]))
    leave()


def leave() -> NoReturn:
    """End this process, which has called `import_entry`, at once.

    Python would first free what is left, but frozen objects stay, and extension modules (triton) then report each as a leak."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
