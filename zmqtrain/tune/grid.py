"""Momenta that were tried with one number of groups, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqtrain.tune.trial import Outcome, Setting

#: By how much a loss has risen before it counts as that.
RISEN = 0.1


@dataclass(slots=True)
class Grid:
    """What came of each. They are compared with their noise: a short trial flatters less momentum."""

    expected: Setting
    """With the momentum that makes up for asynchrony. Another must be better by more than both standard errors."""
    begin: float | None
    """The loss from which all of them begin, if that is known."""
    worse: float
    """By so much of a loss another is the worse one."""
    tried: dict[Setting, Outcome] = field(default_factory=dict)

    @property
    def best(self) -> Setting | None:
        """None where all diverge."""
        best: Setting | None = None
        for setting in sorted(self.tried, key=self._distance):
            if not self.tried[setting].diverged and (best is None or self._beats(setting, best)):
                best = setting
        return best

    @property
    def groups(self) -> int:
        """How many all of them have."""
        return self.expected.groups

    @property
    def loss(self) -> float:
        """That of the best; infinite where all diverge."""
        best = self.best
        return math.inf if best is None else self.tried[best].loss

    @property
    def updates(self) -> int:
        """Of its longest trial."""
        return max((outcome.updates for outcome in self.tried.values()), default=0)

    @property
    def rises(self) -> bool:
        """Whether even the best has only made things worse."""
        best = self.best
        return best is not None and self.risen(self.tried[best])

    def risen(self, outcome: Outcome) -> bool:
        """Whether it has only made things worse."""
        return self.begin is not None and outcome.loss > (1 + RISEN) * self.begin

    def tied(self) -> Sequence[Setting]:
        """Those that can hardly be told apart from the best, and itself, by their losses."""
        best = self.best
        if best is None or self.rises:
            return ()
        lowest = self.tried[best]

        def near(other: Outcome) -> bool:
            # Both have seen the same data in the same order, so most of their noise is the same, too.
            noise = math.hypot(lowest.noise, other.noise) / 2
            return abs(other.loss - lowest.loss) <= max(self.worse * abs(lowest.loss), noise)

        return sorted((each for each in self.tried if near(self.tried[each])), key=lambda each: self.tried[each].loss)

    def _distance(self, setting: Setting) -> float:
        return abs(setting.momentum - self.expected.momentum)

    def _beats(self, setting: Setting, nearer: Setting) -> bool:
        one, other = self.tried[setting], self.tried[nearer]
        if self.risen(one) != self.risen(other):
            return self.risen(other)
        return one.loss + one.noise + other.noise < other.loss
