"""The seam between a server and the pieces of the model that it holds: their values, or only their sizes and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from zmqtrain.exchange.pieces import Piece
from zmqtrain.net.endpoint import Sent
from zmqtrain.wire.payload import Payload, Value

#: What a piece made of a push (a flat tensor, a phantom). Only pieces and sums look inside; others pass it on.
Gradient: TypeAlias = Any


class Loan:
    """A piece's memory on its way to a worker. While it is out, an update goes to a copy: no read is ever torn."""

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
    """A piece, and its version: the number of updates that it has seen."""

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
        """What came, of the piece's own payload type, element type and size. It aliases the payload."""
        ...

    def squares(self, gradient: Gradient) -> float:
        """The sum of the gradient's squares, in double precision, so that it hardly depends on how the model is cut."""
        ...

    def lend(self, meta: Value = None) -> Loan:
        """The values as they are now, to be sent with ``meta``. Set ``sent`` of the loan, or `Loan.give_back`."""
        ...

    def update(self, gradient: Gradient, hyperparameters: Mapping[str, Value] | None = None, factor: float = 1.0) -> None:
        """One step of the optimizer with ``factor`` times the gradient, which is only read. ``hyperparameters``: those that differ
        from the configured ones."""
        ...

    def check_hyperparameters(self, given: Mapping[str, Value] | None) -> None:
        """Raise `ProtocolError` for what `update` could not use."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, by name, copied."""
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """What `tensors` gave. Raises `CheckpointError` where it belongs to another cut of the model."""
        ...


class Sum(Protocol):
    """The sum of the groups' gradients of one piece."""

    def add(self, group: int, gradient: Gradient) -> None:
        """Take a gradient, which is only read and must stay as it is until the sum is done."""
        ...

    def mean(self) -> Gradient:
        """The mean over all gradients that came (groups that left and gave none do not count)."""
        ...
