"""What divided layers ask of the network: a few collectives between fixed sets of ranks, begun now and waited for later.

Layers run in a compute thread and know nothing of loops or endpoints. ``begin`` and ``wait`` are apart so that a layer computes
what it can while the data is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

#: What a message is for, in the words of the cost model (Gholami et al., Eq. 3 to 9): the all-gather of activations, the sum of
#: their gradients (dX), the sum of weight gradients (dW), the halos of divided images, the change from one placement to another.
#: ``statistics``: sums of a few numbers (batch norm, softmax), which the paper does not count.
Term = Literal["all_gather", "dx", "dw", "halo", "redistribute", "statistics"]
Phase = Literal["forward", "backward"]
#: Equal parts of statistics of up to so many bytes go to all others at once: as many messages as around a ring, in the time of one.
AT_ONCE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Label:
    """Which layer sends something, and what for: for counting, traces and errors."""

    layer: str
    """The module's name in the model, like ``features.3``."""
    term: Term
    phase: Phase = "forward"

    def __str__(self) -> str:
        return f"{self.term} of {self.layer} ({self.phase})"


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that will come from a rank."""

    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Pending(Protocol):
    """Communication that was begun. Every one must be waited for once."""

    def wait(self) -> list[Tensor]:
        """Block the calling thread until it is there. Raises `ConnectivityError` that names the peer and the label."""
        ...


class Ready:
    """Implements `Pending` for what is there already."""

    def __init__(self, result: list[Tensor]) -> None:
        self._result = result

    def wait(self) -> list[Tensor]:
        return self._result


class Communicator(Protocol):
    """Some ranks in a fixed order. All of them begin the same operations in the same order; each operation may end late.

    Tensors that are handed over must stay as they are until `Pending.wait` has returned, and those that it returns are the
    caller's. Tensors may have any strides. Empty tensors are allowed, and cost no message.
    """

    @property
    def rank(self) -> int:
        """This process's place among the communicator's members."""
        ...

    @property
    def size(self) -> int: ...

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Expected], label: Label) -> Pending:
        """Point to point: tensors to members, and tensors from members in return, in the order of ``receives``.

        Each member says what it sends and what it expects; several tensors between the same two come in the order of sending. A
        member that neither sends nor receives need not call it.
        """
        ...

    def all_gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]], label: Label) -> Pending:
        """Every member's part, in the order of members. ``shapes``: those of all parts, as all members know them."""
        ...

    def all_reduce(self, tensor: Tensor, label: Label) -> Pending:
        """One tensor: the sum over all members. The same bits on all of them."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor], label: Label) -> Pending:
        """One tensor: the sum over all members of part ``rank``. Parts may differ in shape."""
        ...


class Fabric(Protocol):
    """This process's connections to all others of the compute group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def among(self, members: tuple[int, ...]) -> Communicator:
        """The communicator of these ranks, this one among them; the same object for the same members. Needs no message."""
        ...
