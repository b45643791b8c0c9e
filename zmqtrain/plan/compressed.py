"""What each way to compress gradients would make of a step's exchange between hosts, and which one pays.

Bytes are those of the host whose NIC carries most, in its busier direction. Which way pays depends on how many more steps it
needs to the same loss, which no plan can know: `Way.steps` is what two small models needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zmqtrain.plan.group_step import loads_of
from zmqtrain.plan.layers import LayerShape
from zmqtrain.plan.setup import link_of, part_of
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.rounded import rounded_time
from zmqtrain.topology.schema import Topology
from zmqtrain.wire.compress import Matrix

#: Bytes of a float32.
WORD = 4


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compress, as measured by ``python -m benchmarks compression``."""

    name: str
    element_s: float
    """Seconds of one core to encode and decode an element."""
    steps: float
    """How many times as many steps it needs to the same loss: the mean of CIFARNet and a small transformer."""


#: Rank 4 and a ratio of 1 %, unless the file says otherwise. fp16 was not trained: it loses less than int8.
WAYS = (
    Way("none", 0.0, 1.0),
    Way("fp16", 1e-9, 1.0),
    Way("int8", 3e-9, 1.1),
    Way("powersgd", 30e-9, 1.6),
    Way("topk", 15e-9, 4.8),
)


@dataclass(frozen=True, slots=True)
class Compressed:
    """A step's exchange with one way to compress."""

    way: Way
    nbytes: float
    network_s: float
    arithmetic_s: float
    compute_s: float

    @property
    def step_s(self) -> float:
        """The shortest time of a step: what the network does is hidden by what the worker computes, or the other way round."""
        return max(self.compute_s, self.network_s + self.arithmetic_s)

    @property
    def worth_s(self) -> float:
        """Seconds for the progress of a step without compression."""
        return self.step_s * self.way.steps


def compressed(topology: Topology, layers: Sequence[LayerShape]) -> tuple[Compressed, ...]:
    """All ways for the file's exchange; empty if it cannot compress, or nothing passes a network."""
    exchange = topology.exchange
    refused = exchange.kind == "allreduce" and (topology.divided or topology.compute.grid == "auto")
    if exchange.kind not in ("allreduce", "model_server") or exchange.merged_fc or refused:
        return ()
    placement, link = place(topology), link_of(topology)
    loads = loads_of(layers, flops_per_s=topology.plan.flops, word_bytes=WORD)
    compute_s = part_of(topology) * sum(load.forward_s + load.backward_s for load in loads)
    numel = sum(layer.weights for layer in layers)
    found = []
    for way in WAYS:
        share = _share(topology, way.name, layers)
        nbytes = _busiest(topology, placement, way.name, share) * numel * WORD
        messages = 2 * (2 if way.name == "powersgd" else 1)
        arithmetic_s = way.element_s * numel * (2 if exchange.kind == "allreduce" else 1)
        network_s = nbytes * link.byte_s + messages * link.alpha_s if nbytes else 0.0
        found.append(Compressed(way, nbytes, network_s, arithmetic_s, compute_s))
    return tuple(found) if found[0].nbytes else ()


def best(found: Sequence[Compressed]) -> Compressed:
    """Without compression, unless the network is what a step waits for; then the way that is worth most."""
    plain = found[0]
    return plain if plain.network_s <= plain.compute_s else min(found, key=lambda each: each.worth_s)


def chosen(topology: Topology, found: Sequence[Compressed]) -> Compressed | None:
    """Which of the ``found`` ways ``compression = "auto"`` means; never top-k, which needs several times as many steps. ``None``:
    nothing passes a network."""
    sizes_only = topology.compute.device == "modelled" and not topology.trains  # and PowerSGD needs shapes
    excluded = ("topk", "powersgd") if sizes_only else ("topk",)
    left = [each for each in found if each.way.name not in excluded]
    return best(left) if left else None


