"""A process's place in the region of its host.

::

    [ header | slot 0: control, heap | slot 1: control, heap | ... ]

Each process has one slot, in which only it allocates, so nothing needs a lock between processes. A slot is as large as the
machine's memory: that takes address space, not memory. Others find a buffer by its `Place`: 16 bytes in a message, in place of the
tensor.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass

import numpy as np
import psutil

from zmqtrain.arena.allocator import Allocator
from zmqtrain.arena.region import PAGE, Region
from zmqtrain.arena.words import LINE, Words
from zmqtrain.errors import HostMemoryError

_HEADER = struct.Struct("<8sIIQ")  # magic, version, slots, bytes per slot
_MAGIC, _VERSION = b"zmqarena", 1
#: Words of a slot; the first two are the process's identity, the others are assigned by the code that lays out teams.
WORDS = 1023
PROCESS, STARTS = 0, 1
FIRST_FREE = 2
_CONTROL = -(-(WORDS + 1) * LINE // PAGE) * PAGE
#: The most slots: a process per core, and servers beside them; no machine that we know has more.
MOST_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """The position of some bytes: ``start`` counts from the region's beginning, and is the same for all processes."""

    start: int
    nbytes: int


class Block:
    """Memory that this process has allocated. It stays until `free`, or until the last process with the region has ended."""

    __slots__ = ("_arena", "memory", "place")

    def __init__(self, arena: Arena, place: Place) -> None:
        self._arena, self.place = arena, place
        self.memory = arena.memory(place)

    def free(self) -> None:
        """Free the memory. No tensor over it may be used any more, in any process."""
        self._arena.free(self.place)


class Arena:
    """This process's view of the host's region: its own slot to allocate in, all slots to read and write. Thread-safe."""

    def __init__(self, region: Region, slot: int) -> None:
        """Take ``slot``, which no other process may hold at the same time."""
        magic, version, slots, slot_bytes = _header(region)
        if magic != _MAGIC or version != _VERSION:
            raise HostMemoryError(f"{region.path} is not a region of this release of zmqtrain")
        if not 0 <= slot < slots:
            raise ValueError(f"there is no slot {slot}: the region has {slots}")
        self.region, self.slot, self.slots = region, slot, slots
        self._slot_bytes = slot_bytes
        self._base = int(np.frombuffer(region.memory, np.uint8).ctypes.data)
        heap = self._start(slot) + _CONTROL
        self._allocator = Allocator(heap, self._start(slot) + slot_bytes)
        self._reserved = heap  # addresses below this have real memory
        self._lock = threading.Lock()
        words = self.words(slot)
        region.discard(heap, slot_bytes - _CONTROL)  # left by an earlier process
        for word in range(FIRST_FREE, WORDS):
            if words.get(word):
                words.set(word, 0)
        words.set(STARTS, words.get(STARTS) + 1)
        words.set(PROCESS, os.getpid())

    @staticmethod
    def create(slots: int, slot_bytes: int | None = None) -> Region:
        """Create a region for ``slots`` processes. ``slot_bytes``: the most that one process may allocate (default: the machine's
        memory)."""
        if not 0 < slots <= MOST_SLOTS:
            raise ValueError(f"{slots} slots; a region has 1 to {MOST_SLOTS}")
        size = psutil.virtual_memory().total if slot_bytes is None else slot_bytes
        size = -(-size // PAGE) * PAGE + _CONTROL
        region = Region.create(PAGE + slots * size)
        _HEADER.pack_into(region.memory, 0, _MAGIC, _VERSION, slots, size)
        return region

    @classmethod
    def join(cls, path: str, slot: int) -> Arena:
        """Take a slot of the region at ``path``. Raises `HostMemoryError`."""
        return cls(Region.open(path), slot)

    def allocate(self, nbytes: int, what: str = "a buffer") -> Block:
        """Allocate memory of this process, aligned to a cache line, with undefined content.

        ``what``: the purpose, for the text of the `HostMemoryError` that is raised if there is not enough.
        """
        with self._lock:
            start = self._allocator.take(nbytes)
            if start is None:
                raise HostMemoryError(
                    f"{what} needs {nbytes / 1e6:.1f} MB of contiguous shared memory; this process may use "
                    f"{self._slot_bytes / 1e6:.1f} MB and already uses {self._allocator.taken_bytes / 1e6:.1f} MB"
                )
            stop = start + nbytes
            if stop > self._reserved:
                try:
                    self.region.reserve(self._reserved, stop - self._reserved, what)
                except HostMemoryError:
                    self._allocator.give_back(start)
                    raise
                self._reserved = stop
            return Block(self, Place(start, nbytes))

    def free(self, place: Place) -> None:
        """Free what `allocate` returned."""
        with self._lock:
            self._allocator.give_back(place.start)

    @property
    def taken_bytes(self) -> int:
        """The number of bytes that this process has allocated."""
        with self._lock:
            return self._allocator.taken_bytes

    def memory(self, place: Place) -> memoryview:
        """The bytes at a place of any process. Raises `ValueError` for a place that is in no slot's heap."""
        slot, offset = divmod(place.start - PAGE, self._slot_bytes)
        if place.nbytes < 0 or not 0 <= slot < self.slots or not _CONTROL <= offset <= self._slot_bytes - place.nbytes:
            raise ValueError(f"{place} is outside all processes' parts of the host's shared memory")
        return self.region.memory[place.start : place.start + place.nbytes]

    def place_of(self, address: int, nbytes: int) -> Place | None:
        """The place in the region of memory at an address of this process; None if it is outside the region."""
        start = address - self._base
        return Place(start, nbytes) if start >= PAGE and start + nbytes <= self.region.nbytes else None

    def words(self, slot: int) -> Words:
        """The words of a slot. Only its own process writes them."""
        start = self._start(slot)
        return Words(self.region.memory[start : start + WORDS * LINE], self._base + start)

    def close(self) -> None:
        """This process no longer needs the arena. Memory under remaining tensors stays."""
        self.region.close()

    def _start(self, slot: int) -> int:
        return PAGE + slot * self._slot_bytes


def _header(region: Region) -> tuple[bytes, int, int, int]:
    magic, version, slots, slot_bytes = _HEADER.unpack_from(region.memory)
    return bytes(magic), int(version), int(slots), int(slot_bytes)
