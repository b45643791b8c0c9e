"""Settings that are tried from the beginning side by side, and never forgotten.

All go a short way. What is left behind keeps where it has come to, and goes on from there should the leader stand still
(freeze-thaw, Swersky et al. 2014). So only what the losers took is lost; the winner's way was training.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from zmqtrain.tune.trial import Outcome, Setting, Trial

#: Those that have not begun come before all that have, and after those that are better already.
NEW = -1e300


@dataclass(frozen=True, slots=True)
class Point:
    """How far one has come."""

    updates: int
    seconds: float
    loss: float
    noise: float
    """Standard error."""


@dataclass(slots=True)
class Runner:
    """A training from the beginning, in legs."""

    setting: Setting
    """Of its last leg."""
    curve: list[Point] = field(default_factory=list)
    """The end of each leg."""
    number: int | None = None
    """The last leg's trial; none before the first, or where that began no leg."""
    spent_s: float = 0.0
    diverged: bool = False
    behind: bool = False
    """Its leader was better with as many samples."""
    spent: bool = False
    """It has led, and stood still."""

    def tell(self, trial: Trial, outcome: Outcome) -> None:
        """What came of a leg."""
        self.setting = trial.setting
        self.spent_s += outcome.spent_s
        if outcome.diverged:
            self.diverged = True
            return
        self.number = trial.number
        self.curve.append(Point(self.updates + outcome.updates, self.seconds + outcome.seconds, outcome.loss, outcome.noise))

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
    def here(self) -> Point:
        """The last point. Only after a leg."""
        return self.curve[-1]

    def at(self, updates: int) -> Point | None:
        """Where it was after so many updates, between the two legs' ends around them; none beyond the last one, or before any."""
        place = bisect_left([point.updates for point in self.curve], updates)
        if place == len(self.curve):
            return None
        after = self.curve[place]
        if place == 0 or after.updates == updates:
            return after
        before = self.curve[place - 1]
        part = (updates - before.updates) / (after.updates - before.updates)
        return Point(
            updates,
            before.seconds + part * (after.seconds - before.seconds),
            before.loss + part * (after.loss - before.loss),
            max(before.noise, after.noise),
        )


def above(one: Point, other: Point, worse: float = 0.0) -> bool:
    """Whether a loss is clearly above another: by more than both standard errors, and than ``worse`` of it."""
    return one.loss - other.loss > max(one.noise + other.noise, worse * abs(other.loss))


@dataclass(slots=True)
class Race:
    """Who takes part."""

    worse: float
    """By so much of a loss another is the worse one."""
    runners: list[Runner] = field(default_factory=list)

    def enter(self, setting: Setting) -> Runner:
        """One more."""
        runner = Runner(setting)
        self.runners.append(runner)
        return runner

    def has(self, setting: Setting) -> bool:
        """Whether it takes part, or did."""
        return any(each.setting == setting for each in self.runners)

    @property
    def leader(self) -> Runner | None:
        """The lowest loss; of those that cannot be told from it the one that learns fastest, since a model that has not begun shows
        no difference. None where all diverge."""
        sound = [each for each in self.runners if not each.diverged and each.curve]
        if not sound:
            return None
        lowest = min(sound, key=lambda each: each.loss)
        return max((each for each in sound if not above(each.here, lowest.here, self.worse)), key=lambda each: pace(each.setting))

    def rivals(self, lead: Runner) -> list[Runner]:
        """Whom to ask where the leader gets nowhere: those that have not begun, then who is furthest ahead of where the leader
        was after as many samples. Who is clearly above that is behind, as long as the leader does not get worse than it is."""
        found: list[tuple[float, float, Runner]] = []
        for each in self.runners:
            if each is lead or each.diverged or each.spent:
                continue
            then = lead.at(each.updates) if each.curve else None
            if each.curve and above(lead.here, each.here):  # whoever was behind is not, where the leader has got worse
                found.append((-math.inf, each.loss, each))
            elif each.behind or (each.curve and (then is None or above(each.here, then))):
                each.behind = each.behind or then is not None
            else:
                found.append((NEW if then is None else each.loss - then.loss, -pace(each.setting), each))
        return [runner for _, _, runner in sorted(found, key=lambda row: row[:2])]


def better(one: Point, other: Point) -> bool:
    """Whether it is clearly below another, or as low with half as many samples."""
    return above(other, one) or (2 * one.updates <= other.updates and not above(one, other))


def pace(setting: Setting) -> float:
    """How far an update moves in the end: with momentum each gradient counts 1 / (1 - momentum) times."""
    return setting.lr / (1 - min(setting.momentum, 0.999))