def compressed_rows(topology: Topology, layers: Sequence[LayerShape]) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    found = compressed(topology, layers)
    for each in found:
        yield {
            "row": "compression",
            "exchange": topology.exchange.kind,
            "compression": each.way.name,
            "bytes": each.nbytes,
            "network_s": each.network_s,
            "arithmetic_s": each.arithmetic_s,
            "compute_s": each.compute_s,
            "step_s": each.step_s,
            "steps": each.way.steps,
            "recommended": each is best(found),
        }


def _share(topology: Topology, name: str, layers: Sequence[LayerShape]) -> float:
    """The size of compressed gradients, relative to float32."""
    exchange = topology.exchange
    match name:
        case "fp16":
            return 1 / 2
        case "int8":
            return 1 / 4 + 1 / 1024
        case "topk":
            return 2 * exchange.compression_ratio
        case "powersgd":
            numel = sum(layer.weights for layer in layers)
            return sum(_factors(layer, exchange.compression_rank) for layer in layers) / numel if numel else 1.0
    return 1.0


def _factors(layer: LayerShape, rank: int) -> int:
    """About how many elements PowerSGD sends for a layer: its outputs are the rows of a matrix, if it has one."""
    outputs = layer.outputs[0] if layer.image else layer.outputs[-1] if layer.outputs else 1
    columns = layer.weights // max(1, outputs)
    matrix = Matrix(0, outputs, columns)
    return matrix.factors(rank) if matrix.numel and matrix.shrinks(rank) else layer.weights


def _busiest(topology: Topology, placement: Placement, name: str, share: float) -> float:
    """How many times the parameters' bytes the busiest NIC carries in a step of all groups."""
    workers = [role.host for role in placement.workers]
    on = Counter(workers)
    total = len(workers)
    if len(set(workers) | {role.host for role in placement.server_roles}) < 2:
        return 0.0
    if topology.exchange.kind == "allreduce":
        hosts = len(on)
        if name == "none" or share == 1.0:  # the workers of a host sum in its memory first
            return 2 * (hosts - 1) / hosts
        if name == "powersgd":
            return 2 * (total - 1) / total * share
        back = min(1.0, share * total) if name == "topk" else share
        return max(count * (total - count) / total * (share + back) for count in on.values())
    size, servers = placement.group_size, Counter(role.host for role in placement.server_roles)
    load = 0.0
    for host in set(on) | set(servers):
        held = servers[host] / placement.servers
        pushed = on[host] / size * (1 - held)  # by its workers to other hosts
        taken = held * (total - on[host]) / size  # by its servers from other hosts
        load = max(load, pushed * share + taken, pushed + taken * share)
    return load


def in_words(found: Sequence[Compressed]) -> str:
    """The recommended compression and its reason, as a sentence; empty if ``found`` is."""
    if not found:
        return ""
    way, plain = best(found), found[0]
    if way is plain:
        return f"Without compression: {_why_plain(plain)}"
    return (
        f'The network is what a step waits for: compression = "{way.way.name}" would reach a loss about '
        f"{_gain(plain, way):.1f} times as fast"
    )


def reason(found: Sequence[Compressed], way: Compressed | None) -> str:
    """Why `chosen` has chosen ``way``, as the end of a sentence."""
    if way is None:
        return "no gradients pass a network"
    plain = found[0]
    if way.way is plain.way:
        return _why_plain(plain)
    times = f"{rounded_time(plain.network_s)} without compression, where a worker computes for {rounded_time(plain.compute_s)}"
    return f"a step's exchange takes {times}; a loss is reached about {_gain(plain, way):.1f} times as fast"


def _why_plain(plain: Compressed) -> str:
    return "what a worker computes hides the exchange" if plain.network_s <= plain.compute_s else "no other way is faster"


def _gain(plain: Compressed, way: Compressed) -> float:
    return plain.worth_s / way.worth_s if way.worth_s else math.inf
