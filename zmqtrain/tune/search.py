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
from collections.abc import Generator, Sequence
from typing import TypeAlias

from zmqtrain.plan.efficiency import fewest
from zmqtrain.tune.machine import Life, Machine, values_of
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

#: How often the learning rate is lowered where nothing trains at all.
MOST_LOWERED = 3
#: By what a tie's probes are longer.
LONGER = 2

Steps: TypeAlias = Generator[Trial, Outcome, "Setting | None"]


class Search(Machine):
    """Omnivore's automatic optimizer."""

    def _life(self) -> Life:
        space = self._space
        saturation = space.saturation or (yield from self._speeds())
        cold = yield from self._cold_start(saturation)
        if cold is None:
            return Done(None, "no learning rate trains at all: even the lowest ones diverge")
        if space.cold:
            yield from self._train(cold, space.cold, "cold start", "the model leaves its first, steep part before many groups help")
            if (end := self._end()) is not None:
                return end
        groups, rate = saturation, cold.lr
        if groups > cold.groups:
            self._decide("groups", f"more than {groups} groups would be no faster (g*)", groups=groups)
        while True:
            before_s = self.search_s
            chosen = yield from self._choose(groups, rate)
            if chosen is None or self._diverged > MOST_LOWERED:
                return Done(self._setting, "nothing trains from here on: even one group with the lowest learning rates diverges")
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
                if best is None or outcome.loss < best[0]:
                    best = outcome.loss, Setting(one, momentum, rate)
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
            there = yield from self._descend(more, best[1])
            if there is None or self._worse(there[0], best[0]):
                fared = "all diverge" if there is None else f"loss {there[0]:.4g} after {best[0]:.4g}"
                self._decide("groups", f"at first {more} groups are worse than {groups} in the same time ({fared})", groups=groups)
                break
            best, groups = there, more
        return best[1]

    def _descend(self, groups: int, known: Setting) -> Generator[Trial, Outcome, tuple[float, Setting] | None]:
        """More groups never need more momentum, so larger ones than the best so far are left out; from there down, until it gets
        worse."""
        best: tuple[float, Setting] | None = None
        for momentum in sorted((each for each in self._space.momenta if each <= known.momentum), reverse=True):
            setting = Setting(groups, momentum, known.lr)
            outcome = yield self._probe(setting, "groups", "as many groups as still help at first; momenta up to the best so far")
            if not outcome.diverged and (best is None or outcome.loss < best[0]):
                best = outcome.loss, setting
            elif best is not None and self._worse(outcome.loss, best[0]):
                break
        return best

    def _choose(self, groups: int, rate: float) -> Steps:
        """The best momentum and learning rate, with fewer groups where the best momentum is 0. The heart of algorithm 1."""
        rates, lowered = [rate, rate / 10], 0
        while True:
            best = yield from self._grid(groups, rates)
            fewer = self._space.fewer(groups)
            if best is not None and (best.momentum > 0 or fewer is None):
                if best.momentum == 0:
                    self._decide("momentum", "0 is the best, and there is nothing left to halve", groups=groups)
                return best
            if fewer is not None:
                why = "every setting diverges" if best is None else "the best momentum is 0: asynchrony brings too much of its own"
                self._decide("groups", f"{why}; half of {groups}", groups=fewer)
                groups = fewer
            elif lowered < MOST_LOWERED:
                lowered += 1
                rates = [rates[-1] / 10, rates[-1] / 100]
                self._decide("learning rate", "everything diverges, even with the fewest groups: lower ones", lr=rates[0])
            else:
                return None

    def _grid(self, groups: int, rates: Sequence[float]) -> Steps:
        """All momenta with all rates, then finer ones where 0 wins. None where everything diverges."""
        found: dict[Setting, Outcome] = {}
        for rate in rates:
            for momentum in self._space.momenta:
                setting = Setting(groups, momentum, rate)
                found[setting] = yield self._probe(setting, "grid", "momentum and learning rate at a fixed number of groups")
        best = yield from self._best(found)
        if best is not None and best.momentum == 0 and groups > self._space.groups[0]:
            for momentum in self._space.fine:
                setting = Setting(groups, momentum, best.lr)
                found[setting] = yield self._probe(setting, "fine grid", "small ones, before 0 counts as the best")
            best = yield from self._best(found)
        if best is not None:
            loss = found[best].loss
            self._decide("setting", f"the lowest loss of {len(found)}: {loss:.4g}", **values_of(best), loss=loss)
        return best

    def _best(self, found: dict[Setting, Outcome]) -> Steps:
        """The lowest loss; those that can hardly be told apart are tried again for longer."""
        sound = {setting: outcome for setting, outcome in found.items() if not outcome.diverged}
        if not sound:
            return None
        lowest = min(sound.values(), key=lambda outcome: outcome.loss)
        tied = [each for each, outcome in sound.items() if self._tied(outcome, lowest)]
        if len(tied) > 1:
            why = f"{len(tied)} settings are within {self._space.worse:.0%} or their noise: longer trials"
            self._decide("tie", why, tied=len(tied))
            for setting in sorted(tied, key=lambda each: sound[each].loss)[:3]:
                longer = self._probe(setting, "tie", "the losses can hardly be told apart", times=LONGER)
                found[setting] = sound[setting] = yield longer
            tried = {setting: sound[setting] for setting in tied if not sound[setting].diverged}
            sound = tried or sound
        return min(sound, key=lambda setting: sound[setting].loss)

    def _tied(self, one: Outcome, other: Outcome) -> bool:
        margin = max(self._space.worse * abs(other.loss), math.hypot(one.noise, other.noise))
        return abs(one.loss - other.loss) <= margin

    def _worse(self, one: float, other: float) -> bool:
        return one > other + self._space.worse * abs(other)


def _fares(outcome: Outcome) -> str:
    return "diverges" if outcome.diverged else f"ends at {outcome.loss:.4g}"
