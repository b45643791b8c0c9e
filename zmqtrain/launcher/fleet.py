"""The hosts of a launch, in the same form for every engine, and one process on each: an agent, or a probe.

::

    async with gathered_hosts(engine, gathering, token) as fleet:   # which machines the hosts are, and where they reach this one
        endpoint = await open_zeromq(COORDINATOR, settings=fleet.settings(encrypted=...))
        await fleet.open(endpoint, hosts, directory, say=..., log=...)     # check that they have what the run needs
        await fleet.start(command, "agent")                     # `fleet.handles` has a handle for each host
        ...
        await fleet.stop(grace_s)

Engines have as many methods as they need (`zmqtrain.launcher.engine`). `in_one_form` adds the others, so that no other code
depends on the kind of engine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.launcher.addresses import addresses_towards, endpoint_at, listening_address
from zmqtrain.launcher.emulate import EmulatedHosts, Emulation
from zmqtrain.launcher.engine import (
    Engine,
    EngineRun,
    Gathered,
    Gathering,
    GatheringEngine,
    Handle,
    RemoteEngine,
    engine_faults,
    make_engine,
)
from zmqtrain.launcher.local import LocalEngine, LocalHandle, LocalHosts, send_signal
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.run.assembly import coordinator_settings
from zmqtrain.topology.loopback import is_loopback
from zmqtrain.topology.schema import Host, Topology

if TYPE_CHECKING:
    from zmqtrain.launcher.prepared import Prepared


def engine_for(topology: Topology, emulation: Emulation | None, prepared: Prepared | None = None) -> Engine:
    """The engine that starts processes on a topology's hosts: emulated, or that of ``[engine]``. Raises like `make_engine`.

    ``prepared``: processes that wait to be needed, where the hosts are this machine.
    """
    if emulation is not None:
        return EmulatedHosts(emulation, prepared)
    engine = make_engine(topology.engine.kind)
    return LocalEngine(prepared=prepared) if isinstance(engine, LocalEngine) else engine


def in_one_form(engine: Engine) -> GatheringEngine:
    """The engine, with all the methods that an engine can have."""
    if isinstance(engine, LocalEngine):
        return LocalHosts(engine)
    if isinstance(engine, GatheringEngine):
        return engine
    return _Reached(engine) if isinstance(engine, RemoteEngine) else _Here(engine)


@asynccontextmanager
async def gathered_hosts(engine: Engine, gathering: Gathering, token: str) -> AsyncIterator[Fleet]:
    """Find the topology's hosts with the engine, and close it at the end.

    ``token``: the run's secret, unless the engine has one. Raises what the engine's ``gather`` raises."""
    whole, kind = in_one_form(engine), gathering.topology.engine.kind
    try:
        with engine_faults(kind, "gather the hosts"):
            gathered = await whole.gather(gathering)
        yield Fleet(whole, gathered, gathered.token or token)
    finally:
        await whole.close()


class Fleet:
    """The hosts of a launch. Made by `gathered_hosts`."""

    def __init__(self, engine: GatheringEngine, gathered: Gathered, token: str) -> None:
        self.gathered, self.token = gathered, token
        self.handles: dict[str, Handle] = {}
        """The handle of what was started, by host name."""
        self._engine, self._kind = engine, gathered.topology.engine.kind
        self._what = "agent"
        self._command: Sequence[str] = ()
        self._hosts: tuple[Host, ...] = ()
        self._coordinators: dict[str, str] = {}  # the address of the coordinator's endpoint, by host name
        self._members = 0  # the processes that the coordinator will be in touch with

    def settings(self, *, encrypted: bool, port: int | None = None) -> NetSettings:
        """Settings of the coordinator's endpoint with which all hosts reach it. ``port``: used instead of the engine's."""
        gathered = self.gathered
        host = gathered.host
        if host is None:
            near = all(is_loopback(address) for address in gathered.towards.values())
            host = "127.0.0.1" if near else listening_address(gathered.towards.values())
        at = gathered.port if port is None else port
        settings = coordinator_settings(gathered.topology, self.token, encrypted=encrypted, host=host, port=at)
        self._members = settings.peers
        return settings if gathered.shape is None else gathered.shape(settings)

    async def open(
        self,
        endpoint: Node,
        hosts: Sequence[Host],
        directory: Path,
        *,
        say: Callable[[str], None],
        log: Callable[[str, str], None],
        script: str | None = None,
        agents: bool = True,
        needs: Topology | None = None,
    ) -> None:
        """Check that these hosts have what is needed, before anything is started.

        Args:
            endpoint: the coordinator's.
            hosts: the hosts on which something will be started.
            directory: the run directory, on this machine.
            say: prints a line for the user.
            log: takes a host's name and the output of the process that is started there.
            script: the script that workers run, as the user named it.
            agents: whether agents will be started, which fork roles.
            needs: the topology that says what the hosts must have, if it is not the run's own.

        Raises `HostsError` with everything that is missing.
        """
        towards, topology = self.gathered.towards, needs or self.gathered.topology
        self._hosts = tuple(hosts)
        self._coordinators = {
            host.name: endpoint_at(towards[host.name], endpoint.address) if towards else endpoint.address for host in hosts
        }
        if towards:
            endpoint.pardon(len(hosts))  # they try the connection from each host
        run = EngineRun(
            topology=topology,
            hosts=self._hosts,
            coordinators=self._coordinators,
            folder=Path.cwd(),
            directory=directory,
            script=script,
            timeouts=topology.job.timeouts,
            say=say,
            log=log,
            agents=agents,
        )
        with engine_faults(self._kind, "look at the hosts"):
            await self._engine.open(run)

    async def start(self, command: Sequence[str], what: str) -> None:
        """Start a command on all hosts at once. ``what``: a word for it in errors. Its environment says how it finds the
        coordinator.

        Raises `EngineError` or the engine's own error if that fails; whatever was started by then has a handle nevertheless."""
        self._what, self._command = what, command
        async with asyncio.TaskGroup() as group:
            for host in self._hosts:
                group.create_task(self._start(host, command), name=f"start the {what} of {host.name}")

    async def start_again(self, host: str) -> None:
        """Start what `start` has started on a host, after its end. Raises the same."""
        await self._start(next(each for each in self._hosts if each.name == host), self._command)

    def signal(self, host: str, number: signal.Signals) -> None:
        """Send a signal to the process on a host, which is this machine; nothing happens if it has ended."""
        handle = self.handles[host]
        assert isinstance(handle, LocalHandle), "no other engine's process can get one"
        send_signal(handle.process, number)

    async def _start(self, host: Host, command: Sequence[str]) -> None:
        job, coordinator = self.gathered.topology.job, self._coordinators[host.name]
        # Probes use the names of agents, because an emulated network knows the agents' hosts.
        environment = RoleEnvironment.of_job(job, f"agent/{host.name}", coordinator, self.token, members=self._members)
        if self.gathered.towards:
            environment = replace(environment, host=host.address, bind=host.listens_at)
        with engine_faults(self._kind, f"start the {self._what} of {host.name}"):
            handle = await self._engine.start(host, command, environment.to_environ())
            if not isinstance(handle, Handle):
                raise TypeError(f"its start returned {type(handle).__name__}, which is not a handle: it has no wait")
        self.handles[host.name] = handle

    async def wait(self, host: str) -> int:
        """Wait for the end of the process on a host and return its exit code. May be called again."""
        with engine_faults(self._kind, f"follow the {self._what} of {host}"):
            return await self.handles[host].wait()

    async def stop(self, grace_s: float) -> None:
        """End all processes that are left: ask them at once, and kill them after ``grace_s`` seconds (0: at once)."""
        with engine_faults(self._kind, f"stop {self._what}s"):
            await asyncio.gather(*(self._engine.stop(handle, grace_s) for handle in self.handles.values()))


class _Here:
    """Wraps an engine that only starts and stops: its hosts are this machine."""

    def __init__(self, engine: Engine) -> None:
        self.start, self.stop = engine.start, engine.stop

    async def gather(self, gathering: Gathering) -> Gathered:
        return Gathered(gathering.topology, {}, port=gathering.topology.job.port)

    async def open(self, run: EngineRun) -> None:
        """Do nothing: there is nothing to prepare."""

    async def close(self) -> None:
        """Do nothing: there is nothing that must be closed."""


class _Reached:
    """Wraps an engine whose hosts are those of the file, on other machines: the routes to them give this machine's addresses."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.start, self.stop = engine.start, engine.stop
        self._engine, self._opened = engine, False

    async def gather(self, gathering: Gathering) -> Gathered:
        topology = gathering.topology
        towards = await addresses_towards(gathering.hosts or topology.hosts, topology.engine.address)
        return Gathered(topology, towards, port=topology.job.port, host=listening_address(towards.values()))

    async def open(self, run: EngineRun) -> None:
        self._opened = True
        await self._engine.open(run)

    async def close(self) -> None:
        if self._opened:
            await self._engine.close()
