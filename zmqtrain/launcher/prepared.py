"""What a launch on this machine needs of processes, forked before its event loop begins: agents, and the one that imports torch.

By then a launcher has imported nearly all that an agent needs, and what the zygote (`zmqtrain.launcher.zygote`) imports before
torch. A fork takes milliseconds and shares that memory, where a new process would import all of it again; and torch is imported
while the launcher goes on. Each of them waits at a channel until the launcher needs it, and ends with the channel.

A process with several threads must not fork: the locks of the others would stay locked. Event loops with ZeroMQ have threads, so
all is forked before there is one. Where that cannot be, engines start new processes instead.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import msgpack
from setproctitle import getproctitle, setproctitle

from zmqtrain.death import die_with_parent, open_pidfd
from zmqtrain.launcher.agent import main as agent_main
from zmqtrain.launcher.entries import SCRIPT_ENTRY, TASK_ENTRY
from zmqtrain.launcher.forkserver import ADOPTED, LARGEST_MESSAGE
from zmqtrain.launcher.namespaces import enter_network, open_namespace
from zmqtrain.launcher.one_thread import threads
from zmqtrain.launcher.signals import heed_no_preemption, leave_terminal_to_launcher
from zmqtrain.launcher.streams import plain_streams
from zmqtrain.launcher.zygote import RUNNING, be_zygote
from zmqtrain.membership.environment import PEER

if TYPE_CHECKING:
    from zmqtrain.launcher.emulate import Emulation
    from zmqtrain.topology.schema import Topology

with suppress(ImportError):
    import uvloop  # noqa: F401 - once, for this process and all below it


class ForkedChild:
    """A child of this process, which `asyncio.subprocess` has not started but which is waited for and ended in the same way."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Its exit code, negative for a signal, once it is known that it has ended."""
        file = open_pidfd(pid)
        assert file is not None, "`_may_fork` has seen that there are such files"
        self._file = file
        self._ended: asyncio.Future[None] | None = None

    async def wait(self) -> int:
        """Wait for its end and return its exit code. May be called by several tasks of one loop."""
        if self.returncode is None:
            if self._ended is None:
                loop = asyncio.get_running_loop()
                self._ended = loop.create_future()
                loop.add_reader(self._file, self._end, loop, self._ended)
            await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code, if it has ended, outside a loop."""
        if self.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.reap()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)  # a zombie until it is waited for, so that its number is nobody else's

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def reap(self) -> None:
        """Wait for its end, outside a loop."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._file)

    def _end(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        loop.remove_reader(self._file)
        self.reap()
        if not ended.done():
            ended.set_result(None)


class _Waiting:
    """A child that waits at its channel."""

    def __init__(self, child: ForkedChild, channel: socket.socket) -> None:
        self.child, self.channel = child, channel

    def end(self) -> None:
        self.channel.close()
        self.child.kill()
        self.child.reap()


class Prepared:
    """Children that wait to be needed: ``with Prepared.of(agents=2) as prepared: ...``. The zygote, and agents that nobody has
    taken, end with the block."""

    def __init__(self) -> None:
        self._zygote: _Waiting | None = None
        self._agents: list[_Waiting] = []

    @classmethod
    def of(cls, *, agents: int, entry: str = SCRIPT_ENTRY) -> Self:
        """Fork the zygote, with this entry (`zmqtrain.launcher.forkserver.import_entry`), and this number of agents. Nothing is
        forked if this process has several threads, or before Linux 5.3.

        Raises `OSError` if processes cannot be started."""
        prepared = cls()
        if not _may_fork():
            return prepared
        getproctitle()  # finds the command line, by the environment, which changes in children; they write their names over it
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # what exists stays: collections in the children would only copy its pages
        try:
            with _uninterrupted():
                # One that has imported torch has begun to use it, too, and perhaps the user's code.
                if RUNNING not in os.environ and "torch" not in sys.modules:
                    prepared._zygote = _fork(partial(_be_zygote, entry), [])
                for _ in range(agents):
                    prepared._agents.append(_fork(_be_agent, prepared._channels()))
        except BaseException:
            prepared.__exit__()
            raise
        return prepared

    @classmethod
    def of_search(cls, topology: Topology, emulation: Emulation | None) -> Self:
        """Fork the zygote, for all runs of a task with which a search tries settings; nothing if the hosts are other machines.

        Raises `OSError` if a process cannot be started."""
        here = emulation is not None or topology.engine.kind == "local"
        return cls.of(agents=0, entry=TASK_ENTRY) if here else cls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for waiting in [*self._agents, *([self._zygote] if self._zygote else [])]:
            waiting.end()
        self._agents, self._zygote = [], None

    def zygote(self) -> tuple[ForkedChild, socket.socket] | None:
        """The zygote, if one lives, and the launcher's end of its channel. They are lent, to one launch at a time."""
        waiting = self._zygote
        if waiting is None or waiting.child.poll() is None:
            return None if waiting is None else (waiting.child, waiting.channel)
        waiting.channel.close()
        self._zygote = None
        return None

    def take_agent(self, environ: Mapping[str, str], channel: socket.socket | None, network: str | None) -> ForkedChild | None:
        """Let an agent begin, if one waits. It is the caller's.

        Args:
            environ: all its variables.
            channel: to its fork server (`zmqtrain.launcher.forkserver.ADOPTED`); ``None``: it starts one.
            network: its network namespace, by name, if that is not this process's.

        Raises `OSError` if there is no such namespace.
        """
        if not self._agents:
            return None
        message = msgpack.packb([dict(environ), channel is not None, network is not None])
        with ExitStack() as stack:
            files = [] if channel is None else [channel.fileno()]
            if network is not None:
                files.append(open_namespace(network))
                stack.callback(os.close, files[-1])
            waiting = self._agents.pop()
            with waiting.channel, suppress(ConnectionError):  # it was killed, and its end tells
                socket.send_fds(waiting.channel, [message], files)
        return waiting.child

    def _channels(self) -> list[socket.socket]:
        return [waiting.channel for waiting in [*self._agents, *([self._zygote] if self._zygote else [])]]


def _may_fork() -> bool:
    """Whether this process has one thread, and a loop can wait for a child (before Linux 5.3 it cannot)."""
    own = open_pidfd(os.getpid())
    if own is None:
        return False
    os.close(own)
    return threads() == 1


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Within the block Ctrl-C waits; a child has left its reach by then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(life: Callable[[socket.socket], int], others: Sequence[socket.socket]) -> _Waiting:
    """Fork a child that calls ``life`` with its end of a new channel. ``others``: this process's ends of other channels."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    with theirs:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _live(life, theirs, parent, others)
    return _Waiting(ForkedChild(pid), ours)


def _live(life: Callable[[socket.socket], int], channel: socket.socket, parent: int, others: Sequence[socket.socket]) -> NoReturn:
    code = 70
    try:
        die_with_parent(parent)
        for other in others:
            other.close()  # only its own process's end may keep it open
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may take it for Ctrl-C
        heed_no_preemption()
        code = life(channel)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - no caller is left to show it
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)  # not sys.exit: this process must not run the launcher's exit handlers


def _be_zygote(entry: str, channel: socket.socket) -> int:
    leave_terminal_to_launcher()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    setproctitle("zmqtrain zygote")
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    # As in a process of its own, whose main module processes of roles may import again.
    command = sys.argv[0]
    sys.argv[:] = [str(sys.modules[be_zygote.__module__].__file__)]
    sys.modules["__main__"] = sys.modules[be_zygote.__module__]
    if sys.path and Path(sys.path[0]) == Path(command).absolute().parent:
        del sys.path[0]  # of the command's script
    plain_streams()
    be_zygote(channel, entry)
    return 0


def _be_agent(channel: socket.socket) -> int:
    os.setsid()  # Ctrl-C reaches the launcher alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    running = os.environ.get(RUNNING, "")
    if running.isdecimal():
        os.close(int(running))  # the launcher's
    data, files, _flags, _address = socket.recv_fds(channel, LARGEST_MESSAGE, 2)
    channel.close()
    if not data:
        return 0  # it is not needed
    environ, has_channel, has_network = msgpack.unpackb(data)
    os.environ.clear()
    os.environ.update(environ)
    if has_channel:
        os.environ[ADOPTED] = str(files[0])
    if has_network:
        enter_network(files[-1], "of the agent")
        os.close(files[-1])
    setproctitle(f"zmqtrain {environ.get(PEER, 'agent')}")
    return agent_main()
