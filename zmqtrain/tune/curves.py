"""The trade-off over the number of groups: hardware efficiency, statistical efficiency and their product, as in figure 7."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.tune.hill_climbing import next_momentum
from zmqtrain.tune.machine import FOREVER_S, Life, Machine
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one number of groups, with its best momentum."""

    setting: Setting
    predicted_s: float
    """Predicted seconds of an update."""
    update_s: float
    """HE, measured."""
    updates: int | None
    """SE: updates to the target; ``None`` if it was not reached."""
    seconds: float | None
    """Seconds to the target."""

    def to_value(self) -> dict[str, Any]:
        """The point as JSON values."""
        return {
            "groups": self.setting.groups,
            "momentum": self.setting.momentum,
            "lr": self.setting.lr,
            "predicted_update_s": self.predicted_s,
            "update_s": self.update_s,
            "updates": self.updates,
            "seconds": self.seconds,
        }


class EveryNumberOfGroups(Machine):
    """Trains to the target with each number of groups and each momentum, at one learning rate: the best with one group.

    Momenta are tried from the one that compensates for asynchrony on, as long as they get better. A run that takes much longer
    than the best so far is ended."""

    def __init__(self, space: Space, most_updates: int, lr: float | None = None, beyond: float = 4.0) -> None:
        """``most_updates``: updates after which a run has failed to reach the target. ``lr``: used instead of a sweep. ``beyond``:
        how many times as long as the best so far a run may take."""
        self._most, self._lr, self._beyond = most_updates, lr, beyond
        super().__init__(space)

    def _life(self) -> Life:
        space, lr = self._space, self._lr
        if lr is None:
            found: dict[float, float] = {}
            for rate in sorted(space.rates):
                setting = Setting(space.groups[0], max(space.momenta), rate)
                outcome = yield self._probe(setting, "learning rate", "the best learning rate of a sweep")
                found[rate] = outcome.loss
            lr = self._best_rate(found)
        soonest = math.inf
        for groups in reversed(space.groups):
            near = compensated(max(space.momenta), implicit_momentum(groups - 1))
            tried: dict[float, float] = {}
            while (momentum := next_momentum(space.momenta, near, tried)) is not None:
                updates = math.ceil(min(self._beyond * soonest / self._update_s[groups], self._most))
                setting = Setting(groups, momentum, lr)
                reason = "train from the beginning to the target"
                outcome = yield Trial(len(self.trials), setting, updates, "train", "curve", reason, None, self._give_up_above())
                soonest = min(soonest, math.inf if outcome.reached is None else outcome.reached)
                tried[momentum] = FOREVER_S + outcome.loss if outcome.reached is None else outcome.reached
        return Done(None, "all numbers of groups were tried")

    def points(self) -> tuple[Point, ...]:
        """The best momentum of each number of groups."""
        best: dict[int, tuple[float, Trial, Outcome]] = {}
        for trial, outcome in self.trials:
            if trial.kind != "train":
                continue
            seconds = float("inf") if outcome.reached is None else outcome.reached
            known = best.get(trial.setting.groups)
            if known is None or (seconds, outcome.loss) < (known[0], known[2].loss):
                best[trial.setting.groups] = seconds, trial, outcome
        predicted = self._space.update_s
        return tuple(
            Point(trial.setting, predicted[groups], outcome.update_s, outcome.reached_updates, outcome.reached)
            for groups, (_, trial, outcome) in sorted(best.items())
        )


def penalties(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Each number of groups relative to the best: in time per update, in updates, and in their product."""
    fastest = min((point.update_s for point in points), default=0.0)
    fewest = min((point.updates for point in points if point.updates), default=None)
    soonest = min((point.seconds for point in points if point.seconds), default=None)
    for point in points:
        yield {
            **point.to_value(),
            "he": point.update_s / fastest if fastest else None,
            "se": point.updates / fewest if point.updates and fewest else None,
            "total": point.seconds / soonest if point.seconds and soonest else None,
        }
