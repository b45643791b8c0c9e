"""The closed loop: whether a setting still suits the training."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import InitVar, dataclass, field
from itertools import islice
from statistics import fmean, median

from zmqtrain.tune.trial import Baseline, First

#: The steps whose staleness is averaged, and the fewest for a mean.
WINDOW, LEAST = 400, 100
#: A group's first steps, with which its latest are compared: few, since a group that has become slow makes few steps.
FIRST, LATEST = 60, (30, 100)
#: The means must differ by this many standard errors at least: if times vary much, the staleness of a group varies as much as its
#: mean.
ERRORS = 9.0
#: How far the fitted momentum may move from its first value: fits of a thousand updates are no more precise.
MOMENTUM = 0.25
#: The number of fits of which the median is taken, at first and now.
FITS = 3
#: How much staleness may differ from the expected value: as a share of it, and in updates.
STALENESS, UPDATES = 0.5, 1.0


@dataclass(slots=True)
class _Group:
    """A group's staleness, at first and now."""

    first: First = field(default_factory=First)
    now: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST[-1]))

    def add(self, staleness: float) -> tuple[float, float] | None:
        """Add a value. Returns the first and the current mean if they differ."""
        steps, total, squares = self.first
        if steps < FIRST:
            self.first = First(steps + 1, total + staleness, squares + staleness**2)
            return None
        self.now.append(staleness)
        was = total / steps
        spread = math.sqrt(max(0.0, squares - steps * was**2) / (steps - 1))
        for count in LATEST:
            if len(self.now) < count:
                break
            now = fmean(islice(reversed(self.now), count))
            error = spread * math.sqrt(1 / steps + 1 / count)
            if abs(now - was) > max(STALENESS * was + UPDATES, ERRORS * error):
                return was, now
        return None


@dataclass(slots=True)
class Drift:
    """Watches one training. What it finds may be temporary: `reason` is the current state."""

    groups: int
    explicit: float
    """The optimizer's own momentum."""
    began: InitVar[Baseline] = ()
    """The staleness of the groups' first steps in earlier parts of the same training."""
    _staleness: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _of: dict[int, _Group] = field(default_factory=dict)
    _first: list[float] = field(default_factory=list)
    _fits: deque[float] = field(default_factory=lambda: deque(maxlen=FITS))
    _found: dict[int | str, str | None] = field(default_factory=dict)  # group, or all groups together -> the problem

    def __post_init__(self, began: Baseline) -> None:
        self._of = {group: _Group(first) for group, first in enumerate(began)}

    @property
    def baseline(self) -> Baseline:
        """The staleness of each group's first steps, for the next part of this training."""
        return tuple(self._of[group].first if group in self._of else First() for group in range(self.groups))

    @property
    def reason(self) -> str | None:
        """The reason to tune again; empty if there is none."""
        return next((found for found in self._found.values() if found is not None), None)

    def step(self, staleness: float | None, group: int = 0) -> str | None:
        """A step's mean staleness. Returns the reason.

        As long as each group has one gradient in progress, the mean over all is g - 1 for any speeds. A group that becomes slow
        shows in its own staleness: the others make more updates while it computes."""
        if staleness is None:
            return self.reason
        changed = self._of.setdefault(group, _Group()).add(staleness)
        self._found[group] = None
        if changed is not None:
            was, now = changed
            slower = "slower" if now > was else "faster"
            said = (
                f"the staleness of group {group} went from {was:.1f} to {now:.1f}: compared with the others it has become {slower}"
            )
            self._found[group] = said
        self._staleness.append(staleness)
        if len(self._staleness) >= LEAST:
            mean, expected = fmean(self._staleness), self.groups - 1
            said = f"the mean staleness is {mean:.2f}, but {self.groups} groups that compute all the time would have {expected}"
            self._found["mean"] = said if abs(mean - expected) > STALENESS * expected + UPDATES else None
        return self.reason

    def fitted(self, momentum: float) -> str | None:
        """Take the total momentum that servers have fitted. It is compared with their first fits, since a fit has errors of its
        own. Returns the reason."""
        if len(self._first) < FITS:
            self._first.append(momentum)
            return self.reason
        self._fits.append(momentum)
        if len(self._fits) == FITS:
            first, now = median(self._first), median(self._fits)
            said = f"the fitted momentum went from {first:.2f} to {now:.2f}"
            self._found["momentum"] = said if abs(now - first) > MOMENTUM else None
        return self.reason
