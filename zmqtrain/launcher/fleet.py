"""The hosts of a launch, in one form whatever engine has them, and one process on each: an agent, or a probe.

::

    async with gathered_hosts(engine, gathering, token) as fleet:   # which machines they are, and where they reach this one
        endpoint = await open_zeromq(COORDINATOR, settings=fleet.settings(encrypted=...))
        await fleet.open(endpoint, hosts, directory, say=..., log=...)     # they have what the run needs
        await fleet.start(command, "agent")                     # `fleet.handles` has one for each host
        ...
        await fleet.stop(grace_s)

Engines have as many methods as they need (`zmqtrain.launcher.engine`). `in_one_form` adds the others, so that nothing else asks
what kind of engine it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

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
from zmqtrain.launcher.local import LocalEngine, LocalHosts
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.run.assembly import coordinator_settings
from zmqtrain.topology.hosts import is_loopback
from zmqtrain.topology.schema import Host, Topology


def engine_for(topology: Topology, emulation: Emulation | None) -> Engine:
    """What starts processes on a topology's hosts: emulated, or as its ``[engine]`` says. Raises as `make_engine`."""
    return make_engine(topology.engine.kind) if emulation is None else EmulatedHosts(emulation)


def in_one_form(engine: Engine) -> GatheringEngine:
    """The engine with all methods that an engine can have."""
    if isinstance(engine, LocalEngine):
        return LocalHosts(engine)
    if isinstance(engine, GatheringEngine):
        return engine
    return _Reached(engine) if isinstance(engine, RemoteEngine) else _Here(engine)


@asynccontextmanager
async def gathered_hosts(engine: Engine, gathering: Gathering, token: str) -> AsyncIterator[Fleet]:
    """The topology's hosts, found by the engine, which is closed at the end.

    ``token``: the run's secret, where the engine's own does not decide it. Raises what the engine's ``gather`` raises."""
    whole, kind = in_one_form(engine), gathering.topology.engine.kind
    try:
        with engine_faults(kind, "gather the hosts"):
            gathered = await whole.gather(gathering)
        yield Fleet(whole, gathered, gathered.token or token)
    finally:
        await whole.close()


class Fleet:
    """Made by `gathered_hosts`."""

    def __init__(self, engine: GatheringEngine, gathered: Gathered, token: str) -> None:
        self.gathered, self.token = gathered, token
        self.handles: dict[str, Handle] = {}
        """What was started, by host."""
        self._engine, self._kind = engine, gathered.topology.engine.kind
        self._what = "agent"
        self._hosts: tuple[Host, ...] = ()
        self._coordinators: dict[str, str] = {}  # where each host reaches the coordinator's endpoint

    def settings(self, *, encrypted: bool, port: int | None = None) -> NetSettings:
        """What the coordinator's endpoint runs by, so that all hosts reach it. ``port``: instead of the engine's."""
        gathered = self.gathered
        host = gathered.host
        if host is None:
            near = all(is_loopback(address) for address in gathered.towards.values())
            host = "127.0.0.1" if near else listening_address(gathered.towards.values())
        at = gathered.port if port is None else port
        settings = coordinator_settings(gathered.topology, self.token, encrypted=encrypted, host=host, port=at)
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
        """See that these hosts have what is needed there, before anything is started.

        Args:
            endpoint: the coordinator's.
            hosts: those on which something will be started.
            directory: the run directory, on this machine.
            say: takes a line for the person.
            log: takes a host's name and what the process that is started there prints itself.
            script: the script that workers run, as the person named it.
            agents: whether agents will be started, which fork roles.
            needs: the topology of a run that needs as much as this one of its hosts, if not the run's own.

        Raises `HostsError` with all that is missing.
        """
        towards, topology = self.gathered.towards, needs or self.gathered.topology
        self._hosts = tuple(hosts)
        self._coordinators = {
            host.name: endpoint_at(towards[host.name], endpoint.address) if towards else endpoint.address for host in hosts
        }
        if towards:
            endpoint.pardon(len(hosts))  # who try the way from each host
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
        """Start a command on each host, all at once. ``what`` it is, in a word. Its environment says how it finds the coordinator.

        Raises `EngineError`, and what the engine raises, where that fails; what was started then has its handle nevertheless."""
        self._what = what
        async with asyncio.TaskGroup() as group:
            for host in self._hosts:
                group.create_task(self._start(host, command), name=f"start the {what} of {host.name}")

    async def _start(self, host: Host, command: Sequence[str]) -> None:
        job = self.gathered.topology.job
        coordinator = self._coordinators[host.name]
        # Probes have the names of agents: an emulated network knows where those are.
        environment = RoleEnvironment(f"agent/{host.name}", coordinator, self.token, timeout_s=job.timeout_s, ports=job.port_range)
        if self.gathered.towards:
            environment = replace(environment, host=host.address, bind=host.listens_at)
        with engine_faults(self._kind, f"start the {self._what} of {host.name}"):
            handle = await self._engine.start(host, command, environment.to_environ())
            if not isinstance(handle, Handle):
                raise TypeError(f"its start returns {type(handle).__name__}, which is no handle: it has no wait")
        self.handles[host.name] = handle

    async def wait(self, host: str) -> int:
        """The exit code of what was started on a host, once it has ended. May be called again."""
        with engine_faults(self._kind, f"follow the {self._what} of {host}"):
            return await self.handles[host].wait()

    async def stop(self, grace_s: float) -> None:
        """End what is left of them, all at once: ask, and after the grace time force (0: at once)."""
        with engine_faults(self._kind, f"stop {self._what}s"):
            await asyncio.gather(*(self._engine.stop(handle, grace_s) for handle in self.handles.values()))


class _Here:
    """An engine that only starts and stops: its hosts are this machine."""

    def __init__(self, engine: Engine) -> None:
        self.start, self.stop = engine.start, engine.stop

    async def gather(self, gathering: Gathering) -> Gathered:
        return Gathered(gathering.topology, {}, port=gathering.topology.job.port)

    async def open(self, run: EngineRun) -> None:
        """There is nothing to see to."""

    async def close(self) -> None:
        """There is nothing to close."""


class _Reached:
    """An engine whose hosts are the file's, on other machines: how they reach this one is the network's to say."""

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
