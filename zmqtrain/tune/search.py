"""Omnivore's automatic optimizer (Hadjis et al. 2016, algorithm 1 and appendix E), as a machine without clock or runs.

::

    search = Search(space)
    while not isinstance(trial := search.next(), Done):
        search.result(trial, outcome)          # of a run of the trial

* Cold start: one group, from large steps (rate and momentum) to small ones until that gets no better. Then twice as many groups,
  again and again, with the momentum that makes up for them, as long as they are better in the same time. Some training.
* g = g*: momenta and learning rate, from one checkpoint. Then half the groups, and again, until they are worse in the same time.
* Training with the winner, until the search has taken no more than its share of all time. Then once more, from there.

Trials are short, and a short trial flatters whatever takes smaller steps: the noise of the steps falls at once, and that progress
is slower shows later, as the harm of old gradients does. So what can hardly be told apart is decided by what is known beforehand:
for the momentum that makes up for asynchrony, the higher learning rate and fewer groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.plan.efficiency import fewest
from zmqtrain.tune.grid import Grid
from zmqtrain.tune.lr_decay import LrDecay
from zmqtrain.tune.machine import Life, Machine, values_of
from zmqtrain.tune.race import LegEnd, Race, Runner, above, better, pace
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial, Watch

#: How often the learning rate is lowered if nothing trains at all.
MOST_LOWERED = 3
#: How often the first training is extended while the loss has hardly fallen.
MOST_COLD = 8
#: The part of all time after which it is not extended any more.
COLDEST = 0.2
#: The factor by which probes are longer that decide a tie, or try a lower learning rate.
LONGER = 2
#: The fraction by which a lower learning rate must be better in a short trial.
LOWER = 0.1
#: Momenta that are closer to each other than this are treated as equal.
APART = 0.1
#: A momentum that is as good as none.
SMALL = 0.05
#: The most tied settings that get a longer trial.
MOST_TIED = 2
#: The fewest updates of the first leg of a race.
LEAST = 10
#: Training is first checked after this many first legs; after a choice of groups and momentum, whose benefits show late, after this
#: many probes.
WATCH, LONG_WATCH = 4, 8
#: Each time that looking for another setting brought nothing, training is this many times longer until the next attempt.
PATIENCE = 2.0
#: The cost limit of looking for another setting, as a part of the training so far; all of it if training has not come half way.
ASK = 0.5
#: If smaller steps bring the loss down by this part of what is left, nothing else is tried.
MUCH = 0.4
#: After how many first legs it is asked for the first time whether smaller steps bring a loss well on its way to the target; after
#: how many times as many updates again; which part of the way that is; and what it may take beside all training.
GLANCE, GLANCE_AGAIN, MOST, GLANCE_S = 4, 3.0, 0.15, 0.3
#: Training is divided for that only if it is this many times as long: each new start begins without momentum.
SPLIT = 1.5
#: If the time to the target is not known: the share of all time so far that a search may take, and the approximate number of its
#: probes.
EARLY, CHOICE = 0.25, 6
#: The share of all time so far that a probe of a lower learning rate may take.
FALLS = 0.1
#: More groups are tried from the beginning if an update is faster by this factor.
WORTH = 1.4
#: The share of the search time that the cold start may take, and that of everything before the end of training.
COLD = 0.5
GRID = 0.85
NOTHING_TRAINS = "nothing trains from here on: even one group with the lowest learning rates diverges"


class Search(Machine):
    """Omnivore's automatic optimizer."""

    def __init__(self, space: Space) -> None:
        self._total = max(space.momenta)  # momentum of the optimizer and of asynchrony
        self._race = Race(space.worse)
        self._lead = Runner(Setting(space.groups[0], self._total, max(space.rates)))  # the current training
        self._patience = 1.0  # the factor for the time until the next check of progress
        self._stood = False  # the last training made no progress
        self._faster: list[Setting] = []  # those that were left for smaller steps
        self._glance_at = GLANCE * first_leg(space)  # updates of the leader
        super().__init__(space)

    def _life(self) -> Life:
        space = self._space
        if space.saturation is None:
            saturation = yield from self._speeds()
        else:
            saturation = space.saturation
            self._decide(
                "saturation", "the smallest number of groups that is as fast as any, as far as is known", groups=saturation
            )
        lead = yield from self._rates()
        if lead is None:
            return Done(None, "no learning rate trains at all: even the lowest ones diverge")
        self._follow((yield from self._double(lead, saturation)))
        if (end := (yield from self._cold())) is not None:
            return end
        groups, rate = saturation, self._lead.setting.lr / (10 if self._diverged else 1)
        if groups > self._lead.setting.groups:
            self._decide("groups", f"more than {groups} groups would not be faster (g*)", groups=groups)
        while True:
            if self._diverged > MOST_LOWERED:
                return Done(self._setting, NOTHING_TRAINS)
            if self._drifted or (due := self._too_soon()) is None:
                before_s = self.search_s
                found = yield from self._choose(groups, rate)
                if found is None:
                    return Done(self._setting, NOTHING_TRAINS)
                assert found.best is not None
                chosen = yield from self._against(found.best, found.loss)
                groups = chosen.groups
                due = self._due(groups, self.search_s - before_s)
                watch = LONG_WATCH * found.updates
            else:
                chosen, watch = replace(self._lead.setting, lr=rate), WATCH * first_leg(self._space)
            rate = yield from self._long(chosen, due, watch)
            if (end := self._end()) is not None:
                return end
            if self._drifted and self._affords(*map(self._speed, space.groups)):  # the hosts' speeds have changed
                groups = yield from self._speeds()
            if self._stood and (yield from self._ask()):
                rate = self._lead.setting.lr
                if (end := self._end()) is not None:
                    return end

    def _follow(self, runner: Runner) -> None:
        """Make the runner's state the current training."""
        assert runner.number is not None
        self._lead = runner
        self._glance_at = max(GLANCE * first_leg(self._space), round(GLANCE_AGAIN * runner.updates))
        self._adopt(runner.setting, runner.number, runner.spent_s)

    def _go_on(
        self, setting: Setting, updates: int, phase: str, reason: str, *, until: float | None = None, watch: int = 0
    ) -> Generator[Trial, Outcome, Outcome]:
        """Training that ends if it makes no progress: after at least ``watch`` updates, and more each time that other settings
        brought nothing."""
        others = [each for each in self._race.runners if each is not self._lead and each.updates <= self._lead.updates]
        below = min((each.loss + each.noise for each in others), default=None)
        begin = self._lead.loss if setting == self._lead.setting else None
        watched = Watch(round(self._patience * watch), self._lead.updates, begin, self._space.target, below)
        number = len(self.trials)
        outcome = yield from self._train(setting, updates, phase, reason, until=until, watch=watched)
        if not outcome.diverged:
            self._lead.tell(self.trials[number][0], outcome)
        self._stood = outcome.stood is not None
        return outcome

    def _cold(self) -> Generator[Trial, Outcome, Done | None]:
        """The first training, extended while the loss has hardly fallen. Returns whether the search ends here."""
        space = self._space
        for _ in range(MOST_COLD if space.cold and space.target is None else 0):
            if (end := self._end()) is not None:
                return end
            reason = "the model leaves its first, steep part before many groups help"
            yield from self._stretch(self._lead.setting, space.cold, "cold start", reason, WATCH * first_leg(self._space))
            if self._stood and (yield from self._ask()):
                continue
            if self._diverged or self._lead.loss <= (1 - LOWER) * self._first[None] or self.train_s > COLDEST * space.limit_s:
                break
            self._decide("cold start", "the loss has hardly fallen yet, so trials would show nothing: the same length again")
        self._stalled = False  # it has only just begun, and its learning rate is the best of a sweep
        return self._end()

    def _too_soon(self) -> int | None:
        """Updates to train until a search for groups and momentum takes no more than its share of all time so far; none if it may
        begin now. As long as the time to the target is not known, a search might cost more than it gains."""
        space = self._space
        if space.target is None:
            return None
        cost_s = self.search_s + CHOICE * self._probe_s()
        owed_s = cost_s / EARLY - self.search_s - self.train_s
        if owed_s <= 0:
            return None
        groups = self._lead.setting.groups
        return min(self._left(groups), max(first_leg(self._space), math.ceil(owed_s / self._update_s[groups])))

    def _ask(self) -> Generator[Trial, Outcome, bool]:
        """Training has stalled: try a tenth of the learning rate, and the settings that fell behind, from where they stopped.
        Returns whether training continues with one of them."""
        lead, begin_s, space = self._lead, self.search_s, self._space
        goal, again = space.target or 0.0, self._patience > 1
        far = lead.loss > (self._first[None] + goal) / 2
        may_s = self.train_s * (1 if far else ASK)  # the longer it has trained, the more such trials may cost

        def affords(trial: Trial) -> bool:
            cost_s = trial.updates * self._update_s[trial.setting.groups]
            return self.search_s - begin_s + cost_s <= may_s and self._affords(trial)

        if self._faster and (yield from self._larger(lead, self._faster.pop(), affords)):
            return True
        lower = yield from self._lower(lead, affords, tenth=again)
        # A training that has learned much is closer to its end than the others; one that has learned little may be replaced.
        if lower is not None and (not far or lead.loss - lower.loss >= MUCH * (lead.loss - goal)):
            return self._smaller(lead, lower)
        here = lead.here if lower is None else lower.here
        if (far or again) and (yield from self._others(lead, here, affords, anew=far)):
            return True
        if lower is not None:
            return self._smaller(lead, lower)
        self._patience *= PATIENCE
        self._decide("stands still", "nothing that was tried is better: training continues, and is checked again later")
        return False

    def _lower(self, lead: Runner, affords: Callable[[Trial], bool], *, tenth: bool) -> Generator[Trial, Outcome, Runner | None]:
        """What smaller steps come to from where training stands, if that is better: the next slower setting, or a ``tenth`` of the
        rate. Nothing is lost by it where training stands still, so that its own error is all that counts."""
        setting = lead.setting if self._setting is None else self._setting
        runner = Runner(replace(setting, lr=setting.lr / 10) if tenth else self._slower(setting))
        reason = "whether smaller steps help now that training has stalled"
        trial = self._leg(runner.setting, max(first_leg(self._space), lead.updates // 5), "ask", reason, self._start)
        if not affords(trial):
            return None
        runner.tell(trial, (yield trial))
        return None if runner.diverged or runner.loss + runner.noise >= lead.loss else runner

    def _larger(self, lead: Runner, faster: Setting, affords: Callable[[Trial], bool]) -> Generator[Trial, Outcome, bool]:
        """Whether to go back to steps that were left for smaller ones. Short trials favour smaller steps, so that a loss that is no
        worse is enough."""
        runner = Runner(faster)
        reason = "whether steps have become too small"
        trial = self._leg(faster, max(first_leg(self._space), lead.updates // 5), "ask", reason, self._start)
        if not affords(trial):
            return False
        runner.tell(trial, (yield trial))
        if runner.diverged or above(runner.here, lead.here):
            return False
        self._decide("setting", f"{faster} is no worse: {runner.loss:.4g} after {lead.loss:.4g}", **values_of(faster))
        lead.tell(*self.trials[trial.number])
        self._adopt(faster, trial.number, runner.spent_s)
        return True

    def _smaller(self, lead: Runner, lower: Runner) -> bool:
        """Continue with smaller steps."""
        self._faster.append(lead.setting)
        self._decide(
            "setting", f"{lower.setting} brings the loss from {lead.loss:.4g} to {lower.loss:.4g}", **values_of(lower.setting)
        )
        assert lower.number is not None
        lead.tell(*self.trials[lower.number])
        self._adopt(lower.setting, lower.number, lower.spent_s)
        return True

    def _slower(self, setting: Setting) -> Setting:
        """The fastest that is at most half as fast, of these groups; of two that are as fast the one with more momentum."""
        momenta = {setting.momentum, *(each for each in self._space.momenta if each <= setting.momentum)}
        choices = [replace(setting, momentum=momentum, lr=lr) for momentum in momenta for lr in (setting.lr, setting.lr / 10)]
        slow = [each for each in choices if pace(each) <= pace(setting) / 2]
        return max(slow, key=lambda each: (round(pace(each), 9), each.momentum))

    def _others(
        self, lead: Runner, here: LegEnd, affords: Callable[[Trial], bool], *, anew: bool
    ) -> Generator[Trial, Outcome, bool]:
        """Those left behind, from where they were left: always the one that is furthest ahead of where the leader was after
        as many samples, until one is better than what training has come to (``here``), or as good with half as many samples.
        ``anew``: the leader's setting with less momentum, too."""
        race = self._race
        less = max((each for each in self._space.momenta if each <= lead.setting.momentum - APART), default=None)
        if anew and less is not None and not race.has(replace(lead.setting, momentum=less)):
            race.enter(replace(lead.setting, momentum=less))
        while runners := race.rivals(lead):
            runner = runners[0]
            if runner.curve and better(runner.here, replace(here, updates=lead.updates)):
                told = f"its loss is {runner.loss:.4g} after {runner.updates} updates, not {here.loss:.4g} after {lead.updates}"
                self._decide("setting", f"{runner.setting} continues instead: {told}", **values_of(runner.setting))
                lead.spent = True
                self._follow(runner)
                return True
            reason = "whether it does better than the training that has stalled"
            trial = self._leg(runner.setting, max(first_leg(self._space), runner.updates), "ask", reason, runner.number)
            if not affords(trial):
                break
            runner.tell(trial, (yield trial))
        return False

    def _long(self, setting: Setting, updates: int, watch: int) -> Generator[Trial, Outcome, float]:
        """Training, and the learning rate to go on with. Beyond the paper, it falls to a tenth as soon as that brings the loss to
        the target; the paper tries a tenth each time."""
        reason = f"the best setting that was tried: {setting}"
        decay = LrDecay(self._space.target, self._first.get(self._start), self._first.get(None, math.inf))
        while True:
            begin = self._first.get(self._start)
            if begin is not None and decay.due(begin):
                lower = replace(setting, lr=setting.lr / 10)
                if (yield from self._decays(decay, lower, begin)):
                    setting, reason = lower, "the learning rate is lowered, since the target is near"
                    if self._end() is not None:
                        return setting.lr
            outcome, updates = yield from self._stretch(setting, updates, "train", reason, watch, decay)
            assert self._setting is not None
            setting = self._setting
            if outcome.diverged:
                return setting.lr / 10
            near = decay.near(outcome.end)
            if not near or updates <= 0 or outcome.drifted or self._stood or self._end() is not None:
                return setting.lr

    def _stretch(
        self, setting: Setting, updates: int, phase: str, reason: str, watch: int, decay: LrDecay | None = None
    ) -> Generator[Trial, Outcome, tuple[Outcome, int]]:
        """Training, with a glance now and then at what smaller steps would do. Returns the last part's outcome, and what is left of
        the updates."""
        while True:
            part = updates
            # Once the rate has fallen the target is near: each beginning anew would cost a momentum.
            fallen = decay is not None and decay.decayed
            # Several groups are watched for drift, beside how their run began: it is not divided.
            divided = self._space.target is not None and setting.groups == 1 and not fallen
            if divided and updates > SPLIT * self._until_glance():
                part = self._until_glance()
            until = None if decay is None else decay.until
            outcome = yield from self._go_on(setting, part, phase, reason, until=until, watch=watch)
            updates -= outcome.updates
            over = outcome.diverged or outcome.drifted or outcome.stood or updates <= 0 or self._end() is not None
            if over or self._space.target is None or setting.groups > 1 or (decay is not None and decay.near(outcome.end)):
                return outcome, updates
            then = self._lead.at(self._lead.updates // 2)
            if then is not None and above(self._lead.here, then):
                self._stood = True
                told = f"the loss is {self._lead.loss:.4g} after {self._lead.updates} updates, {then.loss:.4g} after half as many"
                self._decide("stands still", told, **values_of(setting))
                return outcome, updates
            if (yield from self._glance()):
                setting = self._lead.setting
                if self._end() is not None:
                    return outcome, updates

    def _until_glance(self) -> int:
        """Updates until the next look at smaller steps."""
        return max(2 * first_leg(self._space), self._glance_at - self._lead.updates)

    def _glance(self) -> Generator[Trial, Outcome, bool]:
        """Whether the noise of the steps is most of what keeps the loss from the target: smaller ones bring it well on its way
        at once. Less than that is no reason, since they always look good in a short trial. Returns whether training goes on so."""
        lead, goal, setting, start = self._lead, self._space.target, self._setting, self._start
        assert goal is not None  # otherwise it is not known how much is left
        assert setting is not None
        assert start is not None
        self._glance_at = round(GLANCE_AGAIN * lead.updates)
        runner = Runner(self._slower(setting))
        reason = "whether noise is most of what separates the loss from the target"
        trial = self._leg(runner.setting, max(first_leg(self._space), lead.updates // 10), "ask", reason, start)
        cost_s = trial.updates * self._update_s[setting.groups] + 2 * self._around_s()
        if cost_s > GLANCE_S * self.train_s or not self._affords(trial):
            return False
        here, then = self._first[start], lead.at(lead.updates // 2)
        falls = 0.0 if then is None else trial.updates * max(0.0, (then.loss - lead.loss) / (lead.updates / 2))
        if here - goal < 2 * falls:  # it reaches the target soon in any case
            return False
        runner.tell(trial, (yield trial))
        if runner.diverged or here - falls - runner.loss < MOST * (here - goal):
            return False
        return self._smaller(lead, runner)

    def _soon(self, outcome: Outcome) -> float:
        """The loss that a probe would reach if it continued at its pace for half its length again."""
        over = min(self._space.smooth, outcome.updates // 3)
        if outcome.end is None or over < self._space.smooth:
            return outcome.loss
        slope = (outcome.loss - outcome.end) / ((outcome.updates - over) / 2)
        return outcome.end - slope * (outcome.updates + over) / 2

    def _decays(self, decay: LrDecay, lower: Setting, begin: float) -> Generator[Trial, Outcome, bool]:
        """Whether the learning rate is lowered now. If so, the probe that showed it becomes training."""
        may_s = FALLS * (self.search_s + self.train_s)
        updates = min(LONGER * self._probe(lower, "", "").updates, int(may_s / self._update_s[lower.groups]))
        reason = "whether a lower learning rate reaches the target now"
        trial = replace(self._leg(lower, updates, "fall", reason, self._start), scored=1.0)  # what falls does so at once
        if updates < first_leg(self._space) or not self._affords(trial):
            self._enough(f"the same learning rate at a loss of {begin:.4g}")
            decay.later(begin)
            return False
        outcome = yield trial
        loss = outcome.loss
        if decay.probed(begin, min(loss, self._soon(outcome))):
            self._decide("learning rate", f"a tenth brings the loss from {begin:.4g} to {loss:.4g} at once", lr=lower.lr)
            self._lead.tell(trial, outcome)
            self._adopt(lower, trial.number, outcome.spent_s)
            return True
        then = "training reaches the target without it" if decay.until is None else f"later, at {decay.until:.4g}"
        self._decide("learning rate", f"a tenth would bring the loss from {begin:.4g} to {loss:.4g}: {then}", lr=10 * lower.lr)
        return False

    def _speeds(self) -> Generator[Trial, Outcome, int]:
        """Measure the hardware efficiency of all numbers of groups, and g*."""
        for groups in self._space.groups:
            yield self._speed(groups)
        measured = {groups: self._update_s[groups] for groups in self._space.groups}
        found = fewest(measured)
        self._decide("saturation", "the smallest number of groups that is as fast as any", groups=found, update_s=measured)
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
            self._enough(f"no longer trial of {runner.setting}")
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
                self._enough(f"no further momenta for {setting.groups} groups")
                return
            found.tried[setting] = yield from self._try(setting, phase, reason)
            if found.best is not None and found.best != setting:
                return

    def _enough(self, then: str) -> None:
        self._decide("time", f"the search has used its share of {self._space.limit_s:g} s: {then}", search_s=self.search_s)

    def _near(self, groups: int, total: float | None = None) -> float:
        """The explicit momentum that gives, with the implicit momentum of ``groups`` groups, the wanted ``total``: at most the
        largest momentum of one group, and less if more groups could do without any."""
        momentum = round(compensated(self._total if total is None else total, implicit_momentum(groups - 1)), 3)
        return momentum if momentum >= SMALL else 0.0

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
                self._decide("momentum", "a momentum of 0 is the best, and fewer groups are not better", groups=groups)
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

    def _grid(self, groups: int, rates: Sequence[float], enough: float = -math.inf) -> Generator[Trial, Outcome, Grid]:
        """The momentum that compensates for ``groups`` groups and those below it, with the first rate; with lower rates if that
        makes no progress. ``enough``: a loss that is good enough."""
        reason = "momentum and learning rate at a fixed number of groups"
        found: Grid | None = None
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

    def _settle(self, found: Grid) -> Generator[Trial, Outcome, Grid]:
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

    def _worse(self, one: float, other: float) -> bool:
        return one > other + self._space.worse * abs(other)


def first_leg(space: Space) -> int:
    """Updates of the first leg of a race."""
    return max(LEAST, round(space.probe / 5))


def _why(found: Grid) -> str:
    if found.best is None:
        return "every setting diverges"
    if found.rises:
        return "the loss rises: too many groups for this learning rate"
    if found.best.momentum == 0:
        return "the best momentum is 0: asynchrony alone may bring too much momentum"
    return "fewer may be as good, with gradients that are less stale"
