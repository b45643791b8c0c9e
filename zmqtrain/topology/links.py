"""The network's figures as the topology file gives them, and what follows for the link from one host to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zmqtrain.topology.network import names_in
from zmqtrain.topology.ranges import expand
from zmqtrain.topology.schema import Topology

#: Seconds to read or write a byte of a host's memory: sums of 100 MB in shared memory were measured at 20 GB/s for all of the
#: host's processes together. The planner and the simulation both go by it.
MEMORY_BYTE_S = 1 / 20e9


@dataclass(frozen=True, slots=True)
class HostLink:
    """A host's connection to the network."""

    bandwidth: float | None
    """bit/s, in each direction; ``None``: no limit."""
    latency: float = 0.0
    """s, added to every message that it sends or receives."""
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class RackLink:
    """A rack's connection to the others."""

    uplink: float
    """bit/s, in each direction."""
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """The link from one host to another, one way."""

    latency: float
    """s"""
    jitter: float = 0.0
    """s, the mean of what is added."""
    loss: float = 0.0
    bandwidth: float | None = None
    """bit/s of this link alone; the NICs at its ends limit it as well."""
    down: bool = False


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """The whole network. Hosts that are not named have ``bandwidth`` and no rack."""

    bandwidth: float | None = None
    way: Way = Way(0.0)
    """The figures of links that are not in ``ways``."""
    reconnect: float = 0.05
    local_bandwidth: float | None = None
    local_latency: float = 0.0
    hosts: Mapping[str, HostLink] = field(default_factory=dict)
    racks: Mapping[str, RackLink] = field(default_factory=dict)
    ways: Mapping[tuple[str, str], Way] = field(default_factory=dict)

    def host(self, name: str) -> HostLink:
        """The connection of the host ``name``."""
        return self.hosts.get(name) or HostLink(self.bandwidth)

    def between(self, source: str, target: str) -> Way:
        """The link from ``source`` to ``target``, with the latencies of both hosts and racks added up."""
        if source == target:
            return Way(self.local_latency)
        way = self.ways.get((source, target), self.way)
        one, other = self.host(source), self.host(target)
        latency = way.latency + one.latency + other.latency
        if one.rack != other.rack:
            latency += sum(self.racks[rack].latency for rack in (one.rack, other.rack) if rack is not None)
        return Way(latency, way.jitter, way.loss, way.bandwidth, way.down)


def links_of(topology: Topology) -> NetworkModel:
    """The model that ``[network]`` describes."""
    network = topology.network
    names = [host.name for host in topology.hosts]
    rack_of = {name: rack.name for rack in network.racks for text in rack.hosts for name in expand(text)}
    hosts = {name: HostLink(network.bandwidth, 0.0, rack_of.get(name)) for name in names}
    for special in network.hosts:
        for name in expand(special.name):
            bandwidth = network.bandwidth if special.bandwidth is None else special.bandwidth
            hosts[name] = HostLink(bandwidth, special.latency or 0.0, rack_of.get(name))
    usual = Way(network.latency or 0.0, network.jitter, network.loss)
    ways: dict[tuple[str, str], Way] = {}
    for rule in network.links:
        for source in names_in(rule.source, names):
            for target in names_in(rule.target, names):
                before = ways.get((source, target), usual)
                ways[source, target] = Way(
                    before.latency if rule.latency is None else rule.latency,
                    before.jitter if rule.jitter is None else rule.jitter,
                    before.loss if rule.loss is None else rule.loss,
                    before.bandwidth if rule.bandwidth is None else rule.bandwidth,
                    rule.down,
                )
    return NetworkModel(
        bandwidth=network.bandwidth,
        way=usual,
        reconnect=network.reconnect,
        local_bandwidth=network.local_bandwidth,
        local_latency=network.local_latency,
        hosts=hosts,
        racks={rack.name: RackLink(rack.uplink, rack.latency) for rack in network.racks},
        ways=ways,
    )
