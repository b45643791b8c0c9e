"""The local engine: every host of the file is a set of processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from zmqtrain.launcher.adopted import AdoptedHandle, process_of, trace_of
from zmqtrain.launcher.engine import AGENT, EngineRun, Gathered, Gathering, Handle
from zmqtrain.launcher.entries import entry_for
from zmqtrain.launcher.forkserver import ADOPTED, ServerProcess
from zmqtrain.launcher.namespaces import in_namespace
from zmqtrain.launcher.zygote import Zygote
from zmqtrain.topology.schema import Host
from zmqtrain.wire.payload import Value

if TYPE_CHECKING:
    from zmqtrain.launcher.prepared import Prepared

#: The variable that tells an agent which process it must not outlive.
PARENT = "ZMQTRAIN_PARENT_PID"


class LocalHandle:
    """An agent that is a child process of this launcher."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process

    async def wait(self) -> int:
        return await self.process.wait()


class LocalEngine:
    """Agents as child processes, in sessions of their own so that Ctrl-C reaches the launcher alone."""

    def __init__(self, *, outlive: bool = False, prepared: Prepared | None = None) -> None:
        """``outlive``: the agents outlive the launcher; otherwise they end with it. ``prepared``: processes that wait to be needed;
        they end with the launcher."""
        self.outlive, self._prepared = outlive, prepared
        self._zygote: Zygote | None = None

    @asynccontextmanager
    async def forking(self, script: str | None) -> AsyncIterator[None]:
        """Within the block, agents that are started share one import of torch; without it, each starts a fork server of its own.
        ``script``: the script that workers run; ``None``: a task."""
        forked = None if self._prepared is None else self._prepared.zygote()
        async with Zygote(entry_for(script), forked=forked) as self._zygote:
            try:
                yield
            finally:
                self._zygote = None

    async def start(
        self, host: Host, command: Sequence[str], environ: Mapping[str, str], *, network: str | None = None
    ) -> LocalHandle:
        """As every engine does. ``network``: the network namespace in which the process runs, by name."""
        variables = {**os.environ, **environ}
        if not self.outlive:
            variables[PARENT] = str(os.getpid())
        with ExitStack() as stack:
            inherited: tuple[int, ...] = ()
            channel = None if self._zygote is None else stack.enter_context(self._zygote.channel())
            if self._prepared is not None and not self.outlive and tuple(command[1:]) == AGENT:
                agent = self._prepared.take_agent(variables, channel, network)
                if agent is not None:
                    return LocalHandle(agent)
            if channel is not None:
                inherited = (channel.fileno(),)
                variables[ADOPTED] = str(inherited[0])
            if network is not None:
                command = in_namespace(network, command)
            process = await asyncio.create_subprocess_exec(
                *command, env=variables, stdin=asyncio.subprocess.DEVNULL, pass_fds=inherited, start_new_session=True
            )
        return LocalHandle(process)

    def trace(self, handle: Handle) -> Value:
        assert isinstance(handle, LocalHandle)
        return trace_of(handle.process.pid) if handle.process.returncode is None else None

    async def adopt(self, run: EngineRun, traces: Mapping[str, Value], sizes: Mapping[str, int]) -> Mapping[str, Handle]:
        found = {host: process_of(trace) for host, trace in traces.items()}
        return {host: AdoptedHandle(process) for host, process in found.items() if process is not None}

    async def close(self) -> None:
        """Do nothing: there is nothing that must be closed."""

    async def stop(self, handle: Handle, grace: float) -> None:
        if isinstance(handle, AdoptedHandle):
            await handle.stop(grace)
            return
        assert isinstance(handle, LocalHandle)
        process = handle.process
        if grace > 0:
            send_signal(process, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace):
                    await process.wait()
            except TimeoutError:
                pass
        send_signal(process, signal.SIGKILL)
        await process.wait()


class LocalHosts:
    """All hosts are this machine. Implements `zmqtrain.launcher.engine.GatheringEngine`."""

    def __init__(self, engine: LocalEngine) -> None:
        self.start, self.stop = engine.start, engine.stop
        self._engine, self._stack = engine, AsyncExitStack()

    async def gather(self, gathering: Gathering) -> Gathered:
        return Gathered(gathering.topology, {}, port=gathering.topology.job.port)

    async def open(self, run: EngineRun) -> None:
        # Fork servers with a common import end with the launcher; agents that outlive it have fork servers of their own.
        if run.agents and not self._engine.outlive:
            await self._stack.enter_async_context(self._engine.forking(run.script))

    async def close(self) -> None:
        await self._stack.aclose()


def send_signal(process: ServerProcess, number: signal.Signals) -> None:
    """Send a signal to a child of this process; nothing happens if it has ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):  # it has ended, but the loop does not know yet
            process.send_signal(number)
