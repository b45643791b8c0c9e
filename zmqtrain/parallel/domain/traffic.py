"""What a divided layer will send: for planners, from the same geometry by which it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zmqtrain.collectives.operations import sent_by_all_reduce
from zmqtrain.parallel.communicator import Phase
from zmqtrain.parallel.geometry import Count, Division


@dataclass(frozen=True, slots=True)
class Collective:
    """One operation of all members, with the term "statistics"."""

    kind: Literal["all_reduce", "all_gather"]
    elements: int
    """Of the tensor that is summed, or of each member's part that is gathered."""
    element_size: int
    phase: Phase

    def sent(self, members: int, rank: int) -> Count:
        """The messages and bytes that a member sends for this collective. ``members``: their number. ``rank``: the member's."""
        if self.kind == "all_gather":
            return Count(members - 1, (members - 1) * self.elements * self.element_size)
        return Count(*sent_by_all_reduce(self.elements, self.element_size, members, rank))


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """The messages of one divided layer in a step."""

    out_division: Division | None
    """Of its output; ``None`` where each member has the whole output."""
    halo: dict[Phase, tuple[Count, ...]]
    """What each member sends, by pass."""
    collectives: tuple[Collective, ...]
    """Operations of all members together: statistics of batch norm, pooling over the whole image."""
