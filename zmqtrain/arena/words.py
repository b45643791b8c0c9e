"""Words in shared memory by which processes tell each other how far they are, and at which they wait without polling.

A word is a counter of 32 bits that one process writes and all may read, so no write is ever lost and no lock is needed. It lies in
a cache line of its own: who waits at one is not disturbed by another.
"""

from __future__ import annotations

import platform

from zmqtrain.arena import futex

#: Bytes from one word to the next.
LINE = 64
_MASK = 0xFFFF_FFFF
#: On x86 all processors see a process's stores in their order. Elsewhere what was written before a word must be visible before the
#: word is, and what is read after it must not be read before: a futex call is a full barrier for both.
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class Words:
    """The words that lie one a line in ``memory``. ``address`` is that of its first byte."""

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
        """Write a word of one's own, and wake those who wait at it."""
        address = self._address + index * LINE
        if not _IN_ORDER:
            futex.wake(address)
        self._values[index * (LINE // 4)] = value & _MASK
        futex.wake(address)

    def wake(self, index: int) -> None:
        """Let everybody who waits at the word look at other things."""
        futex.wake(self._address + index * LINE)

    def wait(self, index: int, value: int, timeout_s: float) -> bool:
        """Sleep until the counter has reached ``value``, a wake-up arrives, or ``timeout_s`` is over. Returns whether it has."""
        found = self.get(index)
        if (found - value) & _MASK < 1 << 31:
            return True
        futex.wait(self._address + index * LINE, found, timeout_s)
        return self.reached(index, value)
