"""What communication costs: messages and bytes kept apart, and the network that turns them into seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from zmqtrain.parallel.communicator import Phase, Term


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process does for one thing: messages one after another, and bytes."""

    messages: float = 0.0
    """How often alpha is paid."""
    nbytes: float = 0.0
    """Bytes that the process sends over the network."""
    nic_bytes: float = 0.0
    """Bytes that its host's NIC sends meanwhile, for all of the host's processes: what takes the time."""
    memory_bytes: float = 0.0
    """Bytes that its host's memory reads and writes instead, for all of the host's processes."""

    @classmethod
    def sent(cls, messages: float, nbytes: float, *, sharing: float = 1) -> Cost:
        """Over the network, by ``sharing`` processes of a host at once."""
        return cls(messages, nbytes, nbytes * sharing)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.messages + other.messages,
            self.nbytes + other.nbytes,
            self.nic_bytes + other.nic_bytes,
            self.memory_bytes + other.memory_bytes,
        )

    def times(self, factor: float) -> Cost:
        """So many of it."""
        return Cost(self.messages * factor, self.nbytes * factor, self.nic_bytes * factor, self.memory_bytes * factor)


NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class Link:
    """The network: alpha and beta."""

    alpha_s: float
    """Seconds a message takes, whatever its size."""
    byte_s: float
    """Seconds a byte takes over a host's NIC; the paper's beta is that of a word."""
    memory_byte_s: float = 0.0
    """Seconds to read or write a byte in a host's memory."""

    def latency_s(self, cost: Cost) -> float:
        """The part that messages take."""
        return cost.messages * self.alpha_s

    def volume_s(self, cost: Cost) -> float:
        """The part that bytes take."""
        return cost.nic_bytes * self.byte_s + cost.memory_bytes * self.memory_byte_s

    def seconds(self, cost: Cost) -> float:
        """Both."""
        return self.latency_s(cost) + self.volume_s(cost)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The communication of one layer in one step."""

    all_gather: Cost = NOTHING
    """Of its outputs, in the forward."""
    dx: Cost = NOTHING
    """The sum of its input's gradient, in the backward."""
    dw: Cost = NOTHING
    """The sum of its weights' gradient."""
    halo: Cost = NOTHING
    """Rows of neighbours' images, in the forward."""
    halo_back: Cost = NOTHING
    """The same, in the backward."""
    redistribute: Cost = NOTHING
    """Its input, from the placement in which the layer before it left it, in the forward."""
    redistribute_back: Cost = NOTHING
    """The gradient of its input, to that placement, in the backward."""
    statistics: Cost = NOTHING
    """A few numbers for norms and pools, in the forward. The paper has none."""
    statistics_back: Cost = NOTHING
    """The same, in the backward."""

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def terms(self) -> dict[Term, Cost]:
        """By term, forward and backward together."""
        found: dict[Term, Cost] = {}
        for (term, _), cost in self.phases().items():
            found[term] = found.get(term, NOTHING) + cost
        return found

    def phases(self) -> dict[tuple[Term, Phase], Cost]:
        """By term and pass, as labels of messages have them."""
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
        """All of it."""
        return sum(self.terms().values(), NOTHING)

    def values(self, link: Link) -> dict[str, Any]:
        """As JSON values: each term that costs anything, with its messages, bytes and seconds."""
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
