"""The launcher's side of probes: processes on a file's hosts that check and measure on request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zmqtrain.errors import PeerTimeoutError, ProtocolError, UsageError, ZmqTrainError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.engine import Engine, Gathering, GatheringEngine, RemoteEngine
from zmqtrain.launcher.fleet import Fleet, engine_for, gathered_hosts
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.address import without_key
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.zeromq import open_zeromq
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
    """Start probes on all hosts of the file, and make them known to each other. They end with the context.

    ``token``: a secret that they share. ``say`` prints lines for the user. ``with_files``: hosts must also have the folder and
    files of the job, unless they are to be copied there.
    Raises `UsageError` if they cannot be started from here, `HostsError` if hosts lack something that is needed, and
    `ZmqTrainError` if a probe ends early.
    """
    engine = engine_for(topology, emulation)
    if emulation is None:
        _require_reachable(engine, topology)
    hosts = topology.hosts
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="zmqtrain-links-")))
        fleet = await stack.enter_async_context(gathered_hosts(engine, Gathering(topology, directory, say, hosts), token))
        encrypted = topology.encrypted(emulated=emulation is not None)
        endpoint = await open_zeromq(COORDINATOR, settings=fleet.settings(encrypted=encrypted, port=0))
        stack.push_async_callback(endpoint.close)
        needs = topology if with_files and not topology.engine.sync else _bare(topology)
        log = _log_to(say)
        await fleet.open(endpoint, needs.hosts, directory, say=say, log=log, agents=False, needs=needs)
        probes = Probes(endpoint, fleet, hosts, topology.job.timeouts)
        await stack.enter_async_context(probes)
        await probes.start()
        yield probes


def _require_reachable(engine: Engine, topology: Topology) -> None:
    """Refuse hosts that exist only during a launch, or that the engine cannot reach at all."""
    kind = topology.engine.kind
    if isinstance(engine, GatheringEngine):
        raise UsageError(
            f'with [engine] kind = "{kind}" the hosts exist only during a launch: use --emulate to measure the emulated hosts'
        )
    away = [host for host in topology.hosts if not host.local]
    if away and not isinstance(engine, RemoteEngine):
        raise UsageError(
            f'{away[0].name} ({away[0].address}) is another machine, which [engine] kind = "{kind}" does not '
            f'reach: set kind = "ssh", or use --emulate to measure the emulated hosts'
        )


def _log_to(say: Callable[[str], None]) -> Callable[[str, str], None]:
    return lambda host, text: say(f"{host}: {text.rstrip()}")


def _bare(topology: Topology) -> Topology:
    """The topology of a run that needs only zmqtrain on its hosts, and no files of the job."""
    hosts = tuple(host.model_copy(update={"folder": host.folder or "~"}) for host in topology.hosts)
    job = topology.job.model_copy(update={"task": None, "args": {}})
    return topology.model_copy(update={"hosts": hosts, "job": job, "engine": topology.engine.model_copy(update={"sync": False})})


class Probes:
    """The probes of all hosts. Every `Engine` can start them."""

    def __init__(self, endpoint: Endpoint, fleet: Fleet, hosts: Sequence[Host], timeouts: Timeouts) -> None:
        """``fleet``: the hosts, after `Fleet.open`."""
        self._endpoint, self._fleet, self._hosts, self._timeouts = endpoint, fleet, hosts, timeouts
        self._here: dict[PeerId, asyncio.Future[str]] = {
            probe_of(host.name): asyncio.get_running_loop().create_future() for host in hosts
        }
        endpoint.serve("probe.here", self._on_here)

    async def __aenter__(self) -> Probes:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the probes that are left."""
        await self._fleet.stop(self._timeouts.grace_s)
        for peer in self._here:
            self._endpoint.forget(peer, "all is measured")

    async def start(self) -> None:
        """Start a probe on each host, and make them known to each other."""
        await self._fleet.start((sys.executable, "-P", "-m", "zmqtrain.launcher.link_probe"), "probe")
        addresses = await self._all_here()
        for peer, address in addresses.items():
            self._endpoint.add_peer(peer, address)
        for peer in addresses:
            for other, address in addresses.items():
                if other != peer:
                    await self.ask(peer.partition("/")[2], "know", other, address)

    def address_of(self, host: str) -> str:
        """The address of a host's probe, once it has started."""
        return without_key(self._here[probe_of(host)].result())

    async def measure_way(self, source: str, target: str) -> LinkSpeed:
        """Measure the link from one host to another. Raises what the probe of ``source`` raises: `PeerTimeoutError` if it gets no
        answer."""
        match await self.ask(source, "measure", probe_of(target)):
            case [float(rate), float(trip_s)]:
                return LinkSpeed(source, target, 8 * rate, trip_s / 2)
            case other:
                raise ProtocolError(f"the probe of {source} measured {other!r:.60}")

    async def measure_processor(self, host: Host) -> HostSpeed:
        """Measure the speed of matrix products on a host's slots, in operations per second."""
        flops = await self.ask(host.name, "multiply", host.slots)
        if not isinstance(flops, float):
            raise ProtocolError(f"the probe of {host.name} measured {flops!r:.60}")
        return HostSpeed(host.name, flops)

    async def end(self) -> None:
        """Ask the probes to end by themselves."""
        for host in self._hosts:
            await self.ask(host.name, "end")

    async def ask(self, host: str, method: str, *values: Value) -> Value:
        """Send a request to a host's probe (`zmqtrain.launcher.link_probe`) and return the answer."""
        answer = await self._endpoint.request(probe_of(host), f"probe.{method}", *values, timeout=self._timeouts.barrier_s)
        return answer.meta

    async def _all_here(self) -> dict[PeerId, str]:
        """Wait until all probes have started, and return their addresses. Raises if one ends before that, or does not start in
        time."""
        ends = {asyncio.create_task(self._fleet.wait(host)): host for host in self._fleet.handles}
        every = asyncio.gather(*self._here.values())
        both: list[asyncio.Future[Any]] = [every, *ends]
        try:
            await asyncio.wait(both, timeout=self._timeouts.join_s, return_when=asyncio.FIRST_COMPLETED)
            for task, host in ends.items():
                if task.done():
                    raise ZmqTrainError(f"the probe on {host} ended with exit code {task.result()}; see its output above")
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
            raise ProtocolError(f"{caller} is not a probe of this file's hosts")
        if not here.done():
            here.set_result(address)
        return None


def probe_of(host: str) -> PeerId:
    """The probe's peer id: that of the host's agent, because an emulated network knows the agents' hosts."""
    return f"agent/{host}"
