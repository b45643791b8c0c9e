"""What an exchange with model servers and an FC server puts on each host's NIC, and a bucket's path through it.

Bytes follow from the placement: nothing is sent between processes of one host, whose workers sum in memory instead.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from zmqtrain.collectives.choose import choose_reduce_scatter
from zmqtrain.collectives.schedule import Step, halving_reduce_scatter, ring_reduce_scatter
from zmqtrain.plan.link import Link
from zmqtrain.plan.overlapped import BucketWay
from zmqtrain.topology.placement import Placement

#: The number of elements in each rank's part, where only proportions matter.
_PARTS = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """What exchanging one byte of parameters makes each host send and receive on the way to the servers. The same amount comes
    back."""

    ring_out: defaultdict[str, float]
    ring_in: defaultdict[str, float]
    push_out: defaultdict[str, float]
    push_in: defaultdict[str, float]
    hops: int
    """The number of successive messages within the group."""

    @classmethod
    def of(cls, placement: Placement, group: int, bucket_bytes: float) -> Traffic:
        """``bucket_bytes``: the size of a typical bucket, by which collectives are chosen."""
        ring_out, ring_in, push_out, push_in = (defaultdict[str, float](float) for _ in range(4))
        size = placement.group_size
        hosts = [placement.role(peer).host for peer in placement.group_members(group)]
        hops = 0
        for position, host in enumerate(hosts):
            steps = _reduce_scatter(size, position, choose_reduce_scatter(int(bucket_bytes), size) == "ring")
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

    def way(self, link: Link, update_byte_s: float, piece_bytes: float) -> BucketWay:
        """A group's exchange, alone on the network. That a worker's NIC carries all of this limits throughput, not a single
        bucket."""
        ring = max([*self.ring_out.values(), *self.ring_in.values()], default=0.0)
        push = max([*self.push_out.values(), *self.push_in.values()], default=0.0)
        latency_s = 2 * (1 + self.hops) * link.alpha_s
        return BucketWay(ring * link.byte_s, push * link.byte_s, update_byte_s, push * link.byte_s, latency_s, piece_bytes)


@lru_cache(maxsize=4096)
def _reduce_scatter(size: int, rank: int, ring: bool) -> tuple[Step, ...]:
    """What a rank does, with `_PARTS` elements for each rank: the same in all groups."""
    make = ring_reduce_scatter if ring else halving_reduce_scatter
    return tuple(make(size * _PARTS, size, rank)) if size > 1 else ()


def parameter_bytes(placement: Placement, nbytes: float, bucket_bytes: float) -> dict[str, float]:
    """What each host's NIC carries of ``nbytes`` of parameters in a round of all groups, in its busier direction."""
    sent, got = defaultdict[str, float](float), defaultdict[str, float](float)
    for group in range(placement.groups):
        traffic = Traffic.of(placement, group, bucket_bytes)  # few of many hosts have a part in it
        for ring, total in ((traffic.ring_out, sent), (traffic.ring_in, got)):
            for host, share in ring.items():
                total[host] += 2 * share
        for push in (traffic.push_out, traffic.push_in):  # what was sent comes back
            for host, share in push.items():
                sent[host] += share
                got[host] += share
    return {host: max(sent[host], got[host]) * nbytes for host in placement.hosts}


def activation_bytes(placement: Placement, group: int, nbytes: float) -> dict[str, float]:
    """What each host's NIC carries of a group's activations, ``nbytes``, on their way to the (first) FC server; the same amount
    comes back."""
    nics: defaultdict[str, float] = defaultdict(float)
    first = placement.fc_roles[0].host
    for peer in placement.group_members(group):
        host = placement.role(peer).host
        if host != first:
            nics[host] += nbytes / placement.group_size
            nics[first] += nbytes / placement.group_size
    return dict(nics)
