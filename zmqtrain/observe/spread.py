"""The median and other quantiles of any number of values, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

#: Up to this many values are kept as they are, and quantiles are exact.
MOST_EXACT = 65_536
#: More values are counted in buckets, and quantiles are right within this share of their size.
PRECISION = 0.001
#: The precision of the counts that a line of ``events.jsonl`` carries: a second of one role has few values.
LINE_PRECISION = 0.02
#: What is smaller counts as this: a nanosecond.
_LEAST = 1e-9


class Buckets:
    """Counts of values, in buckets whose width grows with the value; what is negative counts as 0.

    Bucket ``i`` holds the values above ``b ** (i - 1)`` and up to ``b ** i``, where ``b = (1 + precision) / (1 - precision)``. The
    value that stands for it, ``2 * b ** i / (b + 1)``, differs from each of them by at most the share ``precision``.
    """

    def __init__(self, precision: float) -> None:
        self.counts: Counter[int] = Counter()
        """How many values each bucket holds."""
        self._base = (1 + precision) / (1 - precision)
        self._log = math.log(self._base)

    def add(self, value: float, times: int = 1) -> None:
        """Count a finite value, ``times`` times."""
        self.counts[math.ceil(math.log(max(value, _LEAST)) / self._log)] += times

    def value(self, bucket: int) -> float:
        """The value that stands for a bucket."""
        return 2 * self._base**bucket / (self._base + 1)


class Spread:
    """Takes values one by one (`add`). `median` and `quantile` are exact up to ``most_exact`` values, and beyond that right within
    `PRECISION`. The values must be finite and not negative."""

    def __init__(self, most_exact: int = MOST_EXACT) -> None:
        self._most_exact = most_exact
        self._exact: array[float] | None = array("d")
        self._buckets = Buckets(PRECISION)
        self._least, self._greatest = math.inf, -math.inf
        self.count = 0

    def add(self, value: float, times: int = 1) -> None:
        """Take a value, ``times`` times."""
        self.count += times
        self._least, self._greatest = min(self._least, value), max(self._greatest, value)
        if self._exact is not None and self.count <= self._most_exact:
            self._exact.extend([value] * times)
            return
        if self._exact is not None:
            for each in self._exact:
                self._buckets.add(each)
            self._exact = None
        self._buckets.add(value, times)

    def quantile(self, share: float) -> float | None:
        """The smallest value that is not exceeded by this share of all values; ``None`` if there are none."""
        if not self.count:
            return None
        return self._at([min(self.count, max(1, math.ceil(share * self.count)))])[0]

    def median(self) -> float | None:
        """The value in the middle, or the mean of the two in the middle; ``None`` if there are no values."""
        if not self.count:
            return None
        low, high = self._at([(self.count + 1) // 2, self.count // 2 + 1])
        return (low + high) / 2

    def _at(self, places: Sequence[int]) -> list[float]:
        """The values at these places, counted from 1, in ascending order."""
        if self._exact is not None:
            ordered = sorted(self._exact)
            return [ordered[place - 1] for place in places]
        found: list[float] = []
        before = 0
        for bucket, count in sorted(self._buckets.counts.items()):
            before += count
            while len(found) < len(places) and places[len(found)] <= before:
                found.append(min(max(self._buckets.value(bucket), self._least), self._greatest))
        return found
