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
from typing import TypeAlias

from zmqtrain.plan.efficiency import fewest
from zmqtrain.tune.machine import Life, Machine, values_of
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial

#: How often the learning rate is lowered where nothing trains at all.
MOST_LOWERED = 3
#: By what a tie's probes are longer.
LONGER = 2
#: By what a lower learning rate must be better in a short trial. It always looks good there: the noise of the steps falls at
#: once, and that progress is slower shows later.
LOWER = 0.1
#: Of settings that are tied, how many are tried for longer.
MOST_TIED = 3

Steps: TypeAlias = Generator[Trial, Outcome, "Setting | None"]


class Search(Machine):
    """Omnivore's automatic optimizer."""

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
            yield from self._train(cold, space.cold, "cold start", "the model leaves its first, steep part before many groups help")
            if (end := self._end()) is not None:
                return end
        groups, rate = saturation, cold.lr
        if groups > cold.groups:
            self._decide("groups", f"more than {groups} groups would be no faster (g*)", groups=groups)
        while True:
            before_s = self.search_s
            found = yield from self._choose(groups, rate)
            if found is None or self._diverged > MOST_LOWERED:
                return Done(self._setting, "nothing trains from here on: even one group with the lowest learning rates diverges")
            chosen = yield from self._against(*found)
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

    def _choose(self, groups: int, rate: float) -> Generator[Trial, Outcome, tuple[Setting, float] | None]:
        """The best momentum and learning rate, with fewer groups where the best momentum is 0. The heart of algorithm 1.

        Beyond it: half the groups must not be worse in the same time, or what was better is kept."""
        rates, lowered = [rate, rate / 10], 0
        more: tuple[Setting, float] | None = None  # the best with twice as many groups, and its loss
        while True:
            found = yield from self._grid(groups, rates)
            fewer = self._space.fewer(groups)
            if more is not None and (found is None or self._worse(found[1], more[1])):
                fared = "everything diverges" if found is None else f"loss {found[1]:.4g} after {more[1]:.4g}"
                self._decide("groups", f"{groups} are worse in the same time ({fared})", groups=more[0].groups)
                return more
            if found is not None and (found[0].momentum > 0 or fewer is None):
                if found[0].momentum == 0:
                    self._decide("momentum", "0 is the best, and there is nothing left to halve", groups=groups)
                return found
            if fewer is not None:
                why = "every setting diverges" if found is None else "the best momentum is 0: asynchrony brings too much of its own"
                self._decide("groups", f"{why}; half of {groups}", groups=fewer)
                groups, more = fewer, found
            elif lowered < MOST_LOWERED:
                lowered += 1
                rates = [rates[-1] / 10, rates[-1] / 100]
                self._decide("learning rate", "everything diverges, even with the fewest groups: lower ones", lr=rates[0])
            else:
                return None

    def _grid(self, groups: int, rates: Sequence[float]) -> Generator[Trial, Outcome, tuple[Setting, float] | None]:
        """All momenta, with the first rate; with lower ones where that gets nowhere; then finer momenta where 0 wins. None where
        everything diverges."""
        found: dict[Setting, Outcome] = {}
        reason = "momentum and learning rate at a fixed number of groups"
        for rate in rates:
            before = _lowest(found)
            if before is not None and not self._stuck(found[before]):
                break
            # The best momentum of another rate comes first. Where the new rate is worse with it, the others need not be tried.
            momenta = self._space.momenta if before is None else sorted(self._space.momenta, key=lambda m: m != before.momentum)
            for momentum in momenta:
                setting = Setting(groups, momentum, rate)
                found[setting] = yield self._probe(setting, "grid", reason)
                if before is None or momentum != before.momentum:
                    continue
                if found[setting].loss > (1 - LOWER) * found[before].loss:
                    del found[setting]
                    break
        longer: dict[Setting, Outcome] = {}
        best = yield from self._best(found, longer)
        if best is not None and best.momentum == 0 and groups > self._space.groups[0]:
            for momentum in self._space.fine:
                setting = Setting(groups, momentum, best.lr)
                found[setting] = yield self._probe(setting, "fine grid", "small ones, before 0 counts as the best")
            best = yield from self._best(found, longer)
        if best is None:
            return None
        loss = found[best].loss
        self._decide("setting", f"the lowest loss of {len(found)}: {longer.get(best, found[best]).loss:.4g}", **values_of(best))
        return best, loss

    def _best(self, found: dict[Setting, Outcome], longer: dict[Setting, Outcome]) -> Steps:
        """The lowest loss; those that can hardly be told apart are tried again for longer (``longer``: those that were)."""
        lowest = _lowest(found)
        if lowest is None:
            return None
        tied = [each for each, outcome in found.items() if not outcome.diverged and self._tied(outcome, found[lowest])]
        if len(tied) == 1:
            return lowest
        tried = sorted(tied, key=lambda each: found[each].loss)[:MOST_TIED]
        if not all(each in longer for each in tried):
            why = f"{len(tied)} settings are within {self._space.worse:.0%} or their noise: longer trials"
            self._decide("tie", why, tied=len(tied))
        for setting in tried:
            if setting not in longer:
                longer[setting] = yield self._probe(setting, "tie", "the losses can hardly be told apart", times=LONGER)
        return _lowest({setting: longer[setting] for setting in tried}) or lowest

    def _stuck(self, best: Outcome) -> bool:
        """Whether a learning rate is too high: the loss rises with it, or has stood still in the last training.

        Which of two rates is better a short trial cannot say: with the lower one the noise falls at once, and progress later."""
        start = self._first.get(self._start)
        return self._stalled or (start is not None and best.loss > (1 + LOWER) * start)

    def _tied(self, one: Outcome, other: Outcome) -> bool:
        """Both have seen the same data in the same order, so most of their noise is the same, too."""
        margin = max(self._space.worse * abs(other.loss), math.hypot(one.noise, other.noise) / 2)
        return abs(one.loss - other.loss) <= margin

    def _worse(self, one: float, other: float) -> bool:
        return one > other + self._space.worse * abs(other)


def _lowest(found: Mapping[Setting, Outcome]) -> Setting | None:
    sound = [setting for setting, outcome in found.items() if not outcome.diverged]
    return min(sound, key=lambda setting: found[setting].loss, default=None)


def _fares(outcome: Outcome) -> str:
    return "diverges" if outcome.diverged else f"ends at {outcome.loss:.4g}"
