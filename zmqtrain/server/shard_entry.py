"""The interface between a server and the pieces of the model that it holds: their values, or only their sizes and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from zmqtrain.exchange.pieces import Piece
from zmqtrain.net.endpoint import Sent
from zmqtrain.wire.payload import Payload, Value

#: What a piece makes from a push (a flat tensor, a phantom). Only pieces and sums look inside; others pass it on.
Gradient: TypeAlias = Any


class Loan:
    """A piece's memory that is being sent to a worker. Until then an update goes to a copy, so a read never mixes two versions."""

    __slots__ = ("_back", "payload", "sent")

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.sent: Sent | None = None
        self._back = False

    def give_back(self) -> None:
        """The memory was not sent after all."""
        self._back = True

    @property
    def out(self) -> bool:
        return not self._back and (self.sent is None or not self.sent.released)


class ShardEntry(Protocol):
    """A piece, and its version: the number of its updates."""

    piece: Piece
    dtype: str
    version: int

    @property
    def payload_type(self) -> type[Payload]:
        """The type of payload in which pushes of the piece arrive."""
        ...

    def memory(self) -> Payload:
        """The memory that receives the initial values."""
        ...

    def gradient(self, payload: Payload) -> Gradient:
        """The gradient in a received payload, which has the piece's payload type, element type and size. It aliases the payload."""
        ...

    def squares(self, gradient: Gradient) -> float:
        """The sum of the gradient's squares, in double precision, so that the division of the model hardly matters."""
        ...

    def norm(self, gradient: Gradient) -> float:
        """The gradient's norm, to a few digits; infinite or NaN where an element is."""
        ...

    def lend(self, meta: Value = None) -> Loan:
        """The current values, to be sent with ``meta``. Set ``sent`` of the loan, or call `Loan.give_back`."""
        ...

    def pass_over(self) -> None:
        """An update that changes nothing."""
        ...

    def keep_before(self) -> None:
        """Keep the values before the last update from now on, for `lend_before`."""

    def lend_before(self, meta: Value = None) -> Loan:
        """Lend the values before the last update, as `lend` does with the current ones."""
        ...

    def update(
        self, gradient: Gradient, hyperparameters: Mapping[str, Value] | None = None, factor: float = 1.0, rate: float = 1.0
    ) -> None:
        """One step of the optimizer with ``factor`` times the gradient, which is only read, and ``rate`` times the learning rate
        (less if the piece's ceiling is lower). ``hyperparameters``: those that differ from the configured ones."""
        ...

    def check_hyperparameters(self, given: Mapping[str, Value] | None) -> None:
        """Raise `ProtocolError` for hyperparameters that `update` could not use."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tensors that a checkpoint keeps, by name."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Restore what `tensors` returned. Raises `CheckpointError` if it belongs to another division of the model."""
        ...


class Sum(Protocol):
    """The sum of the groups' gradients of one piece."""

    def add(self, group: int, gradient: Gradient) -> None:
        """Add a gradient, which is only read and must not change until the sum is done."""
        ...

    def mean(self) -> Gradient:
        """The mean over all gradients that were added (groups that left without one do not count)."""
        ...
