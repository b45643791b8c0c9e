"""Tensors between processes of one host lie in the memory that they share: the socket carries where.

A piece whose bytes lie in shared memory already (a bucket of a replica, a piece of a server) is described as it is; others are
copied there first, which costs less than a socket. The memory is the sender's: it stays until the piece is acknowledged, so a
receiver takes what it needs before that, and a descriptor that is sent again finds the same bytes. What a dead process had lent
goes with its slot.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from zmqtrain.arena.arena import Arena, Block, Place
from zmqtrain.errors import HostMemoryError, WireError

#: Smaller bodies go as they are: a descriptor saves nothing.
LEAST_BYTES = 32 * 1024
_DESCRIPTOR = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Lent:
    """A piece's bytes in shared memory."""

    descriptor: bytes
    block: Block | None
    """Memory that was taken for it, to be freed once the piece has arrived."""


class SharedBodies:
    """Bodies of pieces as descriptors, and back."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def region(self) -> int:
        """Which region it is: processes with the same number share memory. Never 0."""
        return self._arena.region.identity

    def holds(self, body: memoryview) -> bool:
        """Whether a body is large enough to be described, and can be as it lies."""
        return body.nbytes >= LEAST_BYTES and self._place(body) is not None

    def lend(self, body: memoryview) -> Lent | None:
        """Describe a body, in place or copied. None where it rather goes as it is."""
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
        """The bytes that a descriptor describes; they are the sender's. Raises `WireError` for what is no descriptor."""
        if len(descriptor) != _DESCRIPTOR.size:
            raise WireError(f"a descriptor of {len(descriptor)} bytes")
        start, nbytes = _DESCRIPTOR.unpack(descriptor)
        try:
            return self._arena.memory(Place(start, nbytes)).toreadonly()
        except ValueError as error:
            raise WireError(f"a descriptor of memory that is none: {error}") from error
