"""The closed loop: whether training is still what its setting was chosen for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

#: Steps whose staleness counts, and how many there must be.
WINDOW, LEAST = 400, 100
#: How far measured momentum may be from what is expected: fits of a thousand updates are no nearer.
MOMENTUM = 0.2
#: By what staleness may differ, as a share of what is expected, and in updates.
STALENESS, UPDATES = 0.5, 1.0


@dataclass(slots=True)
class Drift:
    """Watches one training. Groups are taken to be equally fast."""

    groups: int
    explicit: float
    """The optimizer's own momentum."""
    _staleness: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _first_fit: float | None = None

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
        if self._first_fit is None:
            self._first_fit = momentum
            return None
        if abs(momentum - self._first_fit) <= MOMENTUM:
            return None
        return f"the fitted momentum went from {self._first_fit:.2f} to {momentum:.2f}"
