"""The heart of algorithm 1: the best groups, momentum and learning rate, from one checkpoint."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

from zmqtrain.exchange.momentum import implicit_momentum
from zmqtrain.tune.cold_start import APART, MOST_LOWERED, ColdStart
from zmqtrain.tune.grid import SearchGrid
from zmqtrain.tune.machine import values_of
from zmqtrain.tune.trial import Outcome, Setting, Trial

#: The factor by which probes are longer that decide a tie.
LONGER = 2
#: The fraction by which a lower learning rate must be better in a short trial.
LOWER = 0.1
#: The most tied settings that get a longer trial.
MOST_TIED = 2
#: The share of the search time that everything before the end of training may take.
GRID = 0.85


class Choice(ColdStart):
    """Short trials of groups and momenta, which start where training stands."""

    def _choose(self, groups: int, rate: float) -> Generator[Trial, Outcome, SearchGrid | None]:
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
                self._decide("momentum", "a momentum of 0 is the best, and fewer groups are not better", groups=groups)
                return (yield from self._settle(found))
            self._total = implicit_momentum(groups - 1)

    def _halve(self, groups: int, rates: Sequence[float]) -> Generator[Trial, Outcome, SearchGrid | None]:
        """The best with ever fewer groups, until they are worse in the same time; none where everything diverges.

        Of the first all momenta that may help are tried, of fewer groups only as many as it takes to be no worse."""
        best: SearchGrid | None = None
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
                    self._enough(f"{groups} groups are chosen")
                    return best
                self._decide("groups", f"{_why(found)}; half of {groups}", groups=fewer)
                groups = fewer
            elif best is not None or lowered == MOST_LOWERED:
                return best
            else:
                lowered += 1
                rates = [rates[-1] / 10, rates[-1] / 100]
                self._decide("learning rate", "everything diverges, even with the fewest groups: lower learning rates", lr=rates[0])

    def _grid(self, groups: int, rates: Sequence[float], enough: float = -math.inf) -> Generator[Trial, Outcome, SearchGrid]:
        """The momentum that compensates for ``groups`` groups and those below it, with the first rate; with lower rates if that
        makes no progress. ``enough``: a loss that is good enough."""
        reason = "momentum and learning rate at a fixed number of groups"
        found: SearchGrid | None = None
        for rate in rates:
            best = None if found is None else found.best
            if found is None or best is None:
                found = yield from self._climb(Setting(groups, self._near(groups), rate), "grid", reason, enough)
                continue
            # If the loss rises, fewer groups are the better answer.
            if not (self._stalled or (found.rises and self._space.fewer(groups) is None)):
                break
            lower = yield from self._climb(replace(best, lr=rate), "grid", reason, enough)
            if lower.loss <= (1 - LOWER) * found.loss:
                found = lower
        assert found is not None
        if (best := found.best) is not None:
            self._decide("setting", f"the best of {len(found.tried)}, with a loss of {found.loss:.4g}", **values_of(best))
        return found

    def _climb(self, first: Setting, phase: str, reason: str, enough: float) -> Generator[Trial, Outcome, SearchGrid]:
        """Momenta from ``first``'s down, as long as each is clearly better than those before and there is time for more; no further
        than to a loss that is ``enough``. If that ends at 0, small ones, too."""
        space, found = self._space, SearchGrid(first, self._first.get(self._start), self._space.worse)
        lower = sorted((each for each in space.momenta if each <= first.momentum - APART), reverse=True)
        yield from self._each(found, (first.momentum, *lower), phase, reason, enough)
        if found.best is not None and found.best.momentum == 0 and first.groups > space.groups[0]:
            fine = sorted(each for each in space.fine if each <= max(space.momenta))
            yield from self._each(found, fine, "fine grid", "small ones, before 0 counts as the best", enough)
        return found

    def _each(
        self, found: SearchGrid, momenta: Sequence[float], phase: str, reason: str, enough: float
    ) -> Generator[Trial, Outcome, None]:
        """Try one momentum after another for as long as each is the best so far."""
        for momentum in momenta:
            if found.best is not None and found.loss <= enough and not found.rises:
                return
            setting = replace(found.expected, momentum=momentum)
            if found.tried and setting not in self._seen and not self._affords(self._probe(setting, phase, reason), part=GRID):
                self._enough(f"no further momenta for {setting.groups} groups")
                return
            found.tried[setting] = yield from self._try(setting, phase, reason)
            if found.best is not None and found.best != setting:
                return

    def _settle(self, found: SearchGrid) -> Generator[Trial, Outcome, SearchGrid]:
        """Settings that can hardly be told apart from the one that was found are tried again for longer, if there is time. The
        momentum that makes up for asynchrony needs no such proof."""
        tied = found.tied()[:MOST_TIED]
        trials = [self._probe(setting, "tie", "the losses can hardly be distinguished", times=LONGER) for setting in tied]
        if len(tied) < 2 or found.best == found.expected or not self._affords(*trials, part=GRID):
            return found
        self._decide(
            "tie", f"{len(tied)} settings are within {self._space.worse:.0%} or their noise: longer trials", tied=len(tied)
        )
        longer = replace(found, tried={})
        for setting in tied:
            longer.tried[setting] = yield self._probe(setting, "tie", "the losses can hardly be distinguished", times=LONGER)
        return found if longer.best is None else longer

    def _against(self, chosen: Setting, loss: float) -> Generator[Trial, Outcome, Setting]:
        """Beyond the paper: other groups than so far must be better in the same time than what training has been done with; if
        they are fewer, not worse."""
        known = self._setting
        if known is None or known.groups == chosen.groups or self._diverged:
            return chosen
        outcome = yield from self._try(known, "as before", "whether another number of groups is better")
        if chosen.lr < known.lr:
            better = loss <= (1 - LOWER) * outcome.loss
        elif chosen.groups < known.groups:
            better = not self._worse(loss, outcome.loss)
        else:
            better = self._worse(outcome.loss, loss)
        if outcome.diverged or better:
            return chosen
        self._decide("groups", f"{known} is as good in the same time (loss {outcome.loss:.4g}): it is kept", **values_of(known))
        return known


def _why(found: SearchGrid) -> str:
    if found.best is None:
        return "every setting diverges"
    if found.rises:
        return "the loss rises: too many groups for this learning rate"
    if found.best.momentum == 0:
        return "the best momentum is 0: asynchrony alone may bring too much momentum"
    return "fewer may be as good, with gradients that are less stale"
