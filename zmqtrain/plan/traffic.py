"""What an exchange with model servers, and with an FC server, makes each host's NIC carry; and a bucket's way through it.

Bytes follow from the placement: nothing travels between processes of one host, whose workers add up in memory instead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from zmqtrain.collectives.choose import choose_reduce_scatter
from zmqtrain.collectives.schedule import Step, halving_reduce_scatter, ring_reduce_scatter
from zmqtrain.plan.link import Link
from zmqtrain.plan.overlapped import BucketWay
from zmqtrain.topology.placement import Placement

#: Elements of each rank's part where only shares matter.
_PARTS = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the exchange of one byte of parameters makes each host send and get on the way to the servers. As much comes back."""

    ring_out: defaultdict[str, float]
    ring_in: defaultdict[str, float]
    push_out: defaultdict[str, float]
    push_in: defaultdict[str, float]
    hops: int
    """Messages one after another within the group."""

    @classmethod
    def of(cls, placement: Placement, group: int, bucket_bytes: float) -> Traffic:
        """``bucket_bytes``: of a usual bucket, by which collectives are chosen."""
        ring_out, ring_in, push_out, push_in = (defaultdict[str, float](float) for _ in range(4))
        size = placement.group_size
        hosts = [placement.role(peer).host for peer in placement.group_members(group)]
        hops = 0
        for position, host in enumerate(hosts):
            steps = _reduce_scatter(size, position, bucket_bytes)
            hops = max(hops, len(steps))
            for step in steps:
                if step.to is not None and hosts[step.to] != host:
                    share = sum(stop - start for start, stop in step.out) / (size * _PARTS)
                    ring_out[host] += share
                    ring_in[hosts[step.to]] += share
            for server in placement.server_roles:
                if server.host != host:
                    push_out[host] += 1 / size / placement.servers
                    push_in[server.host] += 1 / size / placement.servers
        return cls(ring_out, ring_in, push_out, push_in, hops if ring_out else 0)

    def both_ways(self, host: str) -> tuple[float, float]:
        """Sent and got, there and back."""
        exchanged = self.push_out[host] + self.push_in[host]
        return 2 * self.ring_out[host] + exchanged, 2 * self.ring_in[host] + exchanged

    def way(self, link: Link, update_byte_s: float, piece_bytes: float) -> BucketWay:
        """A group's exchange, alone on the network. That a worker's NIC carries all of these limits throughput, not a bucket."""
        ring = max([*self.ring_out.values(), *self.ring_in.values()], default=0.0)
        push = max([*self.push_out.values(), *self.push_in.values()], default=0.0)
        latency_s = 2 * (1 + self.hops) * link.alpha_s
        return BucketWay(ring * link.byte_s, push * link.byte_s, update_byte_s, push * link.byte_s, latency_s, piece_bytes)


def _reduce_scatter(size: int, rank: int, nbytes: float) -> list[Step]:
    """What a rank does, of `_PARTS` elements for each."""
    make = ring_reduce_scatter if choose_reduce_scatter(int(nbytes), size) == "ring" else halving_reduce_scatter
    return make(size * _PARTS, size, rank) if size > 1 else []


def parameter_bytes(placement: Placement, nbytes: float, bucket_bytes: float) -> dict[str, float]:
    """What each host's NIC carries of ``nbytes`` of parameters in a round of all groups, in its busier direction."""
    each = [Traffic.of(placement, group, bucket_bytes) for group in range(placement.groups)]
    nics = {}
    for host in placement.hosts:
        ways = [traffic.both_ways(host) for traffic in each]
        nics[host] = max(sum(sent for sent, _ in ways), sum(got for _, got in ways)) * nbytes
    return nics


def activation_bytes(placement: Placement, group: int, nbytes: float) -> dict[str, float]:
    """What each host's NIC carries of a group's activations, ``nbytes``, on their way to the (first) FC server; as much comes
    back."""
    nics: defaultdict[str, float] = defaultdict(float)
    first = placement.fc_roles[0].host
    for peer in placement.group_members(group):
        host = placement.role(peer).host
        if host != first:
            nics[host] += nbytes / placement.group_size
            nics[first] += nbytes / placement.group_size
    return dict(nics)
