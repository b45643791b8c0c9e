"""Omnivore's automatic optimizer (Hadjis et al. 2016, algorithm 1 and appendix E), as a machine without clock or runs.

::

    search = Search(space)
    while not isinstance(trial := search.next(), Done):
        search.result(trial, outcome)          # of a run that somebody makes of the trial

* Cold start: one group, the largest momentum, learning rates from low to high until one is worse. Then twice as many groups, again
  and again, with momenta up to the best so far, until they are worse in the same time or saturate the cluster. Some training.
* g = g*: all momenta with the learning rate and a tenth of it, from one checkpoint. If the best momentum is 0 (after 0.1 and 0.2
  were tried), there is more implicit momentum than the model can use: half the groups, and again.
* Training with the winner, until the search has taken no more than its share of all time. Then once more, from there.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.plan.efficiency import fewest
from zmqtrain.tune.climb import next_momentum
from zmqtrain.tune.machine import Life, Machine, values_of
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

#: How often the learning rate is lowered where nothing trains at all.
MOST_LOWERED = 3
#: How often the first training goes on while the loss has hardly fallen.
MOST_COLD = 8
#: Of all time, after how much it does not.
COLDEST = 0.2
#: By what a tie's probes are longer.
LONGER = 2
#: By what a lower learning rate must be better in a short trial. It always looks good there: the noise of the steps falls at
#: once, and that progress is slower shows later.
LOWER = 0.1
#: How many times as much a loss must have fallen with less momentum than makes up for asynchrony: it, too, looks good at first.
LESS = 1.25
#: A momentum that is as good as none.
SMALL = 0.05
#: Of settings that are tied, how many are tried for longer.
MOST_TIED = 2
#: What the cold start may take of the time that there is for searching.
COLD = 0.5

Steps: TypeAlias = Generator[Trial, Outcome, "Setting | None"]
Grid: TypeAlias = dict[Setting, Outcome]


@dataclass(frozen=True, slots=True)
class Found:
    """The best of one number of groups."""

    setting: Setting
    loss: float
    rises: bool
    """It has only made things worse."""
    expected: bool
    """Its momentum is the one that makes up for asynchrony."""
    grid: Grid
    """All that was tried."""


class Search(Machine):
    """Omnivore's automatic optimizer."""

    def __init__(self, space: Space) -> None:
        self._total = max(space.momenta)  # of the optimizer and of asynchrony, as far as it is known
        super().__init__(space)

    def _life(self) -> Life:
        space = self._space
        if space.saturation is None:
            saturation = yield from self._speeds()
        else:
            saturation = space.saturation
            self._decide("saturation", "the fewest groups that are as fast as any, as predicted", groups=saturation)
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
            chosen = yield from self._against(found.setting, found.loss)
            groups = chosen.groups
            updates = self._due(groups, self.search_s - before_s)
            yield from self._train(chosen, updates, "train", f"the best of what was tried: {chosen}")
            rate = chosen.lr / 10 if self._diverged else chosen.lr
            if (end := self._end()) is not None:
                return end

    def _speeds(self) -> Generator[Trial, Outcome, int]:
        """Hardware efficiency of all numbers of groups, and g*."""
        space = self._space
        for groups in space.groups:
            setting = Setting(groups, 0.0, min(space.rates))
            reason = "how long an update takes with each number of groups"
            yield Trial(len(self.trials), setting, groups * space.speed, "probe", "speed", reason)
        measured = {groups: self._update_s[groups] for groups in space.groups}
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
                outcome = yield self._probe(Setting(one, momentum, rate), "learning rate", "from low to high until it gets worse")
                if outcome.diverged or (best is not None and self._worse(outcome.loss, best[0])):
                    self._decide("learning rate", f"{rate:g} {_fares(outcome)}: higher ones would be worse still", lr=rate)
                    break
                # Of rates that are as good the highest: a model that has not begun to learn shows none.
                best = min(outcome.loss, math.inf if best is None else best[0]), Setting(one, momentum, rate)
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
            trial = self._probe(setting, "groups", "as many groups as still help at first, with the momentum that adds up")
            if not self._affords(trial, part=COLD):
                self._enough(f"no more than {groups} groups at first")
                break
            outcome = yield trial
            if self._worse(outcome.loss, best[0]):
                fared = f"{_fares(outcome)} after {best[0]:.4g}"
                self._decide("groups", f"at first {more} groups are worse than {groups} in the same time ({fared})", groups=groups)
                break
            best, groups = (outcome.loss, setting), more
        return best[1]

    def _climb(
        self, first: Setting, momenta: Sequence[float], beat: float, phase: str, reason: str, found: Grid | None = None
    ) -> Generator[Trial, Outcome, Grid]:
        """Momenta from ``first``'s on, as long as they get better and there is time for more. Where the first is far from the loss
        to ``beat``, the others are left out. ``found``: what is known of this rate and number of groups."""
        found = dict(found or {})
        while True:
            tried = {each.momentum: self._score(each, outcome) for each, outcome in found.items()}
            momentum = next_momentum(momenta, first.momentum, tried)
            if momentum is None:
                return found
            setting = replace(first, momentum=momentum)
            trial = self._probe(setting, phase, reason)
            if found and not self._affords(trial):
                self._enough(f"no more momenta for {first.groups} groups")
                return found
            outcome = found[setting] = yield trial
            if len(found) == 1 and not outcome.diverged and outcome.loss > (1 + LOWER) * beat:
                return found

    def _score(self, setting: Setting, outcome: Outcome) -> float:
        """The loss by which momenta are compared. That of less momentum than makes up for asynchrony is taken to have fallen less
        than it has, others must be better by half their noise, and one that has risen is as bad as any."""
        start = self._first.get(self._start)
        if start is None or outcome.diverged:
            return outcome.loss
        if self._rises(outcome):
            return math.inf
        less = setting.momentum < self._near(setting.groups)
        loss = start - (start - outcome.loss) / LESS if less and outcome.loss < start else outcome.loss
        return loss if setting.momentum == self._near(setting.groups) else loss + outcome.noise / 2

    def _lowest(self, found: Mapping[Setting, Outcome]) -> Setting | None:
        sound = [setting for setting, outcome in found.items() if not outcome.diverged]
        return min(sound, key=lambda each: (self._score(each, found[each]), found[each].loss), default=None)

    def _enough(self, then: str) -> None:
        self._decide("time", f"the search has had its share of {self._space.limit_s:g} s: {then}", search_s=self.search_s)

    def _near(self, groups: int) -> float:
        """The momentum that adds up with the implicit one of so many groups to what was the best so far."""
        momentum = round(compensated(self._total, implicit_momentum(groups - 1)), 3)
        return momentum if momentum >= SMALL else 0.0

    def _against(self, chosen: Setting, loss: float) -> Generator[Trial, Outcome, Setting]:
        """Beyond the paper: other groups than so far must be better in the same time than what training has been done with."""
        known = self._setting
        if known is None or known.groups == chosen.groups or self._diverged:
            return chosen
        outcome = yield self._probe(known, "as before", "whether another number of groups is better at all")
        enough = 1 - LOWER if chosen.lr < known.lr else 1.0
        if outcome.diverged or loss <= enough * outcome.loss:
            return chosen
        self._decide("groups", f"{known} is better in the same time (loss {outcome.loss:.4g}): as before", **values_of(known))
        return known

    def _choose(self, groups: int, rate: float) -> Generator[Trial, Outcome, Found | None]:
        """The best momentum and learning rate, with fewer groups where the best momentum is 0. The heart of algorithm 1.

        Beyond it: half the groups must not be worse in the same time, or what was better is kept."""
        rates, lowered = [rate, rate / 10], 0
        more: Found | None = None  # the best with twice as many groups
        while True:
            found = yield from self._grid(groups, rates, math.inf if more is None else more.loss)
            fewer = self._space.fewer(groups)
            if more is not None and (found is None or self._worse(found.loss, more.loss)):
                fared = "everything diverges" if found is None else f"loss {found.loss:.4g} after {more.loss:.4g}"
                self._decide("groups", f"{groups} are worse in the same time ({fared})", groups=more.setting.groups)
                return (yield from self._settle(more))
            if found is not None:
                momentum = found.setting.momentum
                if not found.expected:
                    self._total = momentum + implicit_momentum(groups - 1)
                if fewer is None or (momentum > 0 and not found.rises):
                    if momentum == 0:
                        self._decide("momentum", "0 is the best, and there is nothing left to halve", groups=groups)
                    return (yield from self._settle(found))
            if fewer is not None:
                if found is not None and not self._affords(self._probe(replace(found.setting, groups=fewer), "grid", "")):
                    self._enough(f"{groups} groups it is")
                    return found
                self._decide("groups", f"{_why(found)}; half of {groups}", groups=fewer)
                groups, more = fewer, found
            elif lowered < MOST_LOWERED:
                lowered += 1
                rates = [rates[-1] / 10, rates[-1] / 100]
                self._decide("learning rate", "everything diverges, even with the fewest groups: lower ones", lr=rates[0])
            else:
                return None

    def _grid(self, groups: int, rates: Sequence[float], beat: float) -> Generator[Trial, Outcome, Found | None]:
        """The momentum that makes up for so many groups and those around it, with the first rate; with lower ones where that gets
        nowhere; then finer momenta where 0 wins. None where everything diverges. ``beat``: the loss of more groups."""
        space, reason = self._space, "momentum and learning rate at a fixed number of groups"
        found: Grid = {}
        near = self._near(groups)
        momenta = {*space.momenta, near, *(space.fine if near == 0 else ())}
        for rate in rates:
            before = self._lowest(found)
            if before is None:
                found = yield from self._climb(Setting(groups, near, rate), [*momenta], beat, "grid", reason)
                continue
            # Fewer groups are the better answer to a loss that rises.
            if not (self._stalled or (self._rises(found[before]) and space.fewer(groups) is None)):
                break
            enough = (1 - LOWER) * found[before].loss
            lower = yield from self._climb(replace(before, lr=rate), [*momenta], enough / (1 + LOWER), "grid", reason)
            best = self._lowest(lower)
            if best is not None and lower[best].loss <= enough:
                found |= lower
        best = self._lowest(found)
        if best is not None and best.momentum == 0 and near > 0 and groups > space.groups[0]:
            known = {setting: outcome for setting, outcome in found.items() if setting.lr == best.lr}
            reason = "small ones, before 0 counts as the best"
            found |= yield from self._climb(best, (*space.momenta, *space.fine), math.inf, "fine grid", reason, known)
            best = self._lowest(found)
        if best is None:
            return None
        self._decide("setting", f"the best of {len(found)}, with a loss of {found[best].loss:.4g}", **values_of(best))
        return Found(best, found[best].loss, self._rises(found[best]), best.momentum == near, found)

    def _settle(self, found: Found) -> Generator[Trial, Outcome, Found]:
        """Settings that can hardly be told apart from the one that was found are tried again for longer, if there is time. The
        momentum that makes up for asynchrony needs no such proof."""
        scores = {each: self._score(each, outcome) for each, outcome in found.grid.items()}
        tied = [each for each in sorted(scores, key=lambda each: scores[each]) if self._tied(found, each, scores)][:MOST_TIED]
        trials = [self._probe(setting, "tie", "the losses can hardly be told apart", times=LONGER) for setting in tied]
        if len(tied) < 2 or found.expected or not self._affords(*trials):
            return found
        self._decide(
            "tie", f"{len(tied)} settings are within {self._space.worse:.0%} or their noise: longer trials", tied=len(tied)
        )
        longer: Grid = {}
        for setting in tied:
            longer[setting] = yield self._probe(setting, "tie", "the losses can hardly be told apart", times=LONGER)
        best = self._lowest(longer)
        return found if best is None else replace(found, setting=best, loss=found.grid[best].loss)

    def _rises(self, outcome: Outcome) -> bool:
        """Whether it has only made things worse."""
        start = self._first.get(self._start)
        return start is not None and outcome.loss > (1 + LOWER) * start

    def _tied(self, found: Found, other: Setting, scores: Mapping[Setting, float]) -> bool:
        """Both have seen the same data in the same order, so most of their noise is the same, too."""
        noise = math.hypot(found.grid[found.setting].noise, found.grid[other].noise) / 2
        best = scores[found.setting]
        return math.isfinite(best) and abs(scores[other] - best) <= max(self._space.worse * abs(best), noise)

    def _worse(self, one: float, other: float) -> bool:
        return one > other + self._space.worse * abs(other)


def _why(found: Found | None) -> str:
    if found is None:
        return "every setting diverges"
    if found.setting.momentum > 0:
        return "the loss rises: too many groups for this learning rate"
    return "the best momentum is 0: asynchrony brings too much of its own"


def _fares(outcome: Outcome) -> str:
    return "diverges" if outcome.diverged else f"ends at {outcome.loss:.4g}"
