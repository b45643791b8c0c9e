"""The content of a message: a tensor, only a tensor's size, or a small value.

Collectives and exchanges are written against `Payload` alone, so the same code moves real tensors and phantoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

#: What a message header may carry beside a tensor: anything msgpack knows.
Value: TypeAlias = bool | int | float | str | bytes | Sequence["Value"] | dict[str, "Value"] | None


@runtime_checkable
class Payload(Protocol):
    """A flat run of elements that travels in one message. In-place methods end in ``_`` and return nothing.

    ``meta`` rides in the message's header and is whatever the sender attached (small: it counts against the header limit).
    """

    meta: Value

    @property
    def dtype(self) -> str:
        """Name on the wire, like ``float32`` or ``bfloat16``."""
        ...

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        ...

    def part(self, start: int, stop: int) -> Payload:
        """Elements ``start`` to ``stop``, as a view: writing to the part writes to the whole."""
        ...

    def empty_like(self) -> Payload:
        """A new payload of the same dtype and size, with undefined content."""
        ...

    def copy_(self, other: Payload) -> None: ...

    def add_(self, other: Payload) -> None: ...

    def scale_(self, factor: float) -> None: ...

    def average_(self, other: Payload) -> None:
        """Become the mean of both."""
        ...

    def frames(self) -> Sequence[memoryview]:
        """The bytes to send, without a copy; empty for phantoms and plain values."""
        ...
