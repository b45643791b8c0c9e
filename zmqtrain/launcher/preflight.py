"""What `zmqtrain check` finds out about the hosts of a file: what they have, which hosts they reach, how fast, and their clocks.

Any host on which an engine can start processes can be checked. Hosts that cannot take part are left out, with the reason, and the
others are checked nevertheless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zmqtrain.errors import HostFault, HostLostError, HostsError, ProtocolError, SshError, ZmqTrainError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.links import pairs_of
from zmqtrain.launcher.probes import Probes, open_probes, probe_of
from zmqtrain.topology.schema import Host, Topology
from zmqtrain.world import wall_s

#: How often a host is asked for the time; the fastest answer is used.
CLOCK_TRIES = 9
#: Seconds that one host may take to connect to another.
REACH_S = 10.0
#: Each host tries to reach all others, or of many hosts the next ones in the file, up to this number.
MOST_TRIED = 32


@dataclass(frozen=True, slots=True)
class HostReport:
    """The facts about one host."""

    name: str
    facts: Mapping[str, Any]
    """What `zmqtrain.launcher.host_facts.facts_here` returns, and the address of the host's probe (``endpoint``)."""
    clock_offset_s: float
    """Seconds by which its clock is ahead of the one here."""
    clock_error_s: float
    """The uncertainty of the offset in seconds: half of a round trip."""


@dataclass(frozen=True, slots=True)
class WayReport:
    """The link from one host to another."""

    source: str
    target: str
    why: str = ""
    """What is wrong with the link; empty: nothing."""
    bandwidth: float | None = None
    """Bits per second; ``None``: not measured."""
    round_trip_s: float | None = None

    def row(self) -> dict[str, Any]:
        """The row for a JSON line."""
        return {"row": "way", **asdict(self), "ok": not self.why}


@dataclass(slots=True)
class PreflightReport:
    """The report on all hosts."""

    hosts: list[HostReport] = field(default_factory=list)
    ways: list[WayReport] = field(default_factory=list)
    faults: list[HostFault] = field(default_factory=list)
    """Faults that keep hosts from taking part, or from being checked."""
    encrypted: bool = False
    """Whether the hosts exchanged keys."""


async def inspect_hosts(
    topology: Topology,
    emulation: Emulation | None = None,
    *,
    token: str,
    packages: Sequence[str] = (),
    paths: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> PreflightReport:
    """Check all hosts of the file.

    ``token``: a secret that the probes share; ``packages``: packages whose versions to ask for; ``paths``: paths that must exist.
    Raises `UsageError` if the engine cannot be used here at all."""
    look = PreflightReport(encrypted=topology.encrypted(emulated=emulation is not None))
    left = list(topology.hosts)
    while left:
        here = topology.model_copy(update={"hosts": tuple(left)})
        try:
            async with open_probes(here, emulation, token=token, say=say, with_files=True) as probes:
                await _ask_all(probes, here, (packages, paths), look)
            break
        except (HostsError, HostLostError, SshError) as error:
            found = _faults_of(error)
            look.faults += found
            faulty = {fault.host for fault in found}
            if not faulty & {host.name for host in left}:
                break
            left = [host for host in left if host.name not in faulty]
        except ZmqTrainError as error:
            look.faults.append(HostFault("", str(error), "see the message"))
            break
    return look


def _faults_of(error: HostsError | HostLostError | SshError) -> list[HostFault]:
    if isinstance(error, SshError):
        return [HostFault(error.host, error.reason, error.remedy, passing=not error.lasting)]
    return list(error.faults) or [HostFault("", str(error), "see the message")]


async def _ask_all(probes: Probes, topology: Topology, about: tuple[Sequence[str], Sequence[str]], look: PreflightReport) -> None:
    names = [host.name for host in topology.hosts]
    addresses = list(dict.fromkeys(host.address for host in topology.hosts))
    async with asyncio.TaskGroup() as group:
        looks = [group.create_task(_look(probes, host, addresses, *about), name=f"look at {host.name}") for host in topology.hosts]
        reached = [group.create_task(_reach(probes, name, names), name=f"ways of {name}") for name in names]
    look.hosts += [task.result() for task in looks]
    tried = {(way.source, way.target): way for task in reached for way in task.result()}
    # One after another, so that they do not disturb each other. Of many links only some are measured; the others were tried.
    for source, target in pairs_of(names):
        way = tried.get((source, target)) or WayReport(source, target)
        if not way.why:
            try:
                speed = await probes.measure_way(source, target)
                way = WayReport(source, target, "", speed.bandwidth, 2 * speed.latency_s)
            except ZmqTrainError as error:
                way = WayReport(source, target, str(error))
        tried[source, target] = way
    look.ways += tried.values()
    await probes.end()


async def _look(probes: Probes, host: Host, addresses: Sequence[str], packages: Sequence[str], paths: Sequence[str]) -> HostReport:
    facts = await probes.ask(host.name, "look", list(addresses), list(packages), list(paths))
    if not isinstance(facts, dict):
        raise ProtocolError(f"the probe of {host.name} returned {facts!r:.60} about its host")
    clock = asyncio.get_running_loop().time
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_TRIES):
        before, sent = wall_s(), clock()
        there = await probes.ask(host.name, "clock")
        took = clock() - sent
        if not isinstance(there, float):
            raise ProtocolError(f"the probe of {host.name} returned {there!r:.40} as the time of day")
        best = min(best, (took, there - (before + took / 2)))
    return HostReport(host.name, {"endpoint": probes.address_of(host.name), **facts}, best[1], best[0] / 2)


async def _reach(probes: Probes, name: str, names: list[str]) -> list[WayReport]:
    place = names.index(name)
    others = (names[place + 1 :] + names[:place])[:MOST_TRIED]
    if not others:
        return []
    failed = await probes.ask(name, "reach", [probe_of(other) for other in others], REACH_S)
    if not isinstance(failed, dict):
        raise ProtocolError(f"the probe of {name} returned {failed!r:.60} about its links")
    return [WayReport(name, other, str(failed.get(probe_of(other), ""))) for other in others]
