"""The emulated world: every host of the file is a set of processes on this machine, and the network between them is as slow as the
file says.

There are two ways to do it. With *namespaces*, each host has a network of its own in the kernel, limited to its NIC's bandwidth.
*Paced*: each endpoint delays what it sends until the network would have carried it; that needs no rights, and supports racks.
Latency is added by the endpoint in both cases. The figures mean the same: bytes of messages, not of the packets around them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from zmqtrain.errors import UsageError
from zmqtrain.launcher.engine import EngineRun, Gathered, Gathering, Handle
from zmqtrain.launcher.faults import AgentEnded, EmulatedMachines, Injection, refused
from zmqtrain.launcher.local import LocalEngine
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError
from zmqtrain.membership.environment import COORDINATOR, HOST
from zmqtrain.net.conditions import Conditions
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.loop import Dilation
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shaping import PLAN, SHAPING, LinkShape, Shaping, ShapingPlan
from zmqtrain.run.faults import Fault, faults_of
from zmqtrain.run.side_lines import begins_at, orders_for
from zmqtrain.topology.links import NetworkModel, links_of
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.words import counted

if TYPE_CHECKING:
    from zmqtrain.launcher.fleet import Fleet
    from zmqtrain.launcher.prepared import Prepared
    from zmqtrain.run.assembly import Assembly

ShapingKind: TypeAlias = Literal["auto", "namespaces", "paced"]
KINDS: tuple[ShapingKind, ...] = get_args(ShapingKind)
#: The prefix of emulated runs' folders, and the file in them that is locked while the run is alive.
_FOLDER, _ALIVE = "zmqtrain-emulated-", "alive"
#: The file in it that faults change.
CONDITIONS = "conditions"


@dataclass(frozen=True, slots=True)
class Emulation:
    """How a run is emulated."""

    shaping: ShapingKind = "auto"
    """``auto``: namespaces if they are available and sufficient, otherwise paced."""
    dilation: Dilation = field(default_factory=Dilation)

    def check(self, topology: Topology) -> None:
        """Raise `UsageError` if there is nothing to emulate, or if it cannot be emulated in the requested way."""
        model = links_of(topology)
        ways = [model.way, *model.ways.values()]
        limited = any(host.bandwidth is not None or host.latency for host in model.hosts.values())
        if not (limited or model.racks or any(way.latency or way.bandwidth is not None or way.down for way in ways)):
            raise UsageError(
                'there is no network to emulate: add [network] to the file, with bandwidth = "1 Gbit/s", latency = '
                '"200 us", or both'
            )
        beyond = _beyond_namespaces(model)
        if self.shaping == "namespaces" and beyond is not None:
            raise UsageError(f"namespaces cannot shape {beyond}: remove --shaping, or use --shaping paced")
        if why := refused(topology):
            raise UsageError("; ".join(why))

    def check_script(self, topology: Topology) -> None:
        """Raise `UsageError` if workers run a script and something in the file needs a task."""
        if any(fault.step is not None for fault in topology.faults):
            raise UsageError(
                '[[faults]] of an emulated run with a script cannot have a "step", which only tasks tell: give "at" (a time)'
            )

    def check_search(self, topology: Topology) -> None:
        """Raise `UsageError` if a search of many short runs is not possible."""
        if topology.faults:
            raise UsageError("an emulated search carries out no [[faults]]: remove them, or use zmqtrain tune --simulate")


@dataclass(frozen=True, slots=True)
class EmulatedEngine:
    """Implements `zmqtrain.launcher.engine.Engine`."""

    kind: ShapingKind
    plan: Path
    """The file that `zmqtrain.net.shaping.Shaping` reads."""
    dilation: Dilation
    namespaces: Namespaces | None
    local: LocalEngine
    conditions: Conditions | None
    """What faults change; ``None``: there are none."""

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        variables = {**environ, **self.dilation.to_environ(), SHAPING: str(self.plan), HOST: self.address_of(host.name)}
        network = None if self.namespaces is None else self.namespaces.namespace_of(host.name)
        return await self.local.start(host, command, variables, network=network)

    async def stop(self, handle: Handle, grace: float) -> None:
        await self.local.stop(handle, grace)

    def address_of(self, host: str) -> str:
        """The address at which a host's processes listen."""
        return "127.0.0.1" if self.namespaces is None else self.namespaces.address_of(host)

    def moved(self, topology: Topology) -> Topology:
        """The topology with the emulated hosts' addresses, and with the local engine."""
        hosts = tuple(host.model_copy(update={"address": self.address_of(host.name)}) for host in topology.hosts)
        engine = topology.engine.model_copy(update={"kind": "local"})
        return topology.model_copy(update={"hosts": hosts, "engine": engine})

    def settings(self, peer: PeerId, settings: NetSettings) -> NetSettings:
        """The settings of the launcher's own endpoint."""
        host = settings.host if self.namespaces is None else self.namespaces.address
        return replace(settings, host=host, shaping=Shaping.load(str(self.plan), peer))

    def facts(self) -> dict[str, object]:
        """Values for the run's summary."""
        return {"shaping": self.kind, "dilation": self.dilation.factor}


