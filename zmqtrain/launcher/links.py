"""The network between a file's hosts, measured: probes take turns, so that none is in another's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.probes import open_probes
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.measured import HostSpeed, LinkSpeed

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
    """Measure between the hosts of the file: emulated, or as its engine reaches them. ``token``: a secret that the probes share.

    ``say`` takes lines for the person. Raises `UsageError` where probes cannot be started from here or there is but one host (and
    `HostsError` where hosts lack what it takes), `ZmqTrainError` where a probe ends early.
    """
    names = [host.name for host in topology.hosts]
    if len(names) < 2:
        raise UsageError("--links measures between hosts, and the file has one: add [[hosts]]")
    async with open_probes(topology, emulation, token=token, say=say) as probes:
        # Each way, and each host's processor, one after another.
        links = [await probes.measure_way(*pair) for pair in pairs_of(names)]
        speeds = [await probes.measure_processor(host) for host in topology.hosts]
        await probes.end()
        return Links(tuple(speeds), tuple(links))
