"""A race of settings that are all trained from the beginning, and can be continued at any time.

Each is trained for a short while. The ones that fall behind keep their state, and continue from it if the leader stalls
(freeze-thaw, Swersky et al. 2014). So only the time of the losers is lost; the winner's time was training.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Outcome, Setting, Trial

#: The fewest updates of the first leg of a race.
LEAST = 10
#: The rank of settings that have not begun: before all that have begun, but after those that are better already.
NEW = -1e300


@dataclass(frozen=True, slots=True)
class LegEnd:
    """The state of a runner after a number of updates."""

    updates: int
    seconds: float
    loss: float
    noise: float
    """Standard error."""


@dataclass(slots=True)
class Runner:
    """A training from the beginning, in legs (consecutive trials)."""

    setting: Setting
    """The outcome of its last leg."""
    curve: list[LegEnd] = field(default_factory=list)
    """The points at the end of each leg."""
    number: int | None = None
    """The last leg's trial; ``None`` before the first leg."""
    spent_s: float = 0.0
    diverged: bool = False
    behind: bool = False
    """Whether the leader was better with the same number of samples."""
    spent: bool = False
    """Whether it was the leader and stalled."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """Take the outcome of a leg."""
        self.setting = trial.setting
        self.spent_s += outcome.spent_s
        if outcome.diverged:
            self.diverged = True
            return
        self.number = trial.number
        self.curve.append(LegEnd(self.updates + outcome.updates, self.seconds + outcome.seconds, outcome.loss, outcome.noise))

    @property
    def updates(self) -> int:
        return self.curve[-1].updates if self.curve else 0

    @property
    def seconds(self) -> float:
        return self.curve[-1].seconds if self.curve else 0.0

    @property
    def loss(self) -> float:
        return self.curve[-1].loss if self.curve else math.inf

    @property
    def noise(self) -> float:
        return self.curve[-1].noise if self.curve else 0.0

    @property
    def here(self) -> LegEnd:
        """The last point. There must have been a leg."""
        return self.curve[-1]

    def at(self, updates: int) -> LegEnd | None:
        """The loss after ``updates`` updates, interpolated between the ends of legs; ``None`` after the last one, or before any."""
        place = bisect_left([point.updates for point in self.curve], updates)
        if place == len(self.curve):
            return None
        after = self.curve[place]
        if place == 0 or after.updates == updates:
            return after
        before = self.curve[place - 1]
        part = (updates - before.updates) / (after.updates - before.updates)
        return LegEnd(
            updates,
            before.seconds + part * (after.seconds - before.seconds),
            before.loss + part * (after.loss - before.loss),
            max(before.noise, after.noise),
        )


def above(one: LegEnd, other: LegEnd, worse: float = 0.0) -> bool:
    """Whether a loss is clearly above another: by more than both standard errors, and by more than the fraction ``worse``."""
    return one.loss - other.loss > max(one.noise + other.noise, worse * abs(other.loss))


@dataclass(slots=True)
class Race:
    """The settings in the race."""

    worse: float
    """A loss is worse than another if it is higher by this fraction."""
    runners: list[Runner] = field(default_factory=list)

    def enter(self, setting: Setting) -> Runner:
        """Add a setting to those that are compared."""
        runner = Runner(setting)
        self.runners.append(runner)
        return runner

    def has(self, setting: Setting) -> bool:
        """Whether the setting is, or was, in the race."""
        return any(each.setting == setting for each in self.runners)

    @property
    def leader(self) -> Runner | None:
        """The runner with the lowest loss; of those that cannot be distinguished from it, the one with the largest steps, since a
        model that has not begun to learn shows no difference. ``None`` if all diverged."""
        return self._leader(self.runners)

    def leader_beside(self, lead: Runner) -> Runner | None:
        """The same among those with fewer groups than ``lead`` that were trained for at least half its time."""
        groups, least_s = lead.setting.groups, lead.seconds / 2
        return self._leader([each for each in self.runners if each.setting.groups < groups and each.seconds >= least_s])

    def _leader(self, runners: Sequence[Runner]) -> Runner | None:
        sound = [each for each in runners if not each.diverged and each.curve]
        if not sound:
            return None
        lowest = min(sound, key=lambda each: each.loss)
        return max((each for each in sound if not above(each.here, lowest.here, self.worse)), key=lambda each: pace(each.setting))

    def rivals(self, lead: Runner) -> list[Runner]:
        """The runners to try if the leader stalls: those that have not begun, then those furthest ahead of the leader's loss after
        the same number of samples. A runner clearly above that loss is behind, unless the leader has got worse than it."""
        found: list[tuple[float, float, Runner]] = []
        for each in self.runners:
            if each is lead or each.diverged or each.spent:
                continue
            then = lead.at(each.updates) if each.curve else None
            if each.curve and above(lead.here, each.here):  # it is not behind any more, since the leader has got worse
                found.append((-math.inf, each.loss, each))
            elif each.behind or (each.curve and (then is None or above(each.here, then))):
                each.behind = each.behind or then is not None
            else:
                found.append((NEW if then is None else each.loss - then.loss, -pace(each.setting), each))
        return [runner for _, _, runner in sorted(found, key=lambda row: row[:2])]


def better(one: LegEnd, other: LegEnd) -> bool:
    """Whether ``one`` is clearly below ``other``, or as low with half as many samples."""
    return above(other, one) or (2 * one.updates <= other.updates and not above(one, other))


def pace(setting: Setting) -> float:
    """The effective step size: with momentum each gradient counts 1 / (1 - momentum) times."""
    return setting.lr / (1 - min(setting.momentum, 0.999))


def first_leg(space: Space) -> int:
    """Updates of the first leg of a race."""
    return max(LEAST, round(space.probe / 5))
