"""Whether training gets anywhere: it is asked again soon where it stands still, or is above what another setting has shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

#: By which part of what it has seen a training goes on before it is looked at again.
AGAIN = 0.25
#: How often, one look after another, it must not be seen to fall.
LOOKS = 2
#: Losses of which a mean has an error.
LEAST = 4


class Progress:
    """Watches one training's losses, update by update. What it finds may pass again: `reason` is how things are now.

    Of all so far the third quarter is compared with the last, so that the longer it goes on the smaller a fall can be seen; and
    all of it with where it began."""

    def __init__(self, after: int, below: float | None = None, begin: float | None = None) -> None:
        """``after``: updates after which it is looked at. ``below``: a loss to which another setting came with fewer. ``begin``:
        the loss that there was before."""
        self._next, self._below = max(after, 4 * LEAST), below
        self._begin = math.inf if begin is None else begin
        self._losses: list[float] = []
        self._still = 0
        self.reason: str | None = None
        """Why to ask again, if there is a reason."""

    def add(self, loss: float) -> str | None:
        """An update's loss. Returns the reason."""
        self._losses.append(loss)
        count = len(self._losses)
        if count >= self._next:
            self._next = count + max(1, round(AGAIN * count))
            self._look(self._losses[count // 2 : 3 * count // 4], self._losses[3 * count // 4 :])
        return self.reason

    def _look(self, earlier: Sequence[float], later: Sequence[float]) -> None:
        (was, was_error), (now, error) = mean_of(earlier), mean_of(later)
        still = was - now <= math.hypot(was_error, error) or now + error >= self._begin
        self._still = self._still + 1 if still else 0
        after = f"after {len(self._losses)} updates"
        if self._below is not None and now - error > self._below:
            self.reason = f"the loss is {now:.4g} {after}: another setting had {self._below:.4g} with fewer"
        elif self._still >= LOOKS:
            self.reason = f"the loss stands still: {was:.4g}, and {now:.4g} +- {error:.2g} {after}"
        else:
            self.reason = None


def mean_of(losses: Sequence[float]) -> tuple[float, float]:
    """Their mean, and its standard error."""
    return fmean(losses), stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
