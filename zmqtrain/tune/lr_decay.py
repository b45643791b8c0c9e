"""Decides when the learning rate decays: as soon as a lower rate brings the loss to the target.

A lower rate reduces the noise of the steps at once, and a probe shows by how much; but progress is slower from then on. So it is
lowered at the end, and probed only when the end is near.
"""

from __future__ import annotations

import math

#: A lower rate may reach the target at once from this multiple of it; and the multiple if training begins within that.
CLOSE, CLOSER = 1.4, 1.06
#: The part of the way from the first loss to the target after which this is possible, too.
WAY = 0.75
#: The smallest assumed effect: less cannot be measured.
GAIN = 0.02
#: The loss must have made up this part of the remaining difference before the next probe.
NEARER = 0.5


class LrDecay:
    """Says at which loss to probe a lower rate, and decides by the result of the probe."""

    def __init__(self, target: float | None, begin: float | None, first: float = math.inf) -> None:
        """``target``: the loss to reach; without one the rate never decays. ``begin``: the current loss. ``first``: the loss of an
        untrained model."""
        self.decayed = False
        """Whether the learning rate has been lowered."""
        self.until: float | None = None
        """The loss at which to probe; ``None``: never."""
        self._target = target
        if target is not None:
            close = max(CLOSER * target, min(CLOSE * target, target + (1 - WAY) * (first - target)))
            self.until = close if begin is None or begin > close else CLOSER * target

    def due(self, loss: float | None) -> bool:
        """Whether to probe at this loss."""
        return self.until is not None and loss is not None and loss <= self.until

    def near(self, loss: float | None) -> bool:
        """Whether training has ended because it reached this loss, within its noise."""
        return self.until is not None and loss is not None and loss <= (1 + GAIN) * self.until

    def probed(self, begin: float, decayed: float) -> bool:
        """Whether the rate decays now, after a probe at a lower rate went from ``begin`` to ``decayed``. If not, ``until`` says
        when to probe again."""
        assert self._target is not None
        if decayed <= self._target:
            self.until, self.decayed = None, True
            return True
        self.later(begin, self._target * begin / min(decayed, (1 - GAIN) * begin))
        return False

    def later(self, begin: float, at: float = math.inf) -> None:
        """Postpone the next probe from the loss ``begin`` to one closer to the target, not before the loss ``at``."""
        assert self._target is not None
        self.until = min(at, begin - NEARER * (begin - self._target))
        if self.until <= (1 + GAIN) * self._target:
            self.until = None  # nothing to wait for
