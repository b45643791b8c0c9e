"""When the learning rate decays: as soon as a lower one brings the loss to the target.

The noise of the steps falls with it at once, by a part of the loss that a probe shows, and progress is slower from then on. So it
is done at the end, and asked for no sooner than that is near.
"""

from __future__ import annotations

import math

#: From which multiple of the target on it may bring the loss there at once; and if training begins within that.
CLOSE, CLOSER = 1.4, 1.06
#: And after which part of the way from the first loss to the target there is no more left than that.
WAY = 0.75
#: What it is taken to bring at least: less cannot be seen.
GAIN = 0.02
#: By which part of what is left the loss must have come nearer before it is asked again.
NEARER = 0.5


class LrDecay:
    """Says at which loss to ask (with a probe at a lower rate), and decides by what the probe shows."""

    def __init__(self, target: float | None, begin: float | None, first: float = math.inf) -> None:
        """``target``: the loss to reach; without one it never decays. ``begin``: the loss where training stands. ``first``: the
        loss of a model that has learned nothing."""
        self.decayed = False
        """Whether the learning rate has been lowered."""
        self.until: float | None = None
        """The loss at which to ask; none: not at all."""
        self._target = target
        if target is not None:
            close = max(CLOSER * target, min(CLOSE * target, target + (1 - WAY) * (first - target)))
            self.until = close if begin is None or begin > close else CLOSER * target

    def due(self, loss: float | None) -> bool:
        """Whether to ask at this loss."""
        return self.until is not None and loss is not None and loss <= self.until

    def near(self, loss: float | None) -> bool:
        """Whether training has ended at this loss because of that, give or take its noise."""
        return self.until is not None and loss is not None and loss <= (1 + GAIN) * self.until

    def probed(self, begin: float, decayed: float) -> bool:
        """Whether it decays now: a probe at a lower rate came from ``begin`` to ``decayed``. If not, ``until`` says when to ask."""
        assert self._target is not None
        if decayed <= self._target:
            self.until, self.decayed = None, True
            return True
        self.later(begin, self._target * begin / min(decayed, (1 - GAIN) * begin))
        return False

    def later(self, begin: float, at: float = math.inf) -> None:
        """Not now, at a loss of ``begin``, but nearer to the target; no sooner than ``at`` this loss."""
        assert self._target is not None
        self.until = min(at, begin - NEARER * (begin - self._target))
        if self.until <= (1 + GAIN) * self._target:
            self.until = None  # nothing to wait for