@asynccontextmanager
async def emulated(
    topology: Topology, placement: Placement, emulation: Emulation, prepared: Prepared | None = None
) -> AsyncIterator[tuple[EmulatedEngine, str]]:
    """Make the emulated network. Yields an engine for the run and a line for the user; the network is removed at the end.
    ``prepared``: processes for the hosts.

    Raises `UsageError` if namespaces were asked for and are not available.
    """
    model = links_of(topology)
    host_of = {role.peer: role.host for role in placement.roles}
    host_of |= {f"agent/{host.name}": host.name for host in topology.hosts}
    host_of[COORDINATOR] = topology.hosts[0].name  # where the simulation puts it, too
    factor = emulation.dilation.factor
    async with AsyncExitStack() as stack:
        _remove_leftovers()
        folder = stack.enter_context(_owned_folder())
        namespaces, why = await _namespaces(stack, model, emulation)
        kind: ShapingKind = "paced" if namespaces is None else "namespaces"
        conditions = _for_faults(stack, topology, folder, host_of) if topology.faults else None
        plan = plan_of(model, host_of, nics=namespaces is None).write(folder, None if conditions is None else folder / CONDITIONS)
        said = [f"emulated: {counted(len(placement.hosts), 'host')} on this machine, {_IN_WORDS[kind]}{why}"]
        if factor != 1:
            said.append(f"{factor:g} times slower than reported")
        if any(way.jitter or way.loss for way in (model.way, *model.ways.values())):
            said.append("jitter and loss are simulated only")
        yield (
            EmulatedEngine(kind, plan, emulation.dilation, namespaces, LocalEngine(prepared=prepared), conditions),
            "; ".join(said),
        )


class EmulatedHosts:
    """The file's hosts on this machine, behind a network like the file's. Implements `zmqtrain.launcher.engine.GatheringEngine`."""

    def __init__(self, emulation: Emulation, prepared: Prepared | None = None) -> None:
        """``prepared``: processes that wait to be needed."""
        self._emulation, self._prepared, self._stack = emulation, prepared, AsyncExitStack()
        self._engine: EmulatedEngine | None = None  # set by `gather`

    async def gather(self, gathering: Gathering) -> Gathered:
        """Make the network. Raises `UsageError` if namespaces were asked for and are not available."""
        topology = gathering.topology
        engine, said = await self._stack.enter_async_context(emulated(topology, place(topology), self._emulation, self._prepared))
        self._engine = engine
        return Gathered(
            topology,
            {},
            port=topology.job.port,
            shape=partial(engine.settings, COORDINATOR),
            told=engine.moved(topology),
            said=said,
            facts=engine.facts(),
        )

    async def open(self, run: EngineRun) -> None:
        assert self._engine is not None
        if run.agents:
            await self._stack.enter_async_context(self._engine.local.forking(run.script))

    def injection(
        self,
        faults: Sequence[Fault],
        placement: Placement,
        fleet: Fleet,
        assembly: Assembly,
        say: Callable[[str], None],
        ended: AgentEnded,
    ) -> Injection:
        """What carries out the faults of the run; `gather` has been called. ``ended``: see `EmulatedMachines`."""
        engine = self._engine
        assert engine is not None
        assert engine.conditions is not None, "there is no fault in the file"
        machines = EmulatedMachines(placement, engine.plan, engine.conditions, fleet, assembly, say, ended)
        return Injection(machines, faults, engine.plan, say)

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        assert self._engine is not None
        return await self._engine.start(host, command, environ)

    async def stop(self, handle: Handle, grace: float) -> None:
        assert self._engine is not None
        await self._engine.stop(handle, grace)

    async def close(self) -> None:
        """Remove the emulated network: namespaces, links and what was set up for them."""
        await self._stack.aclose()


