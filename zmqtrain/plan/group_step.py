"""What a compute group's step is like in this runtime: a model of `zmqtrain.plan.efficiency` made from a topology.

A group of k workers computes 1/k of the batch each, divides every bucket among its workers (reduce-scatter), and each exchanges its
part with the model servers; so servers see one model a group and step, where the paper's machines each send and get a whole one.
Buckets travel during the backward and the next forward (`zmqtrain.plan.overlapped`).

What all groups share are the servers' network cards and arithmetic, and a merged FC server; a group's own are its workers and their
hosts' cards. Bytes on cards follow from the placement: nothing travels between processes of one host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zmqtrain.collectives.choose import choose_reduce_scatter
from zmqtrain.collectives.schedule import Step, halving_reduce_scatter, ring_reduce_scatter
from zmqtrain.plan.efficiency import FC_SERVER, GroupStep, Station, divisors
from zmqtrain.plan.layers import LayerShape
from zmqtrain.plan.link import Link
from zmqtrain.plan.overlapped import BucketWay, LayerLoad, buckets_of, cycle_s
from zmqtrain.plan.regroup import regrouped
from zmqtrain.plan.setup import MEMORY_BYTE_S, link_of
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.schema import Topology

#: Layers in which every weight works on every sample many times: they belong to the convolution phase.
_SHARED_WEIGHTS = ("conv", "recurrent", "attention", "embedding")
#: A server's time for a byte of its parameters: gradient, momentum and value are read, the last two written.
UPDATE_BYTE_S = 5 * MEMORY_BYTE_S
#: Elements of each rank's part where only shares matter.
_PARTS = 1024


def split_of(layers: Sequence[LayerShape]) -> int:
    """Where the fully connected phase begins: the index of the first linear layer behind the last layer that shares its weights
    among positions (convolutions, recurrent layers, attention). As many as there are layers where nothing is left: no such phase.

    A profile knows no kinds: a layer with several positions counts as one that shares them.
    """
    last = max((index for index, each in enumerate(layers) if each.weights and _shares(each)), default=-1)
    following = (index for index in range(last + 1, len(layers)) if layers[index].weights and layers[index].kind == "linear")
    return next(following, len(layers))


def _shares(layer: LayerShape) -> bool:
    return layer.kind in _SHARED_WEIGHTS or (layer.kind == "linear" and len(layer.outputs) == 2 and layer.outputs[0] > 1)


def loads_of(layers: Sequence[LayerShape], *, flops_per_s: float, word_bytes: int) -> tuple[LayerLoad, ...]:
    """A sample's times as known, else by the arithmetic (the backward is twice the forward)."""
    loads = []
    for layer in layers:
        guess = layer.flops * layer.calls / flops_per_s if flops_per_s else 0.0
        forward_s = layer.forward_s or guess
        loads.append(LayerLoad(layer.name, layer.weights * word_bytes, forward_s, layer.backward_s or 2 * forward_s))
    return tuple(loads)


@dataclass(frozen=True, slots=True)
class MergedFc:
    """A server that computes all layers from ``split`` on, for all groups."""

    split: int
    fc_s: float
    """t_fc: its time for a group's batch."""
    activation_bytes: float = 0.0
    """Of a batch at the split: they travel there, and their gradient back."""


