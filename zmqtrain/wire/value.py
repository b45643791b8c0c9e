"""A message without elements: only what its ``meta`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zmqtrain.wire.payload import Payload, Value


class ValuePayload:
    """A small value. `dtype` is empty, there are no elements, and in-place methods take only other payloads without elements."""

    __slots__ = ("meta",)

    meta: Value
    dtype: Final = ""
    numel: Final = 0
    nbytes: Final = 0
    shape: Final[tuple[int, ...]] = ()

    def __init__(self, meta: Value = None) -> None:
        self.meta = meta

    def part(self, start: int, stop: int) -> ValuePayload:
        if start or stop:
            raise ValueError(f"a part {start}:{stop} of a value without elements")
        return ValuePayload()

    def empty_like(self) -> ValuePayload:
        return ValuePayload()

    def copy_(self, other: Payload) -> None:
        self._check(other)

    def add_(self, other: Payload) -> None:
        self._check(other)

    def scale_(self, factor: float) -> None:
        return None

    def average_(self, other: Payload) -> None:
        self._check(other)

    def frames(self) -> Sequence[memoryview]:
        return ()

    def _check(self, other: Payload) -> None:
        if other.numel:
            raise ValueError(f"{other!r} does not fit {self!r}, which has no elements")

    def __repr__(self) -> str:
        return f"ValuePayload({self.meta!r:.80})"
