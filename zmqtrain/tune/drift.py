"""The closed loop: whether training is still what its setting was chosen for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

#: Steps whose staleness counts, and how many there must be.
WINDOW, LEAST = 400, 100
#: How far measured momentum may go from what it was at first: fits of a thousand updates are no nearer.
MOMENTUM = 0.25
#: Fits of which the median counts, at first and now.
FITS = 3
#: By what staleness may differ, as a share of what is expected, and in updates.
STALENESS, UPDATES = 0.5, 1.0


@dataclass(slots=True)
class Drift:
    """Watches one training. Groups are taken to be equally fast."""

    groups: int
    explicit: float
    """The optimizer's own momentum."""
    _staleness: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _first: list[float] = field(default_factory=list)
    _fits: deque[float] = field(default_factory=lambda: deque(maxlen=FITS))

    def step(self, staleness: float | None) -> str | None:
        """A step's mean staleness. Returns why to tune again, if there is a reason."""
        if staleness is None:
            return None
        self._staleness.append(staleness)
        if len(self._staleness) < LEAST:
            return None
        mean, expected = sum(self._staleness) / len(self._staleness), self.groups - 1
        if abs(mean - expected) <= STALENESS * expected + UPDATES:
            return None
        return f"staleness is {mean:.2f} in the mean, not {expected} as of {self.groups} groups that are equally fast"

    def fitted(self, momentum: float) -> str | None:
        """The momentum in all that servers have fitted: compared with what they fitted first, since a fit has errors of its own."""
        if len(self._first) < FITS:
            self._first.append(momentum)
            return None
        self._fits.append(momentum)
        first, now = median(self._first), median(self._fits)
        if len(self._fits) < FITS or abs(now - first) <= MOMENTUM:
            return None
        return f"the fitted momentum went from {first:.2f} to {now:.2f}"
