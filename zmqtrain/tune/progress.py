"""Decides whether training makes progress, or has stalled or fallen behind another setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from zmqtrain.tune.trial import Watch

#: A training is checked again after this part of its updates so far.
AGAIN = 0.4
#: The number of successive checks without a visible fall of the loss after which training counts as stalled.
LOOKS = 2
#: The fewest losses for a standard error.
LEAST = 4
#: A training counts as stalled if it would need this many times its time so far, even if the loss falls by one standard error more.
FAR = 2.0
#: Without a target: the part of the loss that remains to be reduced.
PART = 0.25


class Progress:
    """Watches one training's losses, update by update. What it finds may be temporary: `reason` is the current state.

    The third quarter of all losses is compared with the last, so that longer trainings show smaller falls. A fall that is too
    small to be seen does not mean that training has stalled: the possible fall, including noise, is compared with what is left."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._next = max(watch.after, 4 * LEAST)
        self._losses: list[float] = []
        self._still = 0
        self.reason: str | None = None
        """The reason to look for another setting; empty if there is none."""

    def add(self, loss: float) -> str | None:
        """Add the loss of an update. Returns the reason."""
        self._losses.append(loss)
        count = len(self._losses)
        if count >= self._next:
            self._next = count + max(1, round(AGAIN * count))
            self._look(self._losses[count // 2 : 3 * count // 4], self._losses[3 * count // 4 :])
        return self.reason

    def _look(self, earlier: Sequence[float], later: Sequence[float]) -> None:
        watch, (was, was_error), (now, error) = self._watch, mean_of(earlier), mean_of(later)
        trained = watch.trained + len(self._losses)
        may_fall = (was - now + math.hypot(was_error, error)) / len(later)  # an update
        left = PART * abs(now) if watch.goal is None else now - watch.goal
        still = left > FAR * trained * max(may_fall, 0.0)
        risen = watch.begin is not None and now - error > watch.begin
        self._still = self._still + 1 if still or risen else 0
        after = f"after {len(self._losses)} updates"
        if watch.below is not None and now - error > watch.below:
            self.reason = f"the loss is {now:.4g} {after}: another setting had {watch.below:.4g} with fewer updates"
        elif self._still >= LOOKS:
            self.reason = f"the loss stands still: {was:.4g}, and {now:.4g} +- {error:.2g} {after}"
        else:
            self.reason = None


def mean_of(losses: Sequence[float]) -> tuple[float, float]:
    """The mean of losses, and its standard error."""
    return fmean(losses), stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
