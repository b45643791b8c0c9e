"""Measure the network between a file's hosts: probes take turns, so that they do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.probes import open_probes
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.measured import HostSpeed, LinkSpeed

#: Up to this many hosts, all links are measured; with more, those between neighbours, and between the first host and each other
#: one.
ALL_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Links:
    """The measured links and hosts."""

    hosts: tuple[HostSpeed, ...]
    links: tuple[LinkSpeed, ...]

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows for JSON lines."""
        yield from ({"row": "host", **asdict(host)} for host in self.hosts)
        yield from ({"row": "link", **asdict(link)} for link in self.links)


def pairs_of(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of hosts between which the network is measured, in both directions."""
    count = len(hosts)
    if count <= ALL_PAIRS:
        return [(one, other) for one in hosts for other in hosts if one != other]
    near = [(hosts[place], hosts[(place + 1) % count]) for place in range(count)]
    ends = [*near, *((hosts[0], other) for other in hosts[2:-1])]
    return [pair for one, other in ends for pair in ((one, other), (other, one))]


async def measure_links(
    topology: Topology, emulation: Emulation | None, *, token: str, say: Callable[[str], None] = lambda text: None
) -> Links:
    """Measure between the hosts of the file: emulated, or as its engine reaches them. ``token``: a secret that the probes share.

    ``say`` prints lines for the user. Raises `UsageError` if probes cannot be started from here or if there is only one host,
    `HostsError` if hosts lack something that is needed, and `ZmqTrainError` if a probe ends early.
    """
    names = [host.name for host in topology.hosts]
    if len(names) < 2:
        raise UsageError("--links measures between hosts, but the file has only one: add [[hosts]]")
    async with open_probes(topology, emulation, token=token, say=say) as probes:
        # The links, and the hosts' processors, one after another.
        links = [await probes.measure_way(*pair) for pair in pairs_of(names)]
        speeds = [await probes.measure_processor(host) for host in topology.hosts]
        await probes.end()
        return Links(tuple(speeds), tuple(links))
