"""A compute group's step in this runtime: a model of `zmqtrain.plan.efficiency`, made from a topology.

A group of k workers computes 1/k of the batch on each, and divides every bucket among its workers (reduce-scatter), of which each
exchanges its part with the model servers. So servers exchange one model per group and step, where each of the paper's machines
sends and receives a whole one. Buckets are sent during backward and the next forward (`zmqtrain.plan.overlapped`). Workers of one
host sum in its memory.

All groups share the servers' NICs and arithmetic, and a merged FC server; a group has its own workers and their hosts' NICs
(`zmqtrain.plan.traffic`). With hosts of different speeds a group is as slow as its slowest worker or, if parts of the batch follow
the speeds, as fast as all of them together. Varying times cost a little more (`zmqtrain.plan.variation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from zmqtrain.errors import UsageError
from zmqtrain.plan.cluster import worker_speeds
from zmqtrain.plan.contention import Fc, GroupWork, Shared, update_s
from zmqtrain.plan.efficiency import FC_SERVER, GroupStep, Station, divisors
from zmqtrain.plan.fc_turn import FcTurn, MergedFc
from zmqtrain.plan.layers import LayerShape
from zmqtrain.plan.link import Link
from zmqtrain.plan.overlapped import LayerLoad, buckets_of, cycle_s
from zmqtrain.plan.regroup import regrouped, without_pipeline
from zmqtrain.plan.setup import link_of, part_of
from zmqtrain.plan.traffic import Traffic, activation_bytes, parameter_bytes
from zmqtrain.plan.two_phases import Growth, Lasts, in_proportion, split_of
from zmqtrain.plan.variation import Variation, wait_s
from zmqtrain.topology.bucket_limit import BucketLimit, PieceLimit
from zmqtrain.topology.links import MEMORY_BYTE_S
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.schema import Topology

#: Seconds of a server per byte of its parameters: gradient, momentum and value are read, the last two are also written.
UPDATE_BYTE_S = 5 * MEMORY_BYTE_S
#: With more groups than this, only the limiting station counts.
MOST_GROUPS = 16
#: The name of the variant that the file describes.
AS_IT_IS = "as it is"


def loads_of(layers: Sequence[LayerShape], *, flops_per_s: float, word_bytes: int) -> tuple[LayerLoad, ...]:
    """Layers with a sample's times: the known ones, or else estimated from their arithmetic (the backward takes twice the
    forward)."""
    loads = []
    for layer in layers:
        guess = layer.flops * layer.calls / flops_per_s if flops_per_s else 0.0
        forward_s = layer.forward_s or guess
        loads.append(LayerLoad(layer.name, layer.weights * word_bytes, forward_s, layer.backward_s or 2 * forward_s))
    return tuple(loads)


@dataclass(frozen=True)
class OurRuntime:
    """Implements `zmqtrain.plan.efficiency.Model`."""

    topology: Topology
    """The job; its division of workers into groups is ignored."""
    loads: tuple[LayerLoad, ...]
    link: Link
    update_byte_s: float = 0.0
    """Seconds of a server per byte of its parameters."""
    merged: MergedFc | None = None
    """None: workers compute all layers."""
    depth: int = 1
    """The number of batches that each group has in progress."""
    lasts: Lasts = in_proportion
    """Maps a number of samples to the factor on a sample's times: t_conv(k) is that of 1/k of the batch."""
    variation: Variation = field(default_factory=Variation)

    @cached_property
    def choices(self) -> Sequence[int]:
        """All numbers of groups that divide the workers and leave each worker at least one sample of every micro-batch."""
        compute = self.topology.compute
        return [each for each in divisors(compute.workers) if compute.workers // each * compute.accumulate <= compute.batch_size]

    def step(self, groups: int) -> GroupStep:
        topology = regrouped(self.topology, groups, merged=self.merged is not None)
        placement, compute, merged = place(topology), topology.compute, self.merged
        loads = self.loads if merged is None else self.loads[: merged.split]
        nbytes = sum(each.nbytes for each in loads)
        buckets = buckets_of(loads, BucketLimit.of(topology).bytes_of(nbytes))
        usual = nbytes / max(1, len(buckets))
        piece_bytes = PieceLimit.of(topology).of_model(nbytes)[0] * compute.group_size
        way = Traffic.of(placement, 0, usual).way(self.link, self.update_byte_s / topology.servers, piece_bytes)
        turn = None if merged is None else FcTurn.of(merged, placement, self.link)
        fc = None if merged is None or turn is None else self._fc(merged, turn, placement)
        each_s = self.lasts(compute.batch_size / compute.group_size)
        slownesses = _slownesses(topology, placement)
        works = [
            GroupWork([each.scaled(each_s * slowness) for each in loads], buckets, way, fc, compute.overlap)
            for slowness in slownesses
        ]
        longest = self.variation.slowest_of(compute.group_size)
        compute_s = _together([longest * sum(each.forward_s + each.backward_s for each in work.loads) for work in works])
        path_s = _together(_paths(works, longest))
        exposed_s = path_s - compute_s - (0.0 if turn is None else turn.compute_s)
        nics = parameter_bytes(placement, nbytes, usual)
        serving = {role.host for role in placement.server_roles}
        shared = Shared(max(nics[host] for host in serving) * self.link.byte_s / groups / nbytes if nbytes else 0.0)
        if merged is not None and turn is not None:
            shared = self._with_fc(shared, placement, nics, merged.activation_bytes, turn)
            serving |= {role.host for role in placement.fc_roles}
        others = max((nics[host] for host in placement.hosts if host not in serving), default=0.0)
        stations = [
            Station("the workers' arithmetic", compute_s, shared=False),
            Station("the servers' NICs", max((nics[host] for host in serving), default=0.0) * self.link.byte_s / groups),
            Station("the servers' arithmetic", nbytes / topology.servers * self.update_byte_s),
            Station("the workers' NICs", others * self.link.byte_s, shared=False),
        ]
        if turn is not None:
            stations.append(Station(FC_SERVER, turn.whole_s(self.link)))
        stations = [each for each in stations if each.seconds > 0]
        found = GroupStep(groups, compute.group_size, path_s, tuple(stations), self.depth, compute_s=compute_s, exposed_s=exposed_s)
        return replace(found, wait_s=self._wait_s(found, works, shared))

    def _fc(self, merged: MergedFc, turn: FcTurn, placement: Placement) -> Fc:
        """A group's work on the FC server, and the way there."""
        each = activation_bytes(placement, 0, merged.activation_bytes)
        busiest = max(each.values(), default=0.0) / merged.activation_bytes if merged.activation_bytes else 0.0
        byte_s = self.link.byte_s
        return Fc(
            turn.compute_s + turn.latency_s,
            merged.activation_bytes,
            busiest * byte_s,
            self.link.alpha_s,
            tell_s=turn.tell_bytes * byte_s,
            exchange_s=turn.exchange_bytes * byte_s,
            update_s=turn.update_s,
        )

    def _with_fc(self, shared: Shared, placement: Placement, nics: dict[str, float], nbytes: float, turn: FcTurn) -> Shared:
        """Add the activations on the NICs to ``nics``, and to the shared resources."""
        first, there = placement.fc_roles[0].host, {role.host for role in placement.fc_roles}
        busiest = 0.0
        for group in range(placement.groups):
            carried = activation_bytes(placement, group, nbytes)
            for host, part in carried.items():
                nics[host] += part
            for host, part in turn.nics:
                nics[host] += part
            busiest = max(busiest, carried.get(first, 0.0))
        one_nic = bool(there & {role.host for role in placement.server_roles})
        return replace(shared, fc_nic_byte_s=busiest * self.link.byte_s / nbytes if nbytes else 0.0, one_nic=one_nic)

    def _wait_s(self, step: GroupStep, works: Sequence[GroupWork], shared: Shared) -> float:
        """The average time that waiting for others adds to the path."""
        if step.groups == 1 and step.depth == 1:
            return 0.0
        if step.under_way > MOST_GROUPS:
            shared_s = [each.seconds for each in step.stations if each.shared] if self.variation.varies else []
            return wait_s(step.path_s, step.under_way, shared_s)
        apart_s = update_s(works, shared, lambda chance: self.variation.draw(chance, step.group_size), step.depth)
        return max(0.0, apart_s * step.under_way - step.path_s)


def _paths(works: Sequence[GroupWork], longest: float) -> list[float]:
    """The path's length for each group, if no other group is in the way."""
    known: dict[float, float] = {}
    for work in works:
        compute_s = sum(each.forward_s + each.backward_s for each in work.loads)
        if compute_s not in known:
            loads = [each.scaled(longest) for each in work.loads]
            known[compute_s] = cycle_s(loads, work.way, work.buckets, overlap=work.overlap) + (
                0.0 if work.fc is None else work.fc.path_s
            )
    return [known[sum(each.forward_s + each.backward_s for each in work.loads)] for work in works]


def _slownesses(topology: Topology, placement: Placement) -> list[float]:
    """How long each group's part of a step takes, relative to even parts on hosts as fast as the profile's."""
    compute, speeds = topology.compute, worker_speeds(topology, placement)
    found = []
    for group in range(placement.groups):
        mine = [speeds[placement.role(peer).host] for peer in placement.group_members(group)]
        if compute.parts == "measured":
            found.append(len(mine) / sum(mine))
        elif isinstance(compute.parts, tuple):
            weights = compute.parts if len(compute.parts) == len(mine) else compute.parts[group * len(mine) :][: len(mine)]
            found.append(max(weight * len(mine) / sum(weights) / speed for weight, speed in zip(weights, mine, strict=True)))
        else:
            found.append(1 / min(mine))
    return found


def _together(seconds: Sequence[float]) -> float:
    """The average step time if all groups make as many steps together as these."""
    return len(seconds) / sum(1 / each for each in seconds) if min(seconds) > 0 else 0.0


def variants(topology: Topology, layers: Sequence[LayerShape]) -> dict[str, OurRuntime]:
    """The runtime as the file describes it, and its alternatives: with the fully connected phase on a separate server (`merged`),
    also with two batches of each group in progress (`pipelined`), or without such a server (`unmerged`); the former two only for
    models with such a phase.

    A merged server, or each of several that divide its layers, is assumed to be as fast as a worker. Groups that take turns on the
    same slots (`[compute] pipeline`) count as one group with several batches in progress. Raises `UsageError` if the profile cannot
    be used, or for model servers that keep copies, whose traffic this model lacks.
    """
    if topology.replicated:
        raise UsageError("what replicas cost is not predicted: remove [exchange] replicas to plan or tune the groups")
    depth, topology = topology.compute.pipeline, without_pipeline(topology)
    settings, compute = topology.plan, topology.compute
    loads = loads_of(layers, flops_per_s=settings.flops, word_bytes=settings.word_bytes)
    growth = Growth.of(topology, part_of(topology))
    varies = Variation.of_noise(compute.noise) if compute.device == "modelled" else Variation()
    plain = OurRuntime(topology, loads, link_of(topology), UPDATE_BYTE_S, lasts=growth.whole, variation=varies)
    found = {"unmerged": plain}
    split = split_of(layers, topology.exchange.split)
    if 0 < split < len(layers):
        fc_s = sum(each.forward_s + each.backward_s for each in loads[split:]) * growth.fc(compute.batch_size)
        sample_bytes = settings.word_bytes * compute.batch_size
        between = tuple(
            prod(layers[place - 1].outputs) * sample_bytes for place in range(split + 1, len(layers)) if layers[place].weights
        )
        fc = MergedFc(split, fc_s, layers[split].numel_in * sample_bytes, between, growth.fc_update_s)
        merged = replace(plain, merged=fc, lasts=growth.conv)
        found |= {"merged": merged, "pipelined": replace(merged, depth=max(2, depth))}
    mine = "unmerged"
    if topology.fc_servers and "merged" in found:
        mine = "merged" if depth == 1 else "pipelined"
    return {AS_IT_IS: found[mine]} | {name: model for name, model in found.items() if name != mine}
