"""The size of the steps during training: when smaller ones are tried, and what else is tried where training stands still."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace

from zmqtrain.tune.cold_start import APART, ColdStart
from zmqtrain.tune.lr_decay import LrDecay
from zmqtrain.tune.machine import values_of
from zmqtrain.tune.race import LegEnd, Runner, above, better, first_leg, pace
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Outcome, Setting, Trial
from zmqtrain.words import counted

#: Each time that looking for another setting brought nothing, training is this many times longer until the next attempt.
PATIENCE = 2.0
#: The cost limit of looking for another setting, as a part of the training so far; all of it if training has not come half way.
ASK = 0.5
#: If smaller steps bring the loss down by this part of what is left, nothing else is tried.
MUCH = 0.4
#: After how many first legs it is asked for the first time whether smaller steps bring a loss well on its way to the target; after
#: how many times as many updates again; which part of the way that is; and what it may take beside all training.
GLANCE, GLANCE_AGAIN, MOST, GLANCE_S = 4, 3.0, 0.15, 0.3
#: The factor by which a probe of a lower learning rate near the target is longer than others.
LONGER = 2
#: The share of all time so far that a probe of a lower learning rate may take.
FALLS = 0.1
#: It is left out if training reaches the target without it within this many times its length.
SOON = 4
#: More of them are never.
MOST_DOUBLINGS = 32


class StepSize(ColdStart):
    """Smaller steps, larger ones again, or another setting."""

    def __init__(self, space: Space) -> None:
        self._patience = 1.0  # the factor for the time until the next check of progress
        self._faster: list[Setting] = []  # those that were left for smaller steps
        self._glance_at = GLANCE * first_leg(space)  # updates of the leader
        super().__init__(space)

    def _follow(self, runner: Runner) -> None:
        """Make the runner's state the current training."""
        assert runner.number is not None
        self._lead = runner
        self._glance_at = max(GLANCE * first_leg(self._space), round(GLANCE_AGAIN * runner.updates))
        self._adopt(runner.setting, runner.number, runner.spent_s)

    def _after_divergence(self, setting: Setting) -> float:
        """Training with ``setting`` has diverged: the learning rate to go on with. With a target, where more groups did that soon
        after they had seemed to help in the race, fewer go on from the end of their own leg of it. (Without one, a grid has chosen
        the groups, and is made again.)"""
        lead = self._lead
        fewer = self._race.leader_beside(lead) if setting.groups == lead.setting.groups else None
        if fewer is None or self._space.target is None:
            return setting.lr / 10
        told = f"{setting.groups} groups diverge: {fewer.setting} continues instead"
        self._decide("groups", told, **values_of(fewer.setting))
        lead.diverged = True
        self._follow(fewer)
        return fewer.setting.lr

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

    def _decays(self, decay: LrDecay, lower: Setting, begin: float) -> Generator[Trial, Outcome, bool]:
        """Whether the learning rate is lowered now. If so, the probe that showed it becomes training."""
        may_s = FALLS * (self.search_s + self.train_s)
        updates = min(LONGER * self._probe(lower, "", "").updates, int(may_s / self._update_s[lower.groups]))
        if (left := self._left_at_this_pace()) < SOON * updates:
            soon = counted(max(1, math.ceil(left)), "update")
            self._decide("learning rate", f"training reaches the target in about {soon} as it is", lr=10 * lower.lr)
            decay.later(begin)
            return False
        reason = "whether a lower learning rate reaches the target now"
        trial = replace(self._leg(lower, updates, "fall", reason, self._start), scored=1.0)  # what falls does so at once
        if updates < first_leg(self._space) or not self._affords(trial):
            self._enough(f"the learning rate stays, at a loss of {begin:.4g}")
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

    def _left_at_this_pace(self) -> float:
        """Updates to the target, if each doubling of training lowers the loss by as much as the last one; infinite if that lowered
        nothing. Losses fall ever more slowly, so that a straight line would be too hopeful."""
        lead, goal = self._lead, self._space.target
        then = lead.at(lead.updates // 2)
        if goal is None or then is None or then.loss <= lead.loss:
            return math.inf
        doublings = max(0.0, lead.loss - goal) / (then.loss - lead.loss)
        return lead.updates * (2 ** min(doublings, MOST_DOUBLINGS) - 1)

    def _soon(self, outcome: Outcome) -> float:
        """The loss that a probe would reach if it continued at its pace for half its length again."""
        over = min(self._space.smooth, outcome.updates // 3)
        if outcome.end is None or over < self._space.smooth:
            return outcome.loss
        slope = (outcome.loss - outcome.end) / ((outcome.updates - over) / 2)
        return outcome.end - slope * (outcome.updates + over) / 2
