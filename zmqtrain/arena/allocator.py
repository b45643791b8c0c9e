"""Allocator for one contiguous range of memory, which keeps track of the parts in use. Sans-IO."""

from __future__ import annotations

from bisect import bisect_left

#: Every part starts at a multiple of this: a cache line, and more than any vector instruction requires.
ALIGNMENT = 64


class Allocator:
    """First fit, over the addresses from ``start`` to ``stop``; freed parts are merged with free neighbours.

    A slot holds a few hundred long-lived parts (buckets) and a few short-lived ones (messages being sent), so a list is enough.
    """

    def __init__(self, start: int, stop: int) -> None:
        first, last = _up(start), stop // ALIGNMENT * ALIGNMENT
        self._free: list[tuple[int, int]] = [(first, last)] if first < last else []  # sorted, never adjacent
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The address of ``nbytes`` bytes (at least one); None if there is no contiguous room for them."""
        size = _up(max(1, nbytes))
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                if stop - start == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, stop)
                self._taken[start] = start + size
                return start
        return None

    def give_back(self, address: int) -> tuple[int, int]:
        """Free the part at ``address``. Returns its (start, stop). Raises `KeyError` if no part starts there."""
        start, stop = part = address, self._taken.pop(address)
        index = bisect_left(self._free, part)
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
        return part

    @property
    def taken_bytes(self) -> int:
        """The number of allocated bytes."""
        return sum(stop - start for start, stop in self._taken.items())

    @property
    def parts(self) -> int:
        """The number of allocated parts."""
        return len(self._taken)


def _up(address: int) -> int:
    return -(-address // ALIGNMENT) * ALIGNMENT
