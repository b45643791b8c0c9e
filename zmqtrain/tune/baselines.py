"""Baselines for the automatic optimizer: fixed settings, a rule-of-thumb schedule, and Bayesian optimization."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, Literal

from zmqtrain.errors import UsageError
from zmqtrain.tune.machine import Life, Machine
from zmqtrain.tune.search import Search
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

#: The momentum of most papers.
MOMENTUM, RATE = 0.9, 0.01
#: The rule of thumb divides the learning rate by 10 after each of these shares of the time.
DROPS = (0.5, 0.75, 1.0)

StrategyName = Literal["omnivore", "default", "sync", "async", "bayesian"]


class Fixed(Machine):
    """One number of groups with a momentum of 0.9, and the learning rate that is best in a sweep with them."""

    def __init__(self, space: Space, groups: int) -> None:
        self._groups = groups
        super().__init__(space)

    def _life(self) -> Life:
        best = yield from self._sweep()
        if best is None:
            return Done(None, "every learning rate diverges")
        while (end := self._end()) is None:
            updates = self._left(best.groups)
            yield from self._train(best, updates, "train", "the best learning rate")
            if self._diverged > 3:
                return Done(best, "training diverges every time")
            if self._diverged:
                best = Setting(best.groups, best.momentum, best.lr / 10)
        return end

    def _sweep(self) -> Generator[Trial, Outcome, Setting | None]:
        found: dict[float, float] = {}
        for rate in sorted(self._space.rates):
            setting = Setting(self._groups, MOMENTUM, rate)
            outcome = yield self._probe(setting, "learning rate", "all learning rates, with everything else fixed")
            found[rate] = outcome.loss
        best = self._best_rate(found)
        return Setting(self._groups, MOMENTUM, best) if math.isfinite(found[best]) else None


class RuleOfThumb(Machine):
    """One group, momentum 0.9, learning rate 0.01, divided by 10 after half of the time and again after three quarters."""

    def _life(self) -> Life:
        groups, before = self._space.groups[0], 0.0
        for number, share in enumerate(DROPS):
            setting = Setting(groups, MOMENTUM, RATE / 10**number)
            updates = math.ceil((share - before) * self._space.limit_s / self._update_s[groups])
            yield from self._train(setting, updates, "train", f"until {share:.0%} of the time")
            before = share
            if (end := self._end()) is not None:
                return end
        return Done(self._setting, "the schedule has ended")


class Bayesian(Machine):
    """Tree-structured Parzen estimators (optuna) over the same space, then training with the best."""

    def __init__(self, space: Space, trials: int, seed: int) -> None:
        self._count = trials
        self._study = _study(seed)
        super().__init__(space)

    def _life(self) -> Life:
        space = self._space
        best: tuple[float, Setting] | None = None
        for _ in range(self._count):
            asked = self._study.ask()
            setting = Setting(
                asked.suggest_categorical("groups", list(space.groups)),
                asked.suggest_float("momentum", 0.0, 0.95),
                asked.suggest_float("lr", min(space.rates), max(space.rates), log=True),
            )
            outcome = yield self._probe(setting, "bayesian", "the estimator expects it to be the best")
            # NaN would end the study, so a very large loss is reported instead.
            self._study.tell(asked, min(outcome.loss, 1e9) if not math.isnan(outcome.loss) else 1e9)
            if not outcome.diverged and (best is None or outcome.loss < best[0]):
                best = outcome.loss, setting
        if best is None:
            return Done(None, "every trial diverged")
        setting = best[1]
        self._decide("setting", f"the lowest loss of {self._count} trials: {best[0]:.4g}", groups=setting.groups)
        while (end := self._end()) is None:
            yield from self._train(setting, self._left(setting.groups), "train", "the best setting of all trials")
            if self._diverged > 3:
                return Done(setting, "training diverges every time")
            if self._diverged:
                setting = Setting(setting.groups, setting.momentum, setting.lr / 10)
        return end


def _study(seed: int) -> Any:
    """Make the study. Raises `UsageError` if optuna is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise UsageError("the Bayesian baseline needs optuna: pip install 'zmqtrain[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))


def strategies(space: Space, *, trials: int, seed: int) -> dict[StrategyName, Callable[[], Machine]]:
    """The constructor of each strategy, by name."""
    return {
        "omnivore": lambda: Search(space),
        "default": lambda: RuleOfThumb(space),
        "sync": lambda: Fixed(space, space.groups[0]),
        "async": lambda: Fixed(space, space.groups[-1]),
        "bayesian": lambda: Bayesian(space, trials, seed),
    }
