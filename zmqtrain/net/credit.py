"""Byte credit of one lane: how much a receiver stores before any receive there has asked for it. Sans-IO.

Both ends count cumulatively, so a lost or repeated grant does no harm: the receiver announces the total up to which it accepts
bytes, and the sender counts what it has sent. A piece may start while any credit is left, so a window smaller than a piece works,
and memory is bounded by the window plus one piece.
"""

from __future__ import annotations

from zmqtrain.errors import WireError


class Allowance:
    """The sender's side of flow control: the credit that the receiver has granted."""

    __slots__ = ("limit", "used")

    def __init__(self) -> None:
        self.limit = 0
        self.used = 0

    @property
    def open(self) -> bool:
        return self.used < self.limit

    def spend(self, nbytes: int) -> None:
        self.used += nbytes

    def grant(self, limit: int) -> None:
        """The receiver accepts bytes up to this total. An older grant that arrives late changes nothing."""
        if limit > self.limit:
            self.limit = limit


class Window:
    """The receiver's side of flow control: the credit to grant."""

    __slots__ = ("announced", "consumed", "held", "limit", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self.consumed = 0
        self.announced = size
        """The total up to which the sender knows that it may send."""
        self.limit = size
        """The total up to which it may send."""

    def arrive(self, nbytes: int) -> None:
        """Bytes have arrived under credit. Raises `WireError` if the sender had no credit left."""
        if self.held + self.consumed >= self.announced:
            raise WireError(f"{nbytes:,} bytes arrived without credit (window of {self.size:,} bytes)")
        self.held += nbytes

    def consume(self, nbytes: int) -> None:
        """Note that ``nbytes`` held bytes were delivered to the receiver's user, so that their credit can be granted again."""
        self.held -= nbytes
        self.consumed += nbytes
        self.limit += nbytes

    @property
    def due(self) -> bool:
        """Whether enough credit became free to tell the sender at once."""
        return (self.limit - self.announced) * 4 >= self.size

    def announce(self) -> int:
        self.announced = self.limit
        return self.announced

    @property
    def crowded(self) -> bool:
        """Whether messages without a posted receive may soon leave no room for awaited ones."""
        return self.held * 2 >= self.size
