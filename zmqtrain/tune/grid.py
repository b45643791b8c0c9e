"""The momenta that were tried with one number of groups, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqtrain.tune.trial import Outcome, Setting

#: A loss counts as risen if it is higher by this factor.
RISEN = 0.1


@dataclass(slots=True)
class SearchGrid:
    """The results. They are compared with regard to noise: a short trial favours less momentum."""

    expected: Setting
    """The setting with the momentum that compensates for asynchrony. Another must be better by more than both standard errors."""
    begin: float | None
    """The loss at which all trials begin, if it is known."""
    worse: float
    """A loss is worse than another if it is higher by this fraction."""
    tried: dict[Setting, Outcome] = field(default_factory=dict)

    @property
    def best(self) -> Setting | None:
        """The best trial; ``None`` if all diverged."""
        best: Setting | None = None
        for setting in sorted(self.tried, key=self._distance):
            if not self.tried[setting].diverged and (best is None or self._beats(setting, best)):
                best = setting
        return best

    @property
    def groups(self) -> int:
        """The number of groups of all trials."""
        return self.expected.groups

    @property
    def loss(self) -> float:
        """The loss of the best trial; infinite if all diverged."""
        best = self.best
        return math.inf if best is None else self.tried[best].loss

    @property
    def updates(self) -> int:
        """The updates of the longest trial."""
        return max((outcome.updates for outcome in self.tried.values()), default=0)

    @property
    def rises(self) -> bool:
        """Whether even the best trial has increased the loss."""
        best = self.best
        return best is not None and self.risen(self.tried[best])

    def risen(self, outcome: Outcome) -> bool:
        """Whether the trial has increased the loss."""
        return self.begin is not None and outcome.loss > (1 + RISEN) * self.begin

    def tied(self) -> Sequence[Setting]:
        """The trials whose losses can hardly be distinguished from the best, including the best."""
        best = self.best
        if best is None or self.rises:
            return ()
        lowest = self.tried[best]

        def near(other: Outcome) -> bool:
            # All trials have seen the same data in the same order, so most of their noise is the same, too.
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
