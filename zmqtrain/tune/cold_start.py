"""How a search begins: settings race from the beginning, and more groups are tried as long as they help."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import replace

from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.plan.efficiency import fewest
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.tune.machine import Machine, values_of
from zmqtrain.tune.race import Race, Runner, above, first_leg, pace
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Outcome, Setting, Trial

#: How often the learning rate is lowered if nothing trains at all.
MOST_LOWERED = 3
#: Momenta that are closer to each other than this are treated as equal.
APART = 0.1
#: A momentum that is as good as none.
SMALL = 0.05
#: More groups are tried from the beginning if an update is faster by this factor.
WORTH = 1.4
#: The share of the search time that the cold start may take.
COLD = 0.5


class ColdStart(Machine):
    """Speeds, the race, and the number of groups that a model needs at first."""

    def __init__(self, space: Space) -> None:
        self._total = max(space.momenta)  # momentum of the optimizer and of asynchrony
        self._race = Race(space.worse)
        self._lead = Runner(Setting(space.groups[0], self._total, max(space.rates)))  # the current training
        super().__init__(space)

    def _speeds(self) -> Generator[Trial, Outcome, int]:
        """Measure the hardware efficiency of all numbers of groups, and g*."""
        for groups in self._space.groups:
            yield self._speed(groups)
        measured = {groups: self._update_s[groups] for groups in self._space.groups}
        found = fewest(measured)
        self._decide(
            "saturation", f"{found}: the smallest number of groups that is as fast as any", groups=found, update_s=measured
        )
        return found

    def _rates(self) -> Generator[Trial, Outcome, Runner | None]:
        """Learning rate and momentum for one group: from large steps to small ones, a short way each, until that gets no better.

        Smaller steps are better later; whether it is time for them is asked where training stands by then (`_glance`)."""
        space, one, race = self._space, self._space.groups[0], self._race
        phase = "learning rate"
        # The two largest momenta: the smaller one is between two rates, or has less noise at the highest.
        pairs = itertools.product(sorted(space.momenta)[-2:], space.rates)
        settings = sorted((Setting(one, *pair) for pair in pairs), key=pace, reverse=True)
        for setting in settings:
            runner, before = race.enter(setting), race.leader
            reason = "from large steps to small ones, as long as the loss improves"
            if not (yield from self._further(runner, first_leg(space), phase, reason)):
                break
            if runner.diverged:
                self._decide("learning rate", f"{setting} diverges", **values_of(setting))
            elif before is not None and not above(before.here, runner.here, space.worse):
                told = f"{setting} is no better ({runner.loss:.4g} after {before.loss:.4g}): smaller steps would be worse still"
                self._decide("learning rate", told, **values_of(setting))
                break
        lowest = settings[-1]
        for _ in range(MOST_LOWERED):
            if race.leader is not None:
                break
            lowest = replace(lowest, lr=lowest.lr / 10)
            self._decide("learning rate", "the lowest learning rate diverges: a tenth of it", lr=lowest.lr)
            yield from self._further(race.enter(lowest), first_leg(space), phase, "nothing trains yet")
        if (lead := race.leader) is not None:
            self._decide("learning rate", f"the lowest loss of one group: {lead.loss:.4g}", **values_of(lead.setting))
        return lead

    def _further(self, runner: Runner, updates: int, phase: str, reason: str) -> Generator[Trial, Outcome, bool]:
        """A leg of one, if there is time. Of several that none has been made of yet one is made in any case."""
        trial = self._leg(runner.setting, updates, phase, reason, runner.number)
        if self._race.leader is not None and not self._affords(trial, part=COLD):
            self._enough(f"{runner.setting} gets no further trial")
            return False
        runner.tell(trial, (yield trial))
        return True

    def _double(self, lead: Runner, saturation: int) -> Generator[Trial, Outcome, Runner]:
        """How many groups help a model that has learned nothing: twice as many, as long as they are better in the same time. At
        best they need as few updates, so that what they gain is what an update takes less."""
        space = self._space
        reason = "the most groups that still help at first, with the momentum that compensates for them"
        for more in [each for each in space.groups if each <= saturation]:
            groups = lead.setting.groups
            if more < 2 * groups or self._update_s[groups] < WORTH * self._update_s[more]:
                continue
            total = 1 - (1 - lead.setting.momentum) / groups
            rival = self._race.enter(Setting(more, self._near(more, total), lead.setting.lr))
            for point in lead.curve:
                updates = round((point.seconds - rival.seconds) / self._update_s[more])
                last = point is lead.curve[-1]
                if not (yield from self._further(rival, updates, "groups", reason)):
                    return lead
                good = not rival.diverged and not self._worse(rival.loss, point.loss)
                if not good or (last and not self._worse(point.loss, rival.loss)):
                    fared = "diverges" if rival.diverged else f"ends at {rival.loss:.4g} after {point.loss:.4g}"
                    told = f"at first {more} groups are not better than {groups} in the same time ({fared})"
                    self._decide("groups", told, groups=groups)
                    rival.behind = True
                    return lead
            lead = rival
        return lead

    def _near(self, groups: int, total: float | None = None) -> float:
        """The explicit momentum that gives, with the implicit momentum of ``groups`` groups, the wanted ``total``: at most the
        largest momentum of one group, and less if more groups could do without any."""
        momentum = round(compensated(self._total if total is None else total, implicit_momentum(groups - 1)), 3)
        return momentum if momentum >= SMALL else 0.0

    def _worse(self, one: float, other: float) -> bool:
        return one > other + self._space.worse * abs(other)

    def _enough(self, then: str) -> None:
        most = rounded_duration(self._space.share * self._space.limit_s)
        self._decide("time", f"the search may take {most} in all, too little to try more here: {then}", search_s=self.search_s)
