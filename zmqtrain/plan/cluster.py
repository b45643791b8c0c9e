"""The measured cluster: what `zmqtrain profile --links` has written into the job's profile about the file's hosts."""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.errors import UsageError
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.measured import Measured
from zmqtrain.train.device.profile import Profile


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The slowest connection between any two hosts, which determines how long collectives take."""

    bandwidth: float
    """bit/s"""
    latency_s: float
    """Seconds for a small message, one way, including the endpoints' work."""


def measured_link(topology: Topology) -> MeasuredLink | None:
    """The slowest link between the file's hosts; ``None`` if the profile does not have all of them."""
    names = {host.name for host in topology.hosts}
    links = [each for each in _measured(topology).links if each.source in names and each.target in names]
    if len(names) < 2 or {each.source for each in links} != names:
        return None
    return MeasuredLink(min(each.bandwidth for each in links), max(each.latency_s for each in links))


def worker_speeds(topology: Topology, placement: Placement) -> dict[str, float]:
    """How fast a worker on each host computes, relative to the processor on which the profile was measured.

    From the hosts' measured speed in matrix products, if all were measured; for modelled devices also from ``[network] hosts``.
    """
    measured = _measured(topology)
    flops = {each.name: each.flops for each in measured.hosts}
    known = measured.peak_flops > 0 and all(host.name in flops for host in topology.hosts)
    slowed = topology.network.slowdowns() if topology.compute.device == "modelled" else {}
    found = {}
    for host in topology.hosts:
        threads = max((role.threads for role in placement.of_host(host.name) if role.kind == "worker"), default=1)
        speed = flops[host.name] * min(1.0, threads / host.slots) / measured.peak_flops if known else 1.0
        found[host.name] = speed / slowed.get(host.name, 1.0)
    return found


def _measured(topology: Topology) -> Measured:
    name = topology.compute.profile
    if name is None:
        return Measured()
    try:
        return Profile.load(name).known()
    except UsageError:
        return Measured()  # the error is reported where the layers' times are needed
