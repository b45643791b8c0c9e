"""A tensor of which only the size is sent: simulated worlds move these with the same code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Payload, Value, WithoutMemory

if TYPE_CHECKING:
    import torch


class PhantomPayload(WithoutMemory):
    """``numel`` elements of ``dtype`` that no process holds in memory. In-place methods check sizes and do nothing else."""

    __slots__ = ("dtype", "meta", "nbytes", "numel")

    meta: Value
    dtype: Final[str]
    numel: Final[int]
    nbytes: Final[int]

    def __init__(self, numel: int, dtype: str = "float32", meta: Value = None) -> None:
        if numel < 0:
            raise ValueError(f"a payload cannot have {numel} elements")
        self.dtype = dtype
        self.numel = numel
        self.nbytes = numel * dtype_named(dtype).itemsize
        self.meta = meta

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.numel,)

    def part(self, start: int, stop: int) -> PhantomPayload:
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"{start}:{stop} is not a part of {self.numel} elements")
        return PhantomPayload(stop - start, self.dtype)

    def empty_like(self) -> PhantomPayload:
        return PhantomPayload(self.numel, self.dtype)

    def with_meta(self, meta: Value) -> PhantomPayload:
        return PhantomPayload(self.numel, self.dtype, meta)

    def mapped(self, dtype: str, numel: int, function: Callable[[torch.Tensor], torch.Tensor], meta: Value) -> PhantomPayload:
        return PhantomPayload(numel, dtype, meta)

    def _check(self, other: Payload) -> None:
        if other.numel != self.numel:
            raise ValueError(f"{other!r} does not fit {self!r}: the numbers of elements differ")

    def __repr__(self) -> str:
        meta = "" if self.meta is None else f", meta={self.meta!r:.60}"
        return f"PhantomPayload({self.dtype}[{self.numel}]{meta})"
