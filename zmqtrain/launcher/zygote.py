"""One process that has imported torch, from which the fork servers of all hosts of this machine are forked.

A file may have many hosts on this machine. If each of their agents started a fork server of its own, each would import torch, which
takes seconds of processor time and hundreds of megabytes per host. So the launcher starts one process that imports torch once, and
forks a fork server from it for each host. The fork server is at the other end of a channel that the agent inherits, has the agent's
environment and network namespace, and ends with the channel, that is, with its agent.

It serves all launches of one process, one after another: those of a search, and of a run that begins again.

A program that launches many short runs can import once for all of them: it forks a process that calls `serve_launcher` for each
launcher, which inherits the channel to it (`RUNNING`). Where many launches or agents are to find such a process that they
have inherited nothing from, it listens at a path instead (`zmqtrain.launcher.forkserver.channel_at`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Self

import msgpack
import psutil
from setproctitle import getproctitle

from zmqtrain.death import die_with_parent
from zmqtrain.errors import HostLostError
from zmqtrain.launcher.entries import SCRIPT_ENTRY
from zmqtrain.launcher.forkserver import (
    ADOPTED,
    END_S,
    LARGEST_MESSAGE,
    ServerProcess,
    channel_at,
    ended_by_itself,
    fork_for_messages,
    import_entry,
    leave,
    serve,
)
from zmqtrain.launcher.namespaces import enter_network
from zmqtrain.launcher.signals import heed_no_preemption, leave_terminal_to_launcher

#: Says where the channel to a zygote is that is running already (`channel_at`). A channel serves one launcher.
RUNNING = "ZMQTRAIN_ZYGOTE_CHANNEL"
#: Requests to a zygote, each with a file: fork a fork server, for the channel; close the file once no fork server is left.
_FORK, _WAIT = b"\0", b"\1"


class Zygote:
    """The launcher's side. ``async with Zygote() as zygote: channel = zygote.channel()``."""

    def __init__(self, entry: str = SCRIPT_ENTRY, *, forked: tuple[ServerProcess, socket.socket] | None = None) -> None:
        """``entry``: the function that the fork servers' children call; its module is imported once. ``forked``: the process, if it
        was forked already, and this side of its channel. Both stay its owner's, and can serve again afterwards.

        Where the environment names a channel (`RUNNING`), it is used, and no process is started."""
        self._entry, self._forked = entry, forked
        self._inherited = False
        self._process: ServerProcess | None = None
        self._socket: socket.socket | None = None
        self._asked = False  # for a fork server

    async def __aenter__(self) -> Self:
        running = os.environ.get(RUNNING)
        if running is not None:
            if running.isdecimal():  # at a path there is a zygote for each connection
                self._inherited = True
                del os.environ[RUNNING]  # until the end: it serves this launcher only
            self._socket = channel_at(running)
            self._socket.set_inheritable(False)
            return self
        if self._forked is not None:
            self._process, self._socket = self._forked
            return self
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = (sys.executable, "-P", "-m", __name__, str(theirs.fileno()), self._entry, str(os.getpid()))
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), env=environ, stdin=asyncio.subprocess.DEVNULL
            )
        self._socket = ours
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """End the process if this has started it, and all fork servers that are left."""
        assert self._socket is not None
        if self._forked is not None and self._process is self._forked[0]:
            await self._no_fork_servers()
        elif self._inherited:
            await self._no_fork_servers()
            os.environ[RUNNING] = str(self._socket.detach())
        else:
            self._socket.close()  # one that was connected to ends by itself
            if self._process is not None:
                await ended_by_itself(self._process, END_S if self._asked else 0.0)

    async def _no_fork_servers(self) -> None:
        """Wait until those that were asked for have ended, as they do with their agents."""
        assert self._socket is not None
        if not self._asked:
            return
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        read, write = os.pipe()
        try:
            socket.send_fds(self._socket, [_WAIT], [write])
        except OSError:  # it has died, and closes nothing
            closed.set()
        finally:
            os.close(write)
        loop.add_reader(read, closed.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await closed.wait()
        finally:
            loop.remove_reader(read)
            os.close(read)

    @property
    def pid(self) -> int:
        """The process; not of one that was inherited."""
        assert self._process is not None
        return self._process.pid

    def channel(self) -> socket.socket:
        """One end of a channel, which an agent inherits; a fork server will be at the other end once torch is imported.

        Raises `HostLostError` if the process has died.
        """
        assert self._socket is not None
        self._asked = True
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._socket, [_FORK], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise HostLostError(f"the process that fork servers are forked from has died ({error})") from error
        return ours


# The process ------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """``python -m zmqtrain.launcher.zygote FD ENTRY LAUNCHER_PID``."""
    getproctitle()  # finds the command line, by the environment, which changes later; roles write their names over it
    requests = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[3]))
    leave_terminal_to_launcher()
    heed_no_preemption()
    be_zygote(requests, sys.argv[2])
    leave()


def be_zygote(requests: socket.socket, entry: str) -> None:
    """Import what fork servers' children need, and `serve_launcher`."""
    serve_launcher(requests, import_entry(entry))


def serve_launcher(requests: socket.socket, entry: Callable[[int], int]) -> None:
    """Fork a fork server for every request, until the launcher closes its end.

    Args:
        requests: the end of a ``SOCK_SEQPACKET`` pair at whose other end is a launcher's `Zygote`.
        entry: what fork servers' children call (`import_entry`).

    The process must have one thread."""
    heed_no_preemption()
    parent = os.getpid()

    def become(_message: bytes, files: list[int]) -> NoReturn:
        serve_agent(files[0], parent, entry)

    def waited(message: bytes) -> bool:
        if message == _WAIT:
            _wait_for_fork_servers()
        return message == _WAIT

    fork_for_messages(requests, become, files=1, forked=lambda *_: None, ended=lambda *_: None, here=waited)
    _wait_for_fork_servers()


def _wait_for_fork_servers() -> None:
    """They end with their agents, and first the processes below them."""
    psutil.wait_procs(psutil.Process().children(), timeout=END_S)


def serve_agent(file: int, parent: int, entry: Callable[[int], int]) -> NoReturn:
    """Be the fork server of the agent that holds the channel's other end; never returns.

    Args:
        file: of the channel.
        parent: the process that this one was forked from, and whose end it does not outlive before its agent has come.
        entry: what its children call (`import_entry`).
    """
    code = 1
    try:
        die_with_parent(parent)
        channel = socket.socket(fileno=file)
        data, files, _flags, _address = socket.recv_fds(channel, LARGEST_MESSAGE, 1)
        if data:  # otherwise its agent is gone already
            os.environ.clear()
            os.environ.update(msgpack.unpackb(data))
            os.environ["ZMQTRAIN_FORKSERVER_PID"] = str(os.getpid())
            enter_network(files[0], "of the agent")  # an emulated host has its own network
            os.close(files[0])
            heed_no_preemption()
            serve(channel, entry)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def adopt(channel: socket.socket) -> None:
    """The agent's first message over the channel: its environment, and its network namespace."""
    environ = {name: value for name, value in os.environ.items() if name != ADOPTED}
    with open("/proc/self/ns/net", "rb") as namespace:
        socket.send_fds(channel, [msgpack.packb(environ)], [namespace.fileno()])


if __name__ == "__main__":
    main()
