"""The content of a message: a tensor, only a tensor's size, or a small value.

Collectives and exchanges use only `Payload`, so the same code moves real tensors and phantoms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

#: What a message header may contain beside a tensor: anything that msgpack can represent.
Value: TypeAlias = bool | int | float | str | bytes | Sequence["Value"] | dict[str, "Value"] | None


@runtime_checkable
class Payload(Protocol):
    """A flat sequence of elements that is sent in one message. In-place methods end in ``_`` and return nothing.

    ``meta`` is sent in the message's header and is whatever the sender attached (small: it counts against the header limit).
    """

    meta: Value

    @property
    def dtype(self) -> str:
        """The name of the element type in messages, such as ``float32`` or ``bfloat16``."""
        ...

    @property
    def numel(self) -> int:
        """The number of elements."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        ...

    def part(self, start: int, stop: int) -> Payload:
        """Elements ``start`` up to ``stop``, as a view: writing to the part writes to the whole."""
        ...

    def empty_like(self) -> Payload:
        """A new payload of the same dtype and size, with undefined content."""
        ...

    def with_meta(self, meta: Value) -> Payload:
        """The same elements with another ``meta``."""
        ...

    def mapped(self, dtype: str, numel: int, function: Callable[[torch.Tensor], torch.Tensor], meta: Value) -> Payload:
        """A new payload of ``numel`` elements of ``dtype``, with ``meta``.

        ``function`` returns them, and gets this payload's elements as a flat tensor, to which it must not write. A phantom has only
        a size, so it does not call the function. Raises `TypeError` for a value.
        """
        ...

    def copy_(self, other: Payload) -> None: ...

    def add_(self, other: Payload) -> None: ...

    def scale_(self, factor: float) -> None: ...

    def average_(self, other: Payload) -> None:
        """Replace the elements by the mean of both."""
        ...

    def frames(self) -> Sequence[memoryview]:
        """The bytes to send, not copied; empty for phantoms and plain values."""
        ...


class WithoutMemory(ABC):
    """The methods of payloads without elements in memory: in-place methods check that the other payload fits, and do nothing
    else."""

    __slots__ = ()

    @abstractmethod
    def _check(self, other: Payload) -> None:
        """Raise `ValueError` if ``other`` does not fit."""

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