def _for_faults(stack: AsyncExitStack, topology: Topology, folder: Path, host_of: Mapping[PeerId, str]) -> Conditions:
    """Make what faults need in the run's folder."""
    plan = folder / PLAN
    for fault in faults_of(topology):
        if fault.step is not None and not begins_at(plan, fault.trigger).exists():
            os.mkfifo(begins_at(plan, fault.trigger))
    for host in topology.hosts:
        os.mkfifo(orders_for(plan, host.name))
    conditions = Conditions.create(folder / CONDITIONS, host_of)
    stack.callback(conditions.close)
    return conditions


@contextmanager
def _owned_folder() -> Iterator[Path]:
    """A folder for the run, removed at its end. A lock shows that the run is alive, since a killed run cannot remove its folder."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as name:
        folder = Path(name)
        with (folder / "unlocked").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "unlocked").rename(folder / _ALIVE)  # it gets its name only after it is locked
            yield folder


def _remove_leftovers() -> None:
    """Remove the folders of runs that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_ALIVE}"):
        with suppress(OSError), path.open("r+") as file:  # locked, owned by another user, or gone by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent)


_IN_WORDS: dict[ShapingKind, str] = {"paced": "links paced by the endpoints", "namespaces": "links shaped in network namespaces"}


async def _namespaces(stack: AsyncExitStack, model: NetworkModel, emulation: Emulation) -> tuple[Namespaces | None, str]:
    """The hosts' namespaces, or the reason why there are none."""
    if emulation.shaping == "paced":
        return None, ""
    beyond = _beyond_namespaces(model)
    if beyond is not None:
        return None, f" (namespaces cannot shape {beyond})"
    factor = emulation.dilation.factor
    namespaces = Namespaces(
        {name: None if host.bandwidth is None else host.bandwidth / 8 / factor for name, host in model.hosts.items()}
    )
    stack.push_async_callback(namespaces.close)
    try:
        await namespaces.open()
    except NoNamespacesError as error:
        if emulation.shaping == "namespaces":
            raise UsageError(f"--shaping namespaces: {error}") from error
        await namespaces.close()
        return None, f" ({error})"
    return namespaces, ""


def _beyond_namespaces(model: NetworkModel) -> str | None:
    """The settings of the network that namespaces cannot shape, as words."""
    if model.racks:
        return "racks"
    if any(way.bandwidth is not None for way in model.ways.values()):
        return "the bandwidth of single links"
    return None


def plan_of(model: NetworkModel, host_of: Mapping[PeerId, str], *, nics: bool = True) -> ShapingPlan:
    """The network as endpoints shape it; without ``nics`` only latencies and links that are down."""
    rates: list[float] = []

    def nic(bandwidth: float | None) -> tuple[int, ...]:
        if bandwidth is None or not nics:
            return ()
        rates.append(bandwidth / 8)
        return (len(rates) - 1,)

    sends = {name: nic(host.bandwidth) for name, host in model.hosts.items()}
    gets = {name: nic(host.bandwidth) for name, host in model.hosts.items()}
    leaves = {name: nic(rack.uplink) for name, rack in model.racks.items()}
    enters = {name: nic(rack.uplink) for name, rack in model.racks.items()}
    alone = {ends: nic(way.bandwidth) for ends, way in model.ways.items()}
    ways: dict[tuple[str, str], LinkShape] = {}
    for source, one in model.hosts.items():
        for target, other in model.hosts.items():
            if source == target:
                continue
            way = model.between(source, target)
            up: tuple[int, ...] = ()
            down: tuple[int, ...] = ()
            if one.rack != other.rack:
                up, down = leaves.get(one.rack or "", ()), enters.get(other.rack or "", ())
            path = (*sends[source], *up, *alone.get((source, target), ()), *down, *gets[target])
            ways[source, target] = LinkShape(path, way.latency, way.down)
    return ShapingPlan(host_of, ways, rates)
