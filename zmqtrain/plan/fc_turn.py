"""A group's turn at a merged FC server: one process, or several that divide the layers between them.

Of several servers (`zmqtrain.merged_fc.leader`) the first one passes the batch on. Each computes its rows of every layer; outputs
are gathered between layers, and their gradients summed on the way back; then all sum the gradients of the activations. The first
server answers, and all update their parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from zmqtrain.collectives.choose import choose_all_gather, choose_all_reduce, choose_reduce_scatter
from zmqtrain.collectives.schedule import (
    Schedule,
    Step,
    bruck_all_gather,
    doubling_all_reduce,
    halving_all_reduce,
    halving_reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from zmqtrain.plan.link import Link
from zmqtrain.topology.placement import Placement

#: The number of elements in each rank's part, where only proportions matter.
_PARTS = 1024
_ALL_REDUCES = {"ring": ring_all_reduce, "halving": halving_all_reduce, "doubling": doubling_all_reduce}


@dataclass(frozen=True, slots=True)
class MergedFc:
    """A server that computes all layers from ``split`` on, for all groups."""

    split: int
    fc_s: float
    """t_fc: seconds for a group's batch on one process."""
    activation_bytes: float = 0.0
    """Bytes of a batch's activations at the split; they are sent to the server, and gradients of the same size come back."""
    between_bytes: tuple[float, ...] = ()
    """If layers are divided: bytes of a batch's outputs that each layer with parameters needs from the layer before it."""
    update_s: float = 0.0
    """Seconds that its optimizer takes, after the answer."""


@dataclass(frozen=True, slots=True)
class FcTurn:
    """How a group's batch occupies the FC servers."""

    compute_s: float
    """Seconds of computing on each of them, at the same time."""
    tell_bytes: float = 0.0
    """Bytes from the first server to the others, before they can start."""
    exchange_bytes: float = 0.0
    """Bytes that the busiest of their NICs carries in successive messages, while nothing computes."""
    latency_s: float = 0.0
    """Seconds of latency of the messages between them."""
    update_s: float = 0.0
    """Seconds of the update after the answer."""
    nics: tuple[tuple[str, float], ...] = ()
    """By host: bytes that its NIC carries between the FC servers, in its busier direction."""

    @classmethod
    def of(cls, merged: MergedFc, placement: Placement, link: Link) -> FcTurn:
        """The turn for FC servers placed in this way."""
        hosts = [role.host for role in placement.fc_roles]
        size = len(hosts)
        if size == 1:
            return cls(merged.fc_s, update_s=merged.update_s)
        told = sum(host != hosts[0] for host in hosts)
        exchanges = [_Exchange.of(_gather(nbytes, size), nbytes, hosts) for nbytes in merged.between_bytes]
        exchanges += [_Exchange.of(_scatter(nbytes, size), nbytes, hosts) for nbytes in merged.between_bytes]
        exchanges.append(_Exchange.of(_all_reduce(merged.activation_bytes, size), merged.activation_bytes, hosts))
        out, into = defaultdict[str, float](float), defaultdict[str, float](float)
        out[hosts[0]] += told * merged.activation_bytes
        for host in hosts:
            into[host] += merged.activation_bytes * (host != hosts[0])
        for exchange in exchanges:
            for host in set(hosts):
                out[host] += exchange.out[host]
                into[host] += exchange.into[host]
        messages = bool(told) + sum(exchange.messages for exchange in exchanges)
        nics = tuple((host, max(out[host], into[host])) for host in dict.fromkeys(hosts))
        return cls(
            merged.fc_s / size,
            told * merged.activation_bytes,
            sum(exchange.nbytes for exchange in exchanges),
            messages * link.alpha_s,
            merged.update_s / size,
            nics,
        )

    def whole_s(self, link: Link) -> float:
        """Seconds from the start of the batch's turn to that of the next, if nothing else uses the servers' NICs."""
        return (self.tell_bytes + self.exchange_bytes) * link.byte_s + self.latency_s + self.compute_s + self.update_s


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A collective among the FC servers, over the network between their hosts."""

    messages: int
    """The number of successive messages."""
    nbytes: float
    """The sum, over these messages, of the bytes on the busiest NIC."""
    out: defaultdict[str, float]
    into: defaultdict[str, float]

    @classmethod
    def of(cls, schedules: Sequence[Schedule], nbytes: float, hosts: Sequence[str]) -> _Exchange:
        out, into = defaultdict[str, float](float), defaultdict[str, float](float)
        messages, longest = 0, 0.0
        for steps in zip_longest(*schedules, fillvalue=Step()):
            now_out, now_in = defaultdict[str, float](float), defaultdict[str, float](float)
            for host, step in zip(hosts, steps, strict=True):
                if step.to is not None and hosts[step.to] != host:
                    carried = sum(stop - start for start, stop in step.out) / (len(hosts) * _PARTS) * nbytes
                    now_out[host] += carried
                    now_in[hosts[step.to]] += carried
            for host in {*now_out, *now_in}:
                out[host] += now_out[host]
                into[host] += now_in[host]
            messages += bool(now_out)
            longest += max([*now_out.values(), *now_in.values()], default=0.0)
        return cls(messages, longest, out, into)


def _gather(nbytes: float, size: int) -> list[Schedule]:
    make = ring_all_gather if choose_all_gather(int(nbytes), size) == "ring" else bruck_all_gather
    return [make(size * _PARTS, size, rank) for rank in range(size)]


def _scatter(nbytes: float, size: int) -> list[Schedule]:
    make = ring_reduce_scatter if choose_reduce_scatter(int(nbytes), size) == "ring" else halving_reduce_scatter
    return [make(size * _PARTS, size, rank) for rank in range(size)]


def _all_reduce(nbytes: float, size: int) -> list[Schedule]:
    make = _ALL_REDUCES[choose_all_reduce(int(nbytes), size)]
    return [make(size * _PARTS, size, rank) for rank in range(size)]
