"""Whether training gets anywhere: it is asked again soon where it stands still, or is above what another setting has shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from zmqtrain.tune.trial import Watch

#: By which part of what it has seen a training goes on before it is looked at again.
AGAIN = 0.4
#: How often, one look after another, it must not be seen to fall.
LOOKS = 2
#: Losses of which a mean has an error.
LEAST = 4
#: A training stands still that would take so many times as long again as it has taken, even if it falls by one standard error more.
FAR = 2.0
#: Where no loss is to be reached: the part of the loss that is to go.
PART = 0.25


class Progress:
    """Watches one training's losses, update by update. What it finds may pass again: `reason` is how things are now.

    Of all so far the third quarter is compared with the last, so that the longer it goes on the smaller a fall can be seen. What
    falls too little to be seen need not stand still: what counts is what it may fall by, noise included, beside what is left."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._next = max(watch.after, 4 * LEAST)
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
        watch, (was, was_error), (now, error) = self._watch, mean_of(earlier), mean_of(later)
        trained = watch.trained + len(self._losses)
        may_fall = (was - now + math.hypot(was_error, error)) / len(later)  # an update
        left = PART * abs(now) if watch.goal is None else now - watch.goal
        still = left > FAR * trained * max(may_fall, 0.0)
        risen = watch.begin is not None and now - error > watch.begin
        self._still = self._still + 1 if still or risen else 0
        after = f"after {len(self._losses)} updates"
        if watch.below is not None and now - error > watch.below:
            self.reason = f"the loss is {now:.4g} {after}: another setting had {watch.below:.4g} with fewer"
        elif self._still >= LOOKS:
            self.reason = f"the loss stands still: {was:.4g}, and {now:.4g} +- {error:.2g} {after}"
        else:
            self.reason = None


def mean_of(losses: Sequence[float]) -> tuple[float, float]:
    """Their mean, and its standard error."""
    return fmean(losses), stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
