"""A model of training for searches: what a trial's loss would be, in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from zmqtrain.tune.search import Search
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial


@dataclass
class Landscape:
    """The loss falls exponentially, fastest where the momentum in all is ``best`` and the learning rate is ``rate``."""

    update_s: Mapping[int, float]
    best: float = 0.9
    rate: float = 0.01
    diverges_from: float = 0.05
    """Learning rates."""
    wild: float = 0.97
    """From this momentum in all on several groups diverge."""
    floor: float = 0.0
    state: dict[int | None, float] = field(default_factory=lambda: {None: math.log(10)})
    """Where training stood (logarithm of the loss) after each trial that may be gone on from."""

    def speed(self, setting: Setting) -> float | None:
        """By how much the logarithm of the loss falls an update; none where it diverges."""
        total = 1 - (1 - setting.momentum) / setting.groups
        if setting.lr >= self.diverges_from or (setting.groups > 1 and total >= self.wild):
            return None
        return 0.004 * math.exp(-((total - self.best) ** 2) * 30 - abs(math.log10(setting.lr / self.rate)))

    def run(self, trial: Trial, target: float | None = None) -> Outcome:
        begin, speed = self.state[trial.start], self.speed(trial.setting)
        update_s = self.update_s[trial.setting.groups]
        if speed is None:
            cut = max(1, trial.updates // 4)  # given up early
            return Outcome(cut, cut * update_s, math.exp(begin), math.inf)
        reached = None
        updates = trial.updates
        goes_on = trial.kind == "train" or trial.keeps
        if target is not None and goes_on and begin - speed * updates <= math.log(target):
            updates = max(1, math.ceil((begin - math.log(target)) / speed))
            reached = updates * update_s
        end = begin - speed * updates
        if goes_on:
            self.state[trial.number] = end
        scored = math.exp(begin - speed * updates * 5 / 6)
        told = None if reached is None else updates
        smoothed = math.exp(end), 20
        return Outcome(
            updates, updates * update_s, math.exp(begin), scored, 0.0, reached, told, end=math.exp(end), smoothed=smoothed
        )


def solve(space: Space, landscape: Landscape, target: float | None = None, most: int = 5000) -> tuple[Search, Done]:
    """Search until it is done."""
    search = Search(space)
    for _ in range(most):
        step = search.next()
        if isinstance(step, Done):
            return search, step
        search.result(step, landscape.run(step, target))
    raise AssertionError("the search does not end")
