"""Tensors between processes of one host stay in the memory that they share: the socket carries only their location.

A piece whose bytes are already in shared memory (a bucket of a replica, a piece of a server) is described in place; others are
copied there first, which costs less than a socket. The memory belongs to the sender: it is kept until the piece is acknowledged, so
a receiver copies what it needs before that, and a descriptor that is sent again finds the same bytes. Memory that a dead process
had lent is freed with its slot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from zmqtrain.arena.arena import Arena, Block, Place
from zmqtrain.errors import HostMemoryError, WireError

#: Smaller bodies, in bytes, are sent themselves: a descriptor would save nothing.
LEAST_BYTES = 32 * 1024
_DESCRIPTOR = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Lent:
    """A piece's bytes in shared memory."""

    descriptor: bytes
    block: Block | None
    """Memory that was allocated for it, to be freed once the piece has arrived."""


class SharedBodies:
    """Converts bodies of pieces to descriptors, and back."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def region(self) -> int:
        """The number of the region: processes with the same number share memory. Never 0."""
        return self._arena.region.identity

    def holds(self, body: memoryview) -> bool:
        """Whether a body is large enough to be described, and can be described in place."""
        return body.nbytes >= LEAST_BYTES and self._place(body) is not None

    def lend(self, body: memoryview) -> Lent | None:
        """Describe a body, in place or copied. None if it is better sent itself."""
        if body.nbytes < LEAST_BYTES:
            return None
        place, block = self._place(body), None
        if place is None:
            try:
                block = self._arena.allocate(body.nbytes, "a message")
            except HostMemoryError:
                return None
            np.frombuffer(block.memory, np.uint8)[:] = np.frombuffer(body, np.uint8)
            place = block.place
        return Lent(_DESCRIPTOR.pack(place.start, place.nbytes), block)

    def _place(self, body: memoryview) -> Place | None:
        return self._arena.place_of(np.frombuffer(body, np.uint8).ctypes.data, body.nbytes)

    def borrow(self, descriptor: bytes | bytearray | memoryview) -> memoryview:
        """The bytes that a descriptor describes; they belong to the sender. Raises `WireError` for an invalid descriptor."""
        if len(descriptor) != _DESCRIPTOR.size:
            raise WireError(f"a descriptor has {len(descriptor)} bytes")
        start, nbytes = _DESCRIPTOR.unpack(descriptor)
        try:
            return self._arena.memory(Place(start, nbytes)).toreadonly()
        except ValueError as error:
            raise WireError(f"a descriptor does not describe shared memory: {error}") from error
