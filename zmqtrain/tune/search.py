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

This module has the order of it all and the training. `ColdStart` has the race, `Choice` the trials from a checkpoint, and
`StepSize` what is tried where training stands still, or where smaller steps may be better by now.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

from zmqtrain.tune.choice import LOWER, Choice
from zmqtrain.tune.cold_start import MOST_LOWERED
from zmqtrain.tune.lr_decay import LrDecay
from zmqtrain.tune.machine import Life, values_of
from zmqtrain.tune.race import above, first_leg
from zmqtrain.tune.space import Space
from zmqtrain.tune.step_size import StepSize
from zmqtrain.tune.trial import Done, Outcome, Setting, Trial, Watch

#: How often the first training is extended while the loss has hardly fallen.
MOST_COLD = 8
#: The part of all time after which it is not extended any more.
COLDEST = 0.2
#: Training is first checked after this many first legs; after a choice of groups and momentum, whose benefits show late, after this
#: many probes.
WATCH, LONG_WATCH = 4, 8
#: Training is divided for that only if it is this many times as long: each new start begins without momentum.
SPLIT = 1.5
#: If the time to the target is not known: the share of all time so far that a search may take, and the approximate number of its
#: probes.
EARLY, CHOICE = 0.25, 6
NOTHING_TRAINS = "nothing trains from here on: even one group with the lowest learning rates diverges"


class Search(Choice, StepSize):
    """Omnivore's automatic optimizer."""

    def __init__(self, space: Space) -> None:
        self._stood = False  # the last training made no progress
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
        self._stood = outcome.stood is not None and not outcome.diverged
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
                return self._after_divergence(setting)
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
