"""Words in shared memory, with which processes tell each other their progress, and at which they wait without polling.

A word is a 32-bit counter that one process writes and all may read, so no write is lost and no lock is needed. It has a cache line
of its own, so waiting at one word does not disturb others.
"""

from __future__ import annotations

import platform

from zmqtrain.arena import futex

#: Bytes from one word to the next.
LINE = 64
_MASK = 0xFFFF_FFFF
#: On x86 all processors see a process's stores in order. Elsewhere, what was written before a word must become visible before the
#: word, and what is read after it must not be read before it: a futex call is a full barrier for both.
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class Words:
    """Words in ``memory``, one per cache line. ``address`` is that of its first byte."""

    __slots__ = ("_address", "_values")

    def __init__(self, memory: memoryview, address: int) -> None:
        self._values = memory.cast("I")
        self._address = address

    def __len__(self) -> int:
        return len(self._values) * 4 // LINE

    def get(self, index: int) -> int:
        """Return the word's current value."""
        value = self._values[index * (LINE // 4)]
        if not _IN_ORDER:
            futex.wake(self._address + index * LINE)
        return value

    def reached(self, index: int, value: int) -> bool:
        """Whether the counter is at ``value`` or beyond. Counters wrap around: they must be less than 2**31 apart."""
        return (self.get(index) - value) & _MASK < 1 << 31

    def set(self, index: int, value: int) -> None:
        """Write a word of this process, and wake those who wait at it."""
        address = self._address + index * LINE
        if not _IN_ORDER:
            futex.wake(address)
        self._values[index * (LINE // 4)] = value & _MASK
        futex.wake(address)

    def wake(self, index: int) -> None:
        """Wake all waiters at the word, so that they check other conditions."""
        futex.wake(self._address + index * LINE)

    def wait(self, index: int, value: int, timeout_s: float) -> bool:
        """Sleep until the counter has reached ``value``, a wake-up arrives, or ``timeout_s`` has passed. Returns whether it has."""
        found = self.get(index)
        if (found - value) & _MASK < 1 << 31:
            return True
        futex.wait(self._address + index * LINE, found, timeout_s)
        return self.reached(index, value)
