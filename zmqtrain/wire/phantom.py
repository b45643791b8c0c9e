"""A tensor of which only the size travels: simulated worlds move these through the very same code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Payload, Value


class PhantomPayload:
    """``numel`` elements of ``dtype`` that no process holds in memory. In-place methods check sizes and do nothing else."""

    __slots__ = ("dtype", "meta", "nbytes", "numel")

    meta: Value
    dtype: Final[str]
    numel: Final[int]
    nbytes: Final[int]

    def __init__(self, numel: int, dtype: str = "float32", meta: Value = None) -> None:
        if numel < 0:
            raise ValueError(f"a payload of {numel} elements")
        self.dtype = dtype
        self.numel = numel
        self.nbytes = numel * dtype_named(dtype).itemsize
        self.meta = meta

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.numel,)

    def part(self, start: int, stop: int) -> PhantomPayload:
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"a part {start}:{stop} of {self.numel} elements")
        return PhantomPayload(stop - start, self.dtype)

    def empty_like(self) -> PhantomPayload:
        return PhantomPayload(self.numel, self.dtype)

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
        if other.numel != self.numel:
            raise ValueError(f"{other!r} does not fit {self!r}: the numbers of elements differ")

    def __repr__(self) -> str:
        meta = "" if self.meta is None else f", meta={self.meta!r:.60}"
        return f"PhantomPayload({self.dtype}[{self.numel}]{meta})"
