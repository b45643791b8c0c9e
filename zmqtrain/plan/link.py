"""The cost of communication: messages and bytes kept separate, and the network that converts them to seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.parallel.communicator import Phase, Term

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """One process's cost of an operation: successive messages, and bytes."""

    messages: float = 0.0
    """How many the process sends."""
    nbytes: float = 0.0
    """Bytes that the process sends over the network."""
    nic_bytes: float = 0.0
    """Bytes that its host's NIC sends for all of the host's processes in that time, or could send while it waits; they determine
    how long it takes."""
    memory_bytes: float = 0.0
    """Bytes that are read and written in its host's memory instead, for all of the host's processes."""
    beside: float = 0.0
    """Of the messages, those that are sent together with another one, so that alpha is not paid again."""

    @classmethod
    def sent(cls, messages: float, nbytes: float, *, sharing: float = 1) -> Cost:
        """A cost on the network, for ``sharing`` processes of a host at once."""
        return cls(messages, nbytes, nbytes * sharing)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.messages + other.messages,
            self.nbytes + other.nbytes,
            self.nic_bytes + other.nic_bytes,
            self.memory_bytes + other.memory_bytes,
            self.beside + other.beside,
        )

    def times(self, factor: float) -> Cost:
        """The cost ``factor`` times."""
        return Cost(
            self.messages * factor,
            self.nbytes * factor,
            self.nic_bytes * factor,
            self.memory_bytes * factor,
            self.beside * factor,
        )


NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class ChangedByte:
    """The bytes of a `Cost` for each of several changes, as arrays."""

    nbytes: Array
    nic_bytes: Array
    memory_bytes: Array


@dataclass(frozen=True, slots=True)
class Changes:
    """The costs of redistributing activations from each of some placements (first dimension) to each of others (second)."""

    messages: Array
    unit: ChangedByte
    """Of each byte of the whole batch's activations, besides the messages."""

    def one(self) -> tuple[float, Cost]:
        """Of a single change: messages, and the further cost of a byte."""
        each = (self.unit.nbytes, self.unit.nic_bytes, self.unit.memory_bytes)
        return float(self.messages[0, 0]), Cost(0.0, *(float(array[0, 0]) for array in each))


@dataclass(frozen=True, slots=True)
class Link:
    """The network: alpha and beta."""

    alpha_s: float
    """Seconds per message, for any size."""
    byte_s: float
    """Seconds per byte on a host's NIC; the paper's beta is per word."""
    memory_byte_s: float = 0.0
    """Seconds to read or write a byte in a host's memory."""

    def latency_s(self, cost: Cost) -> float:
        """Seconds for the messages."""
        return (cost.messages - cost.beside) * self.alpha_s

    def volume_s(self, cost: Cost) -> float:
        """Seconds for the bytes."""
        return cost.nic_bytes * self.byte_s + cost.memory_bytes * self.memory_byte_s

    def seconds(self, cost: Cost) -> float:
        """Seconds for messages and bytes."""
        return self.latency_s(cost) + self.volume_s(cost)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The communication of one layer in one step."""

    all_gather: Cost = NOTHING
    """Gathering its outputs, in the forward."""
    dx: Cost = NOTHING
    """Summing its input's gradient, in the backward."""
    dw: Cost = NOTHING
    """Summing its weights' gradient."""
    halo: Cost = NOTHING
    """Rows of neighbours' images, in the forward."""
    halo_back: Cost = NOTHING
    """Rows of neighbours' images, in the backward."""
    redistribute: Cost = NOTHING
    """Redistributing its input from the placement of the layer before it, in the forward."""
    redistribute_back: Cost = NOTHING
    """Redistributing the gradient of its input to that placement, in the backward."""
    statistics: Cost = NOTHING
    """A few numbers for norms and pools, in the forward. The paper does not have them."""
    statistics_back: Cost = NOTHING
    """The same, in the backward."""

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def terms(self) -> dict[Term, Cost]:
        """Costs by term, forward and backward together."""
        found: dict[Term, Cost] = {}
        for (term, _), cost in self.phases().items():
            found[term] = found.get(term, NOTHING) + cost
        return found

    def phases(self) -> dict[tuple[Term, Phase], Cost]:
        """Costs by term and pass, as labels of messages have them."""
        return {
            ("all_gather", "forward"): self.all_gather,
            ("dx", "backward"): self.dx,
            ("dw", "backward"): self.dw,
            ("halo", "forward"): self.halo,
            ("halo", "backward"): self.halo_back,
            ("redistribute", "forward"): self.redistribute,
            ("redistribute", "backward"): self.redistribute_back,
            ("statistics", "forward"): self.statistics,
            ("statistics", "backward"): self.statistics_back,
        }

    @property
    def total(self) -> Cost:
        """The sum of all terms."""
        return sum(self.terms().values(), NOTHING)

    def values(self, link: Link) -> dict[str, Any]:
        """The terms that are not zero, as JSON values, each with its messages, bytes and seconds."""
        return {
            term: {
                "messages": round(cost.messages, 6),
                "bytes": round(cost.nbytes, 3),
                "latency_s": link.latency_s(cost),
                "volume_s": link.volume_s(cost),
                "seconds": link.seconds(cost),
            }
            for term, cost in self.terms().items()
            if cost != NOTHING
        }
