"""A message without elements: only its ``meta``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from zmqtrain.wire.payload import Payload, Value, WithoutMemory

if TYPE_CHECKING:
    import torch


class ValuePayload(WithoutMemory):
    """A small value. `dtype` is empty, there are no elements, and in-place methods take only other payloads without elements."""

    __slots__ = ("meta", "packed")

    meta: Value
    dtype: Final = ""
    numel: Final = 0
    nbytes: Final = 0
    shape: Final[tuple[int, ...]] = ()

    def __init__(self, meta: Value = None) -> None:
        """The content of ``meta`` must not change any more: the same payload may be sent to many."""
        self.meta = meta
        self.packed: tuple[Value, bytes] | None = None
        """A ``meta`` together with its encoding by `zmqtrain.wire.message.packed_value`."""

    def part(self, start: int, stop: int) -> ValuePayload:
        if start or stop:
            raise ValueError(f"{start}:{stop} is not a part of a value, which has no elements")
        return ValuePayload()

    def empty_like(self) -> ValuePayload:
        return ValuePayload()

    def with_meta(self, meta: Value) -> ValuePayload:
        return ValuePayload(meta)

    def mapped(self, dtype: str, numel: int, function: Callable[[torch.Tensor], torch.Tensor], meta: Value) -> ValuePayload:
        raise TypeError(f"{self!r} has no elements")

    def _check(self, other: Payload) -> None:
        if other.numel:
            raise ValueError(f"{other!r} does not fit {self!r}, which has no elements")

    def __repr__(self) -> str:
        return f"ValuePayload({self.meta!r:.80})"
