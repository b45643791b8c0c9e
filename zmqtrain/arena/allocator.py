"""Allocator for one contiguous range of memory: keeps track of the parts in use. Sans-IO."""

from __future__ import annotations

from bisect import bisect_left

#: Every part begins at a multiple of this: a cache line, and more than any vector instruction asks for.
ALIGNMENT = 64


class Allocator:
    """First fit, over the addresses ``start`` to ``stop``; parts that are given back join their free neighbours.

    A slot holds a few hundred parts that live long (buckets), and few that do not (what is on its way), so a list will do.
    """

    def __init__(self, start: int, stop: int) -> None:
        first, last = _up(start), stop // ALIGNMENT * ALIGNMENT
        self._free: list[tuple[int, int]] = [(first, last)] if first < last else []  # sorted, never touching each other
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The address of ``nbytes`` bytes (at least one), or None where there is no room for them in one piece."""
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
        """The part at ``address`` is free again. Returns its (start, stop). Raises `KeyError` where no part begins there."""
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
