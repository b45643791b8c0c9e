"""Omnivore's automatic optimizer (Hadjis et al. 2016, algorithm 1 and appendix E), as a machine without clock or runs.

::

    search = Search(space)
    while not isinstance(trial := search.next(), Done):
        search.result(trial, outcome)          # of a run that somebody makes of the trial

* Cold start: one group, the largest momentum, learning rates from low to high until one is worse. Then twice as many groups, again
  and again, with the momentum that makes up for them, as long as they are better in the same time. Some training.
* g = g*: momenta and learning rate, from one checkpoint. Then half the groups, and again, until they are worse in the same time.
* Training with the winner, until the search has taken no more than its share of all time. Then once more, from there.

Trials are short, and a short trial flatters whatever takes smaller steps: the noise of the steps falls at once, and that progress
is slower shows later, as the harm of old gradients does. So what can hardly be told apart is decided by what is known beforehand:
for the momentum that makes up for asynchrony, the higher learning rate and fewer groups.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeAlias

from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.plan.efficiency import fewest
from zmqtrain.tune.fall import Fall
from zmqtrain.tune.grid import Grid
from zmqtrain.tune.machine import Life, Machine, values_of
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

#: How often the learning rate is lowered where nothing trains at all.
MOST_LOWERED = 3
#: How often the first training goes on while the loss has hardly fallen.
MOST_COLD = 8
#: Of all time, after how much it does not.
COLDEST = 0.2
#: By what the probes are longer that decide a tie, or ask for a lower learning rate.
LONGER = 2
#: By what a lower learning rate must be better in a short trial.
LOWER = 0.1
#: Momenta that are nearer to each other than this are not told apart.
APART = 0.1
#: A momentum that is as good as none.
SMALL = 0.05
#: Of settings that are tied, how many are tried for longer.
MOST_TIED = 2
#: What the cold start may take of the time that there is for searching; and all before the end of training.
COLD = 0.5
GRID = 0.85

Steps: TypeAlias = Generator[Trial, Outcome, "Setting | None"]


class Search(Machine):
    """Omnivore's automatic optimizer."""

    def __init__(self, space: Space) -> None:
        self._total = max(space.momenta)  # momentum of the optimizer and of asynchrony
        super().__init__(space)

    def _life(self) -> Life:
        space = self._space
        if space.saturation is None:
            saturation = yield from self._speeds()
        else:
            saturation = space.saturation
            self._decide("saturation", "the fewest groups that are as fast as any, as far as is known", groups=saturation)
        cold = yield from self._cold_start(saturation)
        if cold is None:
            return Done(None, "no learning rate trains at all: even the lowest ones diverge")
        if space.cold:
            for _ in range(MOST_COLD):
                yield from self._train(
                    cold, space.cold, "cold start", "the model leaves its first, steep part before many groups help"
                )
                if (end := self._end()) is not None:
                    return end
                fallen = self._diverged or self._first[self._start] <= (1 - LOWER) * self._first[None]
                if fallen or self.train_s > COLDEST * space.limit_s:
                    break
                self._decide("cold start", "the loss has hardly fallen yet, so trials would tell nothing: as long again")
        self._stalled = False  # it has only just begun, and its learning rate is the best of a sweep
        groups, rate = saturation, cold.lr
        if groups > cold.groups:
            self._decide("groups", f"more than {groups} groups would be no faster (g*)", groups=groups)
        while True:
            before_s = self.search_s
            found = yield from self._choose(groups, rate)
            if found is None or self._diverged > MOST_LOWERED:
                return Done(self._setting, "nothing trains from here on: even one group with the lowest learning rates diverges")
            assert found.best is not None
            chosen = yield from self._against(found.best, found.loss)
            groups = chosen.groups
            rate = yield from self._long(chosen, self._due(groups, self.search_s - before_s))
            if (end := self._end()) is not None:
                return end
            if self._drifted and self._affords(*map(self._speed, space.groups)):  # hosts are not as fast as they were
                groups = yield from self._speeds()

    def _long(self, setting: Setting, updates: int) -> Generator[Trial, Outcome, float]:
        """Training, and the learning rate to go on with. Beyond the paper, it falls to a tenth as soon as that brings the loss to
        the target; the paper tries a tenth each time."""
        reason = f"the best of what was tried: {setting}"
        fall = Fall(self._space.target, self._first.get(self._start))
        while True:
            begin = self._first.get(self._start)
            if begin is not None and fall.due(begin):
                lower = replace(setting, lr=setting.lr / 10)
                if (yield from self._falls(fall, lower, begin)):
                    setting, reason = lower, "the learning rate falls, for the target is near"
            outcome = yield from self._train(setting, updates, "train", reason, until=fall.until)
            if outcome.diverged:
                return setting.lr / 10
            updates -= outcome.updates
            if not fall.near(outcome.end) or updates <= 0 or outcome.drifted or self._end() is not None:
                return setting.lr

    def _falls(self, fall: Fall, lower: Setting, begin: float) -> Generator[Trial, Outcome, bool]:
        """Whether the learning rate falls now."""
        reason = "whether a lower learning rate reaches the target by now"
        trial = replace(self._probe(lower, "fall", reason, times=LONGER), scored=1.0)  # what falls does so at once
        if not self._affords(trial):
            self._enough(f"no other learning rate at a loss of {begin:.4g}")
            fall.stop()
            return False
        outcome = yield trial
        loss = outcome.loss - outcome.noise
        if fall.hear(begin, loss):
            self._decide("learning rate", f"a tenth brings the loss from {begin:.4g} to {loss:.4g} at once", lr=lower.lr)
            return True
        then = "no sooner than it is reached anyway" if fall.until is None else f"later, at {fall.until:.4g}"
        self._decide("learning rate", f"a tenth would bring the loss from {begin:.4g} to {loss:.4g}: {then}", lr=10 * lower.lr)
        return False

    def _speeds(self) -> Generator[Trial, Outcome, int]:
        """Hardware efficiency of all numbers of groups, and g*."""
        for groups in self._space.groups:
            yield self._speed(groups)
        measured = {groups: self._update_s[groups] for groups in self._space.groups}
        found = fewest(measured)
        self._decide("saturation", "the fewest groups that are as fast as any", groups=found, update_s=measured)
        return found

    def _cold_start(self, saturation: int) -> Steps:
        """The learning rate for one group, then how many groups help a model that has learned nothing."""
        space, one = self._space, self._space.groups[0]
        rates, momentum = sorted(space.rates), max(space.momenta)
        best: tuple[float, Setting] | None = None
        for lowered in range(MOST_LOWERED + 1):
            for rate in rates:
                setting, reason = Setting(one, momentum, rate), "from low to high until it gets worse"
                if best is not None and not self._affords(self._probe(setting, "learning rate", reason), part=COLD):
                    self._enough(f"no higher learning rate than {best[1].lr:g}")
                    break
                outcome = yield from self._try(setting, "learning rate", reason)
                if outcome.diverged or (best is not None and self._worse(outcome.loss, best[0])):
                    self._decide("learning rate", f"{rate:g} {_fares(outcome)}: higher ones would be worse still", lr=rate)
                    break
                # Of rates that are as good the highest: a model that has not begun to learn shows none.
                best = min(outcome.loss, math.inf if best is None else best[0]), setting
            if best is not None:
                break
            rates = [rates[0] / 10]
            if lowered < MOST_LOWERED:
                self._decide("learning rate", "the lowest one diverges: a tenth of it", lr=rates[0])
        if best is None:
            return None
        self._decide("learning rate", f"the lowest loss of one group: {best[0]:.4g}", lr=best[1].lr)
        return (yield from self._double(best, saturation))

    def _double(self, best: tuple[float, Setting], saturation: int) -> Steps:
        space = self._space
        groups = best[1].groups
        for more in [each for each in space.groups if groups < each <= saturation]:
            if more < 2 * groups:
                continue
            setting = Setting(more, self._near(more), best[1].lr)
            trial = self._probe(
                setting, "groups", "as many groups as still help at first, with the momentum that makes up for them"
            )
            if not self._affords(trial, part=COLD):
                self._enough(f"no more than {groups} groups at first")
                break
            outcome = yield from self._try(setting, trial.phase, trial.reason)
            if not self._worse(best[0], outcome.loss):
                fared = f"{_fares(outcome)} after {best[0]:.4g}"
                self._decide(
                    "groups", f"at first {more} groups are no better than {groups} in the same time ({fared})", groups=groups
                )
                break
            best, groups = (outcome.loss, setting), more
        return best[1]

    def _climb(self, first: Setting, phase: str, reason: str, enough: float) -> Generator[Trial, Outcome, Grid]:
        """Momenta from ``first``'s down, as long as each is clearly better than those before and there is time for more; no further
        than to a loss that is ``enough``. If that ends at 0, small ones, too."""
        space, found = self._space, Grid(first, self._first.get(self._start), self._space.worse)
        lower = sorted((each for each in space.momenta if each <= first.momentum - APART), reverse=True)
        yield from self._each(found, (first.momentum, *lower), phase, reason, enough)
        if found.best is not None and found.best.momentum == 0 and first.groups > space.groups[0]:
            fine = sorted(each for each in space.fine if each <= max(space.momenta))
            yield from self._each(found, fine, "fine grid", "small ones, before 0 counts as the best", enough)
        return found

    def _each(
        self, found: Grid, momenta: Sequence[float], phase: str, reason: str, enough: float
    ) -> Generator[Trial, Outcome, None]:
        """As long as each is the best."""
        for momentum in momenta:
            if found.best is not None and found.loss <= enough and not found.rises:
                return
            setting = replace(found.expected, momentum=momentum)
            if found.tried and setting not in self._seen and not self._affords(self._probe(setting, phase, reason), part=GRID):
                self._enough(f"no more momenta for {setting.groups} groups")
                return
            found.tried[setting] = yield from self._try(setting, phase, reason)
            if found.best is not None and found.best != setting:
                return

    def _enough(self, then: str) -> None:
        self._decide("time", f"the search has had its share of {self._space.limit_s:g} s: {then}", search_s=self.search_s)

    def _near(self, groups: int) -> float:
        """The momentum that acts with the implicit one of so many groups like what is wanted in all: the largest momentum of one
        group, or less where more groups could do without any."""
        momentum = round(compensated(self._total, implicit_momentum(groups - 1)), 3)
        return momentum if momentum >= SMALL else 0.0

    def _against(self, chosen: Setting, loss: float) -> Generator[Trial, Outcome, Setting]:
        """Beyond the paper: other groups than so far must be better in the same time than what training has been done with; if
        they are fewer, not worse."""
        known = self._setting
        if known is None or known.groups == chosen.groups or self._diverged:
            return chosen
        outcome = yield from self._try(known, "as before", "whether another number of groups is better at all")
        if chosen.lr < known.lr:
            better = loss <= (1 - LOWER) * outcome.loss
        elif chosen.groups < known.groups:
            better = not self._worse(loss, outcome.loss)
        else:
            better = self._worse(outcome.loss, loss)
        if outcome.diverged or better:
            return chosen
        self._decide("groups", f"{known} is as good in the same time (loss {outcome.loss:.4g}): as before", **values_of(known))
        return known

    def _choose(self, groups: int, rate: float) -> Generator[Trial, Outcome, Grid | None]:
        """The best groups, momentum and learning rate: the heart of algorithm 1.

        It halves the groups where the best momentum is 0. Beyond it, they are halved before that until it is worse in the same
        time, each with the momentum that makes up for them."""
        self._total = max(self._space.momenta)
        while True:
            found = yield from self._halve(groups, [rate, rate / 10])
            if found is None:
                return None
            groups, rate = found.groups, found.expected.lr
            found = yield from self._grid(groups, [rate, rate / 10])  # all momenta that may help
            if found.best is None or found.best.momentum > 0:
                return (yield from self._settle(found))
            if self._space.fewer(groups) is None or self._total <= implicit_momentum(groups - 1):
                self._decide("momentum", "0 is the best, and fewer groups are no better", groups=groups)
                return (yield from self._settle(found))
            self._total = implicit_momentum(groups - 1)

    def _halve(self, groups: int, rates: Sequence[float]) -> Generator[Trial, Outcome, Grid | None]:
        """The best with ever fewer groups, until they are worse in the same time; none where everything diverges.

        Of the first all momenta that may help are tried, of fewer groups only as many as it takes to be no worse."""
        best: Grid | None = None
        lowest, lowered = math.inf, 0
        while True:
            enough = -math.inf if best is None else (1 + self._space.worse) * lowest
            found = yield from self._grid(groups, rates, enough)
            if best is not None and (found.best is None or self._worse(found.loss, lowest)):
                fared = "everything diverges" if found.best is None else f"loss {found.loss:.4g} after {lowest:.4g}"
                self._decide("groups", f"{groups} are worse in the same time ({fared})", groups=best.groups)
                return best
            if found.best is not None:
                best, lowest = found, min(lowest, found.loss)
            fewer = self._space.fewer(groups)
            if fewer is not None:
                if best is not None and not self._affords(self._probe(Setting(fewer, 0.0, rates[0]), "grid", ""), part=GRID):
                    self._enough(f"{groups} groups it is")
                    return best
                self._decide("groups", f"{_why(found)}; half of {groups}", groups=fewer)
                groups = fewer
            elif best is not None or lowered == MOST_LOWERED:
                return best
            else:
                lowered += 1
                rates = [rates[-1] / 10, rates[-1] / 100]
                self._decide("learning rate", "everything diverges, even with the fewest groups: lower ones", lr=rates[0])

    def _grid(self, groups: int, rates: Sequence[float], enough: float = -math.inf) -> Generator[Trial, Outcome, Grid]:
        """The momentum that makes up for so many groups and those below it, with the first rate; with lower ones where that gets
        nowhere. ``enough``: a loss that is good enough."""
        reason = "momentum and learning rate at a fixed number of groups"
        found: Grid | None = None
        for rate in rates:
            best = None if found is None else found.best
            if found is None or best is None:
                found = yield from self._climb(Setting(groups, self._near(groups), rate), "grid", reason, enough)
                continue
            # Fewer groups are the better answer to a loss that rises.
            if not (self._stalled or (found.rises and self._space.fewer(groups) is None)):
                break
            lower = yield from self._climb(replace(best, lr=rate), "grid", reason, enough)
            if lower.loss <= (1 - LOWER) * found.loss:
                found = lower
        assert found is not None
        if (best := found.best) is not None:
            self._decide("setting", f"the best of {len(found.tried)}, with a loss of {found.loss:.4g}", **values_of(best))
        return found

    def _settle(self, found: Grid) -> Generator[Trial, Outcome, Grid]:
        """Settings that can hardly be told apart from the one that was found are tried again for longer, if there is time. The
        momentum that makes up for asynchrony needs no such proof."""
        tied = found.tied()[:MOST_TIED]
        trials = [self._probe(setting, "tie", "the losses can hardly be told apart", times=LONGER) for setting in tied]
        if len(tied) < 2 or found.best == found.expected or not self._affords(*trials, part=GRID):
            return found
        self._decide(
            "tie", f"{len(tied)} settings are within {self._space.worse:.0%} or their noise: longer trials", tied=len(tied)
        )
        longer = replace(found, tried={})
        for setting in tied:
            longer.tried[setting] = yield self._probe(setting, "tie", "the losses can hardly be told apart", times=LONGER)
        return found if longer.best is None else longer

    def _worse(self, one: float, other: float) -> bool:
        return one > other + self._space.worse * abs(other)


def _why(found: Grid) -> str:
    if found.best is None:
        return "every setting diverges"
    if found.rises:
        return "the loss rises: too many groups for this learning rate"
    if found.best.momentum == 0:
        return "the best momentum is 0: asynchrony may bring too much of its own"
    return "fewer may be as good, from gradients that are less old"


def _fares(outcome: Outcome) -> str:
    return "diverges" if outcome.diverged else f"ends at {outcome.loss:.4g}"
