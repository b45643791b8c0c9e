"""``[network]``: the network between hosts, as emulation shapes it and simulation models it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from zmqtrain.topology.ranges import count, expand
from zmqtrain.topology.section import Bandwidth, Latency, Section, _tuple

#: "Any host", in rules for links.
ANY = "*"


def _name(value: str) -> str:
    count(value)
    return value


#: A host of the file, or a range of hosts.
HostName = Annotated[str, AfterValidator(_name)]
HostNames = Annotated[tuple[HostName, ...], BeforeValidator(_tuple)]


class NetworkHost(Section):
    """Settings of one host, or a range of hosts, that differ from the rest."""

    name: HostName = Field(min_length=1, description="A host of the file, or a range of hosts.")
    bandwidth: Bandwidth | None = Field(default=None, description="Bandwidth of the host's NIC, instead of `[network] bandwidth`.")
    latency: Latency | None = Field(
        default=None, description="Additional one-way delay of each message that the host sends or receives."
    )
    slowdown: float = Field(
        default=1.0, ge=0.001, le=1000, description="Modelled devices of this host take this many times as long for the same work."
    )
    loading: Latency = Field(
        default=0.0,
        description="How long this host takes to load a batch for a modelled device; the next one is loaded during a step.",
    )


class Rack(Section):
    """Hosts that share an uplink."""

    name: str = Field(min_length=1, max_length=64, description="A name of your choice.")
    hosts: HostNames = Field(min_length=1, description="The hosts in the rack; may contain ranges such as `node[01-16]`.")
    uplink: Bandwidth = Field(
        description="Bandwidth shared by all traffic that leaves the rack, and as much again for all traffic that enters it. If "
        "it is less than the sum of the hosts' NICs, the rack is oversubscribed."
    )
    latency: Latency = Field(default=0.0, description="Additional delay of each message that leaves or enters the rack.")


class LinkRule(Section):
    """Settings of the link from some hosts to others. One way; if two rules apply to the same link, the later one wins."""

    source: HostName = Field(alias="from", min_length=1, description="Where messages come from: a host, a range, or `*`.")
    target: HostName = Field(alias="to", min_length=1, description="Where messages go: a host, a range, or `*`.")
    latency: Latency | None = Field(default=None, description="Latency of this link, instead of `[network] latency`.")
    bandwidth: Bandwidth | None = Field(default=None, description="Bandwidth of this link alone, shared by all its traffic.")
    jitter: Latency | None = Field(default=None, description="Jitter of this link, instead of `[network] jitter`.")
    loss: float | None = Field(default=None, ge=0, le=0.5, description="Loss of this link, instead of `[network] loss`.")
    down: bool = Field(default=False, description="No message gets through.")


class Network(Section):
    """The network between hosts, in emulated and simulated worlds."""

    bandwidth: Bandwidth | None = Field(
        default=None, description="Bandwidth of each host's NIC, in each direction. Default: unlimited."
    )
    latency: Latency | None = Field(default=None, description="One-way delay between two hosts. Default: none.")
    jitter: Latency = Field(
        default=0.0, description="Mean of an additional, exponentially distributed delay of each message. Simulation only."
    )
    loss: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Probability that a message breaks its connection; whatever is in flight on it is lost as well. Simulation "
        "only.",
    )
    reconnect: Latency = Field(default=0.05, description="How long a broken connection stays down. Simulation only.")
    local_bandwidth: Bandwidth = Field(default=24e9, description="Bandwidth between processes of one host. Simulation only.")
    local_latency: Latency = Field(default=50e-6, description="One-way delay between processes of one host. Simulation only.")
    dilation: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="Emulation runs this many times more slowly, and all reported times are divided by it: for clusters that are "
        "too large for this machine.",
    )
    hosts: Annotated[tuple[NetworkHost, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="Hosts that differ from the rest."
    )
    racks: Annotated[tuple[Rack, ...], BeforeValidator(_tuple)] = Field(default=(), description="Hosts that share an uplink.")
    links: Annotated[tuple[LinkRule, ...], BeforeValidator(_tuple)] = Field(
        default=(),
        description="Links that differ from the rest. Each is one way; if two rules apply to the same link, the later one wins.",
    )

    def slowdowns(self) -> dict[str, float]:
        """How many times as long modelled devices take, by host; for hosts that are not named here, the factor is 1."""
        return {name: rule.slowdown for rule in self.hosts for name in expand(rule.name)}

    def loading(self) -> dict[str, float]:
        """The seconds in which modelled workers' batches are loaded, by host; no time on hosts that are not named here."""
        return {name: rule.loading for rule in self.hosts for name in expand(rule.name)}


def names_in(text: str, hosts: Iterable[str]) -> tuple[str, ...]:
    """The hosts that a name, a range or ``*`` stands for; ``hosts``: all hosts of the file, in order."""
    return tuple(hosts) if text == ANY else expand(text)