@dataclass(frozen=True, slots=True)
class OurRuntime:
    """Implements `zmqtrain.plan.efficiency.Model`."""

    topology: Topology
    """How its workers are grouped does not matter."""
    loads: tuple[LayerLoad, ...]
    link: Link
    update_byte_s: float = 0.0
    """A server's time for a byte of its parameters."""
    merged: MergedFc | None = None
    """None: workers compute all layers."""
    depth: int = 1

    @property
    def choices(self) -> Sequence[int]:
        """All numbers that divide the workers, and leave each of a group's workers a sample of every micro-batch."""
        compute = self.topology.compute
        return [each for each in divisors(compute.workers) if compute.workers // each * compute.accumulate <= compute.batch_size]

    def step(self, groups: int) -> GroupStep:
        topology = regrouped(self.topology, groups)
        placement, compute, merged = place(topology), topology.compute, self.merged
        part = compute.batch_size / compute.group_size
        loads = [each.scaled(part) for each in (self.loads if merged is None else self.loads[: merged.split])]
        nbytes = sum(each.nbytes for each in loads)
        buckets = buckets_of(loads, compute.bucket_bytes)
        usual = nbytes / max(1, len(buckets))
        cards = _cards(placement, nbytes, usual)
        way = _way(placement, self.link, self.update_byte_s / topology.servers, usual, topology.exchange.split_bytes)
        compute_s = sum(each.forward_s + each.backward_s for each in loads)
        path_s = cycle_s(loads, way, buckets, overlap=compute.overlap)
        serving = {role.host for role in placement.server_roles}
        stations = [
            Station("the workers' arithmetic", compute_s, shared=False),
            Station("the servers' network cards", max((cards[host] for host in serving), default=0.0) * self.link.byte_s / groups),
            Station("the servers' arithmetic", nbytes / topology.servers * self.update_byte_s),
        ]
        others = [cards[host] for host in placement.hosts if host not in serving]
        stations.append(Station("the workers' network cards", max(others, default=0.0) * self.link.byte_s, shared=False))
        if merged is not None:
            stations.append(Station(FC_SERVER, merged.fc_s))
            share = merged.activation_bytes / compute.group_size
            path_s += merged.fc_s + 2 * (share * self.link.byte_s + self.link.alpha_s)
        return GroupStep(groups, compute.group_size, path_s, tuple(each for each in stations if each.seconds > 0), self.depth)


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What the exchange of one byte of parameters makes each host send and get on the way to the servers. As much comes back."""

    ring_out: defaultdict[str, float]
    ring_in: defaultdict[str, float]
    push_out: defaultdict[str, float]
    push_in: defaultdict[str, float]

    @classmethod
    def of(cls, placement: Placement, group: int, bucket_bytes: float) -> _Traffic:
        """``bucket_bytes``: of a usual bucket, by which collectives are chosen."""
        traffic = cls(*(defaultdict(float) for _ in range(4)))
        size = placement.group_size
        hosts = [placement.role(peer).host for peer in placement.group_members(group)]
        for position, host in enumerate(hosts):
            for step in _reduce_scatter(size, position, bucket_bytes):
                if step.to is not None and hosts[step.to] != host:
                    share = sum(stop - start for start, stop in step.out) / (size * _PARTS)
                    traffic.ring_out[host] += share
                    traffic.ring_in[hosts[step.to]] += share
            for server in placement.server_roles:
                if server.host != host:
                    traffic.push_out[host] += 1 / size / placement.servers
                    traffic.push_in[server.host] += 1 / size / placement.servers
        return traffic

    def both_ways(self, host: str) -> tuple[float, float]:
        """Sent and got, there and back."""
        exchanged = self.push_out[host] + self.push_in[host]
        return 2 * self.ring_out[host] + exchanged, 2 * self.ring_in[host] + exchanged


def _reduce_scatter(size: int, rank: int, nbytes: float) -> list[Step]:
    """What a rank does, of `_PARTS` elements for each."""
    make = ring_reduce_scatter if choose_reduce_scatter(int(nbytes), size) == "ring" else halving_reduce_scatter
    return make(size * _PARTS, size, rank) if size > 1 else []


def _cards(placement: Placement, nbytes: float, bucket_bytes: float) -> dict[str, float]:
    """What each host's card carries in a round, in its busier direction."""
    each = [_Traffic.of(placement, group, bucket_bytes) for group in range(placement.groups)]
    cards = {}
    for host in placement.hosts:
        ways = [traffic.both_ways(host) for traffic in each]
        cards[host] = max(sum(sent for sent, _ in ways), sum(got for _, got in ways)) * nbytes
    return cards


def _way(placement: Placement, link: Link, update_byte_s: float, bucket_bytes: float, split_bytes: float) -> BucketWay:
    """A group's exchange, alone on the network."""
    traffic, size = _Traffic.of(placement, 0, bucket_bytes), placement.group_size
    ring = max([*traffic.ring_out.values(), *traffic.ring_in.values()], default=0.0)
    if ring:  # the same cards carry what goes to the servers and comes from there
        ring += max(traffic.push_out.values(), default=0.0) / 2
    push = max([*traffic.push_out.values(), *traffic.push_in.values()], default=0.0)
    hops = 2 + (2 * len(_reduce_scatter(size, 0, bucket_bytes)) if ring else 0)
    return BucketWay(
        ring * link.byte_s,
        push * link.byte_s,
        update_byte_s,
        push * link.byte_s,
        hops * link.alpha_s,
        piece_bytes=split_bytes * size,
    )


def variants(topology: Topology, layers: Sequence[LayerShape]) -> dict[str, OurRuntime]:
    """The runtime as the file has it, and with the fully connected phase on a server of its own (`merged`), also with two batches
    of each group under way (`pipelined`); the latter two only for models with such a phase.

    A merged server is taken to be as fast as a worker.
    """
    settings, compute = topology.plan, topology.compute
    loads = loads_of(layers, flops_per_s=settings.flops, word_bytes=settings.word_bytes)
    plain = OurRuntime(topology, loads, link_of(topology), UPDATE_BYTE_S)
    found = {"as it is": plain}
    split = split_of(layers)
    if 0 < split < len(layers):
        fc_s = sum(each.forward_s + each.backward_s for each in loads[split:]) * compute.batch_size
        nbytes = layers[split].numel_in * settings.word_bytes * compute.batch_size
        merged = replace(plain, merged=MergedFc(split, fc_s, nbytes))
        found |= {"merged": merged, "pipelined": replace(merged, depth=2)}
    return found
