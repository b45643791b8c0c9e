"""Processes on a file's hosts that look and measure when they are asked to, as their launcher has them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zmqtrain.errors import PeerTimeoutError, ProtocolError, UsageError, ZmqTrainError
from zmqtrain.launcher.addresses import addresses_towards, endpoint_at, listening_address
from zmqtrain.launcher.emulate import Emulation, emulated
from zmqtrain.launcher.engine import Engine, EngineRun, GatheringEngine, Handle, RemoteEngine, make_engine
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.net.address import without_key
from zmqtrain.net.curve import Identity
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.train.device.measured import HostSpeed, LinkSpeed
from zmqtrain.wire.payload import Value


@asynccontextmanager
async def open_probes(
    topology: Topology,
    emulation: Emulation | None,
    *,
    token: str,
    say: Callable[[str], None] = lambda text: None,
    with_files: bool = False,
) -> AsyncIterator[Probes]:
    """Probes on all hosts of the file, which know each other. They are ended with the context.

    ``token``: a secret that they share. ``say`` takes lines for the person. ``with_files``: hosts must also have the folder and
    files of the job, unless they are to be copied there.
    Raises `UsageError` where they cannot be started from here, `HostsError` where hosts lack what it takes, and `ZmqTrainError`
    where a probe ends early.
    """
    hosts = topology.hosts
    async with AsyncExitStack() as stack:
        timeouts = topology.job.timeouts
        identity = Identity.coordinator(token) if topology.encrypted(emulated=emulation is not None) else None
        settings = net_settings(timeouts, token, ports=topology.job.port_range, identity=identity)
        towards: dict[str, str] = {}  # this machine's address, as each host sees it
        if emulation is None:
            engine = make_engine(topology.engine.kind)
            if isinstance(engine, GatheringEngine):
                raise UsageError(
                    f'the hosts of kind = "{topology.engine.kind}" are there in a launch only: use --emulate to measure what '
                    "the file says"
                )
            if isinstance(engine, RemoteEngine):
                towards = await addresses_towards(hosts, topology.engine.address)
                settings = replace(settings, host=listening_address(towards.values()))
            elif away := [host for host in hosts if not host.local]:
                raise UsageError(
                    f"{away[0].name} ({away[0].address}) is another machine, which [engine] kind = "
                    f'"{topology.engine.kind}" does not reach: say kind = "ssh", or use --emulate to measure what the file says'
                )
        else:
            emulator, _ = await stack.enter_async_context(emulated(topology, place(topology), emulation))
            settings = emulator.settings(COORDINATOR, settings)
            engine = emulator
        endpoint = await open_zeromq(COORDINATOR, settings=settings)
        stack.push_async_callback(endpoint.close)
        coordinators = {name: endpoint_at(address, endpoint.address) for name, address in towards.items()}
        if isinstance(engine, RemoteEngine):
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="zmqtrain-links-")))
            stack.push_async_callback(engine.close)
            endpoint.pardon(len(hosts))  # who try the way from each host
            known = topology if with_files and not topology.engine.sync else _bare(topology)
            await engine.open(_probing(known, coordinators, timeouts, directory, say))
        probes = Probes(endpoint, hosts, timeouts, ports=topology.job.port_range)
        await stack.enter_async_context(probes)
        await probes.start(engine, token, coordinators)
        yield probes


def _bare(topology: Topology) -> Topology:
    """The topology of a run that needs zmqtrain on its hosts, but nothing of the job's."""
    hosts = tuple(host.model_copy(update={"folder": host.folder or "~"}) for host in topology.hosts)
    job = topology.job.model_copy(update={"task": None})
    return topology.model_copy(update={"hosts": hosts, "job": job, "engine": topology.engine.model_copy(update={"sync": False})})


def _probing(
    topology: Topology, coordinators: Mapping[str, str], timeouts: Timeouts, directory: Path, say: Callable[[str], None]
) -> EngineRun:
    """What an engine is told of a run that consists of probes."""
    return EngineRun(
        topology=topology,
        hosts=topology.hosts,
        coordinators=coordinators,
        folder=Path.cwd(),
        directory=directory,
        script=None,
        timeouts=timeouts,
        say=say,
        log=lambda host, text: say(f"{host}: {text.rstrip()}"),
    )


