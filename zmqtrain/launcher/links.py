"""The network between a file's hosts, measured: a probe on each, which measure in turn, so that none is in another's way."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zmqtrain.errors import PeerTimeoutError, ProtocolError, UsageError, ZmqTrainError
from zmqtrain.launcher.addresses import addresses_towards, endpoint_at, listening_address
from zmqtrain.launcher.emulate import Emulation, emulated
from zmqtrain.launcher.engine import Engine, EngineRun, Handle, RemoteEngine, make_engine
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.net.curve import Identity
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.topology.timeouts import Ladder
from zmqtrain.train.device.measured import HostSpeed, LinkSpeed
from zmqtrain.wire.payload import Value

#: All ways between so many hosts are measured; of more hosts, those between neighbours, and between the first and each other.
ALL_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured."""

    hosts: tuple[HostSpeed, ...]
    links: tuple[LinkSpeed, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        """As JSON lines."""
        yield from ({"row": "host", **asdict(host)} for host in self.hosts)
        yield from ({"row": "link", **asdict(link)} for link in self.links)


def pairs_of(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Between which hosts the network is measured, both ways."""
    count = len(hosts)
    if count <= ALL_PAIRS:
        return [(one, other) for one in hosts for other in hosts if one != other]
    near = [(hosts[place], hosts[(place + 1) % count]) for place in range(count)]
    ends = [*near, *((hosts[0], other) for other in hosts[2:-1])]
    return [pair for one, other in ends for pair in ((one, other), (other, one))]


async def measure_links(
    topology: Topology, emulation: Emulation | None, *, token: str, say: Callable[[str], None] = lambda text: None
) -> Links:
    """Measure between the hosts of the file, emulated or as they are. ``token``: a secret that the probes share; ``say`` hears what
    the engine has to say of hosts.

    Raises `UsageError` where they cannot be started from here or there is but one, `HostsError` with all that machines lack, and
    `ZmqTrainError` where a probe ends early.
    """
    hosts = topology.hosts
    if len(hosts) < 2:
        raise UsageError("--links measures between hosts, and the file has one: add [[hosts]]")
    async with AsyncExitStack() as stack:
        ladder = Ladder.of(topology.job.timeout_s)
        encrypted = topology.encrypted(emulated=emulation is not None)
        settings = net_settings(ladder, token, identity=Identity.coordinator(token) if encrypted else None)
        engine: Engine
        towards: dict[str, str] = {}  # this machine's address, as each host sees it
        if emulation is not None:
            emulator, _ = await stack.enter_async_context(emulated(topology, place(topology), emulation))
            settings = emulator.settings(COORDINATOR, settings)
            engine = emulator
        else:
            engine = make_engine(topology.engine.kind)
            if isinstance(engine, RemoteEngine):
                towards = await addresses_towards(hosts, topology.engine.address)
                settings = replace(settings, host=listening_address(towards.values()))
            elif away := [host for host in hosts if not host.local]:
                raise UsageError(
                    f'{away[0].name} ({away[0].address}) is another machine, which [engine] kind = "{topology.engine.kind}" does '
                    'not reach: use "ssh", or --emulate to measure what [network] says'
                )
        endpoint = await open_zeromq(COORDINATOR, settings=settings)
        stack.push_async_callback(endpoint.close)
        coordinators = {name: endpoint_at(address, endpoint.address) for name, address in towards.items()}
        if isinstance(engine, RemoteEngine):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zmqtrain-links-")))
            stack.push_async_callback(engine.close)
            await engine.open(_for_probes(topology, coordinators, folder, ladder, say))
        probes = Probes(endpoint, hosts, ladder)
        await stack.enter_async_context(probes)
        await probes.start(engine, token, coordinators)
        return await probes.measure()


def _for_probes(
    topology: Topology, coordinators: Mapping[str, str], folder: Path, ladder: Ladder, say: Callable[[str], None]
) -> EngineRun:
    """What an engine is told where nothing but probes are to be started: they need the package, and none of the job's files.

    So an empty folder is copied, in which they run.
    """
    empty = folder / "empty"
    empty.mkdir()
    job = topology.job.model_copy(update={"task": None})
    engine = topology.engine.model_copy(update={"sync": True})
    hosts = tuple(host.model_copy(update={"folder": None}) for host in topology.hosts)
    return EngineRun(
        topology=topology.model_copy(update={"job": job, "engine": engine, "hosts": hosts}),
        hosts=hosts,
        coordinators=coordinators,
        folder=empty,
        directory=folder,
        script=None,
        ladder=ladder,
        say=say,
        log=lambda host, text: say(f"{host} | {text.rstrip()}"),
    )


class Probes:
    """The probes of all hosts, as their launcher has them. Whatever can start a process on a host (`Engine`) can start them."""

    def __init__(self, endpoint: Endpoint, hosts: Sequence[Host], ladder: Ladder) -> None:
        self._endpoint, self._hosts, self._ladder = endpoint, hosts, ladder
        self._here: dict[PeerId, asyncio.Future[str]] = {
            _probe(host.name): asyncio.get_running_loop().create_future() for host in hosts
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
            await asyncio.gather(*(engine.stop(handle, self._ladder.grace_s) for handle in self._handles.values()))
        for peer in self._here:
            self._endpoint.forget(peer, "all is measured")

    async def start(self, engine: Engine, token: str, coordinators: Mapping[str, str] | None = None) -> None:
        """Start one on each host, and make them known to each other. ``coordinators``: where each host reaches this process."""
        self._engine = engine
        command = (sys.executable, "-m", "zmqtrain.launcher.link_probe")
        for host in self._hosts:
            address = (coordinators or {}).get(host.name, self._endpoint.address)
            environment = RoleEnvironment(_probe(host.name), address, token, timeout_s=self._ladder.request_s)
            if coordinators:
                environment = replace(environment, host=host.address, bind=host.listens_at)
            self._handles[host.name] = await engine.start(host, command, environment.to_environ())
        addresses = await self._all_here()
        for peer, address in addresses.items():
            self._endpoint.add_peer(peer, address)
        for peer in addresses:
            for other, address in addresses.items():
                if other != peer:
                    await self._ask(peer, "know", other, address)

    async def measure(self) -> Links:
        """Each way, and each host's processor, one after another; then the probes end."""
        links = []
        for source, target in pairs_of([host.name for host in self._hosts]):
            match await self._ask(_probe(source), "measure", _probe(target)):
                case [float(rate), float(trip_s)]:
                    links.append(LinkSpeed(source, target, 8 * rate, trip_s / 2))
                case other:
                    raise ProtocolError(f"the probe of {source} measured {other!r:.60}")
        speeds = []
        for host in self._hosts:
            flops = await self._ask(_probe(host.name), "multiply", host.slots)
            if not isinstance(flops, float):
                raise ProtocolError(f"the probe of {host.name} measured {flops!r:.60}")
            speeds.append(HostSpeed(host.name, flops))
        for host in self._hosts:
            await self._ask(_probe(host.name), "end")
        return Links(tuple(speeds), tuple(links))

    async def _all_here(self) -> dict[PeerId, str]:
        """Where each is. Raises where one ends instead, or none comes."""
        ends = {asyncio.create_task(handle.wait()): host for host, handle in self._handles.items()}
        every = asyncio.gather(*self._here.values())
        both: list[asyncio.Future[Any]] = [every, *ends]
        try:
            await asyncio.wait(both, timeout=self._ladder.join_s, return_when=asyncio.FIRST_COMPLETED)
            for task, host in ends.items():
                if task.done():
                    raise ZmqTrainError(f"the probe on {host} ended with code {task.result()}; what it said stands above")
            if not every.done():
                missing = next(peer for peer, here in self._here.items() if not here.done())
                raise PeerTimeoutError(missing, "its probe to come", self._ladder.join_s)
            return dict(zip(self._here, every.result(), strict=True))
        finally:
            for one in both:
                one.cancel()
            await asyncio.wait(both)

    async def _ask(self, peer: PeerId, method: str, *values: Value) -> Value:
        answer = await self._endpoint.request(peer, f"probe.{method}", *values, timeout=self._ladder.barrier_s)
        return answer.meta

    async def _on_here(self, caller: PeerId, address: Value) -> Value:
        here = self._here.get(caller)
        if here is None or not isinstance(address, str):
            raise ProtocolError(f"{caller} is no probe of this file's hosts")
        if not here.done():
            here.set_result(address)
        return None


def _probe(host: str) -> PeerId:
    """Named as the host's agent is: an emulated network knows where that is."""
    return f"agent/{host}"
