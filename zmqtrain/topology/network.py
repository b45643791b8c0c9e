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


#: A host of the file, or a range of them.
HostName = Annotated[str, AfterValidator(_name)]
HostNames = Annotated[tuple[HostName, ...], BeforeValidator(_tuple)]


class NetworkHost(Section):
    """What is different about one host, or a range of them."""

    name: HostName = Field(min_length=1, description="A host of the file, or a range of them.")
    bandwidth: Bandwidth | None = Field(default=None, description="Of its NIC, instead of `[network] bandwidth`.")
    latency: Latency | None = Field(default=None, description="Added to each message that it sends or gets, one way.")
    slowdown: float = Field(
        default=1.0, ge=0.001, le=1000, description="Modelled devices of this host take so many times as long for the same work."
    )


class Rack(Section):
    """Hosts that share an uplink."""

    name: str = Field(min_length=1, max_length=64, description="A name of your choice.")
    hosts: HostNames = Field(min_length=1, description="The hosts in it; ranges like `node[01-16]` may be among them.")
    uplink: Bandwidth = Field(
        description="Shared by all that leaves the rack, and the same by all that enters it. Less than the hosts' NICs together: "
        "the rack is oversubscribed."
    )
    latency: Latency = Field(default=0.0, description="Added to each message that leaves or enters the rack.")


class LinkRule(Section):
    """What is different about the way from some hosts to others. One way; of two rules for one way the later wins."""

    source: HostName = Field(alias="from", min_length=1, description="Where messages come from: a host, a range, or `*`.")
    target: HostName = Field(alias="to", min_length=1, description="Where they go to: a host, a range, or `*`.")
    latency: Latency | None = Field(default=None, description="Instead of `[network] latency`.")
    bandwidth: Bandwidth | None = Field(default=None, description="Of this way alone, shared by what goes over it.")
    jitter: Latency | None = Field(default=None, description="Instead of `[network] jitter`.")
    loss: float | None = Field(default=None, ge=0, le=0.5, description="Instead of `[network] loss`.")
    down: bool = Field(default=False, description="Nothing gets through.")


class Network(Section):
    """The network between hosts, in emulated and simulated worlds."""

    bandwidth: Bandwidth | None = Field(
        default=None, description="Of each host's NIC, in each direction at once. Left out: no limit."
    )
    latency: Latency | None = Field(default=None, description="One-way delay between two hosts. Left out: none.")
    jitter: Latency = Field(
        default=0.0, description="Mean of a further, exponentially distributed delay of each message. Simulation only."
    )
    loss: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Chance that a message breaks its connection; what is on the way is lost with it. Simulation only.",
    )
    reconnect: Latency = Field(default=0.05, description="How long a connection that broke stays down. Simulation only.")
    local_bandwidth: Bandwidth = Field(default=24e9, description="Between processes of one host. Simulation only.")
    local_latency: Latency = Field(default=50e-6, description="The same one way. Simulation only.")
    dilation: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="Emulation runs so many times as slowly, and divides all times that it reports: for clusters that this machine "
        "is too small for.",
    )
    hosts: Annotated[tuple[NetworkHost, ...], BeforeValidator(_tuple)] = Field(
        default=(), description="What is different about some hosts."
    )
    racks: Annotated[tuple[Rack, ...], BeforeValidator(_tuple)] = Field(default=(), description="Hosts that share an uplink.")
    links: Annotated[tuple[LinkRule, ...], BeforeValidator(_tuple)] = Field(
        default=(),
        description="What is different about the ways from some hosts to others. Each is one way; where two speak of the same way, "
        "the later wins.",
    )

    def slowdowns(self) -> dict[str, float]:
        """How many times as long modelled devices take, by host; hosts that are not named here take once as long."""
        return {name: rule.slowdown for rule in self.hosts for name in expand(rule.name)}


def names_in(text: str, hosts: Iterable[str]) -> tuple[str, ...]:
    """The hosts that a name, a range or ``*`` stands for; ``hosts`` are all of the file, in order."""
    return tuple(hosts) if text == ANY else expand(text)
