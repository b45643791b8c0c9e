"""The part of the model that one server holds in a world of phantoms: only sizes and versions, without memory or computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.pieces import Piece
from zmqtrain.server.shard import require_known
from zmqtrain.server.shard_entry import Loan
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.phantom import PhantomPayload


class PhantomEntry:
    """Implements `zmqtrain.server.shard_entry.ShardEntry` without values. Its gradients are phantoms."""

    __slots__ = ("_base", "dtype", "piece", "version")

    payload_type = PhantomPayload

    def __init__(
        self, piece: Piece, dtype: str, parameter_group: int, optimizer: OptimizerSpec, *, starts: Sequence[int] = ()
    ) -> None:
        self.piece = piece
        self.dtype = dtype
        self.version = 0
        self._base = optimizer.groups[parameter_group]

    def memory(self) -> PhantomPayload:
        return PhantomPayload(self.piece.numel, self.dtype)

    def gradient(self, payload: Payload) -> Payload:
        return payload

    def squares(self, gradient: PhantomPayload) -> float:
        """Return 0: the norm is not known, and a small norm is never clipped."""
        return 0.0

    def norm(self, gradient: PhantomPayload) -> float:
        """Return 0, since a payload without values has no norm."""
        return 0.0

    def lend(self, meta: Value = None) -> Loan:
        return Loan(PhantomPayload(self.piece.numel, self.dtype, meta))

    def pass_over(self) -> None:
        self.version += 1

    def keep_before(self) -> None:
        return None

    def lend_before(self, meta: Value = None) -> Loan:
        return self.lend(meta)

    def update(
        self,
        gradient: PhantomPayload,
        hyperparameters: Mapping[str, Value] | None = None,
        factor: float = 1.0,
        rate: float = 1.0,
    ) -> None:
        self.version += 1

    def check_hyperparameters(self, given: Mapping[str, Value] | None) -> None:
        require_known(given, self._base)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self.version = version


class PhantomSum:
    """Implements `zmqtrain.server.shard_entry.Sum`: any one of the gradients can serve as their mean."""

    __slots__ = ("_any",)

    def __init__(self, expected: Sequence[int]) -> None:
        self._any: PhantomPayload | None = None

    def add(self, group: int, gradient: PhantomPayload) -> None:
        self._any = gradient

    def mean(self) -> PhantomPayload:
        assert self._any is not None
        return self._any