class Probes:
    """The probes of all hosts, as their launcher has them. Whatever can start a process on a host (`Engine`) can start them."""

    def __init__(
        self, endpoint: Endpoint, hosts: Sequence[Host], timeouts: Timeouts, *, ports: tuple[int, int] | None = None
    ) -> None:
        """``ports``: the range that they listen in; ``None``: any."""
        self._endpoint, self._hosts, self._timeouts, self._ports = endpoint, hosts, timeouts, ports
        self._here: dict[PeerId, asyncio.Future[str]] = {
            probe_of(host.name): asyncio.get_running_loop().create_future() for host in hosts
        }
        self._engine: Engine | None = None
        self._handles: dict[str, Handle] = {}
        endpoint.serve("probe.here", self._on_here)

    async def __aenter__(self) -> Probes:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is left of them."""
        if self._engine is not None:
            engine = self._engine
            await asyncio.gather(*(engine.stop(handle, self._timeouts.grace_s) for handle in self._handles.values()))
        for peer in self._here:
            self._endpoint.forget(peer, "all is measured")

    async def start(self, engine: Engine, token: str, coordinators: Mapping[str, str] | None = None) -> None:
        """Start one on each host, and make them known to each other. ``coordinators``: where each host reaches this process."""
        self._engine = engine
        command = (sys.executable, "-m", "zmqtrain.launcher.link_probe")

        async def start(host: Host) -> None:
            address = (coordinators or {}).get(host.name, self._endpoint.address)
            timeout_s = self._timeouts.request_s
            environment = RoleEnvironment(probe_of(host.name), address, token, timeout_s=timeout_s, ports=self._ports)
            if isinstance(engine, RemoteEngine):
                environment = replace(environment, host=host.address, bind=host.listens_at)
            self._handles[host.name] = await engine.start(host, command, environment.to_environ())

        async with asyncio.TaskGroup() as group:
            for host in self._hosts:
                group.create_task(start(host), name=f"start the probe of {host.name}")
        addresses = await self._all_here()
        for peer, address in addresses.items():
            self._endpoint.add_peer(peer, address)
        for peer in addresses:
            for other, address in addresses.items():
                if other != peer:
                    await self.ask(peer.partition("/")[2], "know", other, address)

    def address_of(self, host: str) -> str:
        """Where a host's probe is found, once it has started."""
        return without_key(self._here[probe_of(host)].result())

    async def measure_way(self, source: str, target: str) -> LinkSpeed:
        """One way between two hosts. Raises what the probe of ``source`` raises, `PeerTimeoutError` where it reaches nobody."""
        match await self.ask(source, "measure", probe_of(target)):
            case [float(rate), float(trip_s)]:
                return LinkSpeed(source, target, 8 * rate, trip_s / 2)
            case other:
                raise ProtocolError(f"the probe of {source} measured {other!r:.60}")

    async def measure_processor(self, host: Host) -> HostSpeed:
        """How fast a host's slots multiply."""
        flops = await self.ask(host.name, "multiply", host.slots)
        if not isinstance(flops, float):
            raise ProtocolError(f"the probe of {host.name} measured {flops!r:.60}")
        return HostSpeed(host.name, flops)

    async def end(self) -> None:
        """Let them end by themselves."""
        for host in self._hosts:
            await self.ask(host.name, "end")

    async def ask(self, host: str, method: str, *values: Value) -> Value:
        """Let a host's probe do something (`zmqtrain.launcher.link_probe`); its answer."""
        answer = await self._endpoint.request(probe_of(host), f"probe.{method}", *values, timeout=self._timeouts.barrier_s)
        return answer.meta

    async def _all_here(self) -> dict[PeerId, str]:
        """Where each is. Raises where one ends instead, or none comes."""
        ends = {asyncio.create_task(handle.wait()): host for host, handle in self._handles.items()}
        every = asyncio.gather(*self._here.values())
        both: list[asyncio.Future[Any]] = [every, *ends]
        try:
            await asyncio.wait(both, timeout=self._timeouts.join_s, return_when=asyncio.FIRST_COMPLETED)
            for task, host in ends.items():
                if task.done():
                    raise ZmqTrainError(f"the probe on {host} ended with code {task.result()}; what it said stands above")
            if not every.done():
                missing = next(peer for peer, here in self._here.items() if not here.done())
                raise PeerTimeoutError(missing, "its probe to come", self._timeouts.join_s)
            return dict(zip(self._here, every.result(), strict=True))
        finally:
            for one in both:
                one.cancel()
            await asyncio.wait(both)

    async def _on_here(self, caller: PeerId, address: Value) -> Value:
        here = self._here.get(caller)
        if here is None or not isinstance(address, str):
            raise ProtocolError(f"{caller} is no probe of this file's hosts")
        if not here.done():
            here.set_result(address)
        return None


def probe_of(host: str) -> PeerId:
    """Named as the host's agent is: an emulated network knows where that is."""
    return f"agent/{host}"
