"""The machine that all strategies are: it says what to try next, and is told what came of it.

A strategy is a generator of trials; the machine's state is what it was told, so that it is resumed by telling it again (`replay`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from statistics import fmean
from typing import Any, Self, TypeAlias

from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Decision, Done, Outcome, Setting, Trial, Watch

#: A probe that has come to so many times the loss that it began with is given up.
GIVE_UP = 3.0
#: Of the very first loss: three times less than that is no divergence, but a batch that is harder than others.
LITTLE = 0.1
#: A search that has a time limit makes its probes so short that it can afford so many of them, if that is not too short.
PROBES = 18
#: Training that nothing limits is asked for this long: ten years.
FOREVER_S = 3e8

Life: TypeAlias = Generator[Trial, Outcome, Done]


class Machine(ABC):
    """Decides what to try next. Whoever runs the trials tells it what came of each."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._update_s = dict(space.update_s)
        self._told: list[Outcome] = []
        self.trials: list[tuple[Trial, Outcome]] = []
        """All so far, in order."""
        self._decisions: list[Decision] = []
        self._lengths: dict[int, float] = {}  # of probes since the last training, in updates
        self._seen: dict[Setting, Outcome] = {}  # what came of them
        self._first: dict[int | None, float] = {}  # where trials begin -> loss there
        self.search_s = 0.0
        """Time that went into probes, with starting and ending them."""
        self.train_s = 0.0
        self._start: int | None = None  # where training stands
        self._setting: Setting | None = None
        self._reached = self._finished = False
        self._diverged = 0  # trainings one after another
        self._stalled = False  # the last training has brought nothing
        self._drifted = False  # it was ended for that
        self._algorithm = self._life()
        self._now: Trial | Done
        self._advance(None)

    # The machine

    def next(self) -> Trial | Done:
        """What to do now; the same until it is told of it."""
        return self._now

    def result(self, trial: Trial, outcome: Outcome) -> None:
        """What came of the trial that `next` gave."""
        if trial != self._now:
            raise ValueError(f"this is not the trial that is under way: {trial}")
        self._told.append(outcome)
        self.trials.append((trial, outcome))
        if outcome.updates:
            self._update_s[trial.setting.groups] = outcome.update_s
        if math.isfinite(outcome.first):
            self._first.setdefault(trial.start, outcome.first)
        if trial.kind == "probe":
            self.search_s += outcome.spent_s
        else:
            self.train_s += outcome.spent_s
        self._advance(outcome)

    def decisions(self) -> list[Decision]:
        """Those since the last call."""
        found, self._decisions = self._decisions, []
        return found

    def to_value(self) -> dict[str, Any]:
        """All that it was told, as JSON values."""
        return {"outcomes": [outcome.to_value() for outcome in self._told]}

    def replay(self, value: Mapping[str, Any]) -> Self:
        """Make a new machine what the one was that `to_value` was called on. Raises ``ValueError`` for one of another space."""
        for each in value["outcomes"]:
            trial = self.next()
            if isinstance(trial, Done):
                raise ValueError("it was told more than this search asks for: it is of another space")
            self.result(trial, Outcome.from_value(each))
        self.decisions()
        return self

    @property
    def start(self) -> int | None:
        """The trial at whose end training stands; none: at the initial parameters."""
        return self._start

    @property
    def share(self) -> float:
        """Of all time so far, how much went into probes."""
        total = self.search_s + self.train_s
        return self.search_s / total if total else 0.0

    def _advance(self, outcome: Outcome | None) -> None:
        try:
            self._now = next(self._algorithm) if outcome is None else self._algorithm.send(outcome)
        except StopIteration as stop:
            done: Done = stop.value
            self._now = done
            self._decide("done", done.reason, reached=done.reached, search_s=self.search_s, train_s=self.train_s, share=self.share)

    def _decide(self, what: str, reason: str, **values: Any) -> None:
        self._decisions.append(Decision(what, reason, values))

    @abstractmethod
    def _life(self) -> Life:
        """The strategy."""

    # For strategies

    def _probe_s(self) -> float:
        """How long a probe is to take."""
        space = self._space
        return min(space.probe * self._update_s[space.groups[-1]], space.share * space.limit_s / PROBES)

    def _probe(self, setting: Setting, phase: str, reason: str, *, times: int = 1) -> Trial:
        groups = setting.groups
        # As long as the ones before, which it will be compared with: what was measured since is not what matters.
        length = self._lengths.setdefault(groups, max(self._space.probe / 4, self._probe_s() / self._update_s[groups]))
        updates = max(groups, round(times * length))
        return Trial(len(self.trials), setting, updates, "probe", phase, reason, self._start, self._give_up_above())

    def _leg(self, setting: Setting, updates: int, phase: str, reason: str, start: int | None) -> Trial:
        """A probe from there that may be gone on from."""
        first = self._first.get(None)
        above = None if first is None else GIVE_UP * first
        return Trial(len(self.trials), setting, max(setting.groups, updates), "probe", phase, reason, start, above, keeps=True)

    def _adopt(self, setting: Setting, number: int, spent_s: float) -> None:
        """What has been a probe, or some one after another, is training: it goes on from there. ``spent_s``: their time."""
        self.search_s -= spent_s
        self.train_s += spent_s
        self._setting, self._start, self._diverged = setting, number, 0
        outcome = self.trials[number][1]
        self._first[number] = outcome.loss if outcome.end is None else outcome.end
        self._reached = outcome.reached is not None
        self._lengths.clear()
        self._seen.clear()

    def _speed(self, groups: int) -> Trial:
        """A few steps from the beginning, which tell how long an update takes with so many groups."""
        space, reason = self._space, "how long an update takes with each number of groups"
        setting = Setting(groups, 0.0, min(space.rates))
        return Trial(len(self.trials), setting, groups * space.speed, "probe", "speed", reason)

    def _try(self, setting: Setting, phase: str, reason: str) -> Generator[Trial, Outcome, Outcome]:
        """A probe, unless the same one has been made from here."""
        if setting not in self._seen:
            self._seen[setting] = yield self._probe(setting, phase, reason)
        return self._seen[setting]

    def _around_s(self) -> float:
        """What starting and ending a run takes."""
        probes = [outcome for each, outcome in self.trials if each.kind == "probe"]
        return fmean(each.spent_s - each.seconds for each in probes) if probes else 0.0

    def _affords(self, *trials: Trial, part: float = 1.0) -> bool:
        """Whether there is time for these probes: all may take their share of the time limit. ``part``: of that share."""
        around_s = self._around_s()
        cost_s = sum(each.updates * self._update_s[each.setting.groups] + around_s for each in trials)
        return self.search_s + cost_s <= part * self._space.share * self._space.limit_s

    def _best_rate(self, losses: Mapping[float, float]) -> float:
        """Of learning rates that are as good as the best the highest: a model that has not begun to learn shows no difference."""
        lowest = min(losses.values())
        return max(rate for rate, loss in losses.items() if loss <= lowest + self._space.worse * abs(lowest))

    def _end(self) -> Done | None:
        if self._reached:
            return Done(self._setting, "the target is reached", reached=True)
        if self._finished:
            return Done(self._setting, "the job is through", reached=True)
        if self.search_s + self.train_s >= self._space.limit_s:
            return Done(self._setting, f"the time is up: {self._space.limit_s:g} s")
        return None

    def _give_up_above(self) -> float | None:
        first, begin = self._first.get(self._start), self._first.get(None, 0.0)
        return None if first is None else GIVE_UP * max(first, LITTLE * begin)

    def _left(self, groups: int) -> int:
        """Updates until the time is up."""
        left_s = self._space.limit_s - self.search_s - self.train_s
        return max(groups, math.ceil(left_s / self._update_s[groups]))

    def _due(self, groups: int, search_s: float) -> int:
        """Updates of training that make the search's share of all time small enough; to the end, where there would be too little
        time after it for another search like the last one (``search_s``)."""
        owed_s = self.search_s * (1 - self._space.share) / self._space.share - self.train_s
        left_s = self._space.limit_s - self.search_s - self.train_s
        wanted_s = max(owed_s, self._space.period * self._update_s[groups])
        if left_s - wanted_s < search_s / self._space.share:
            wanted_s = left_s
        return max(groups, math.ceil(min(wanted_s, left_s, FOREVER_S) / self._update_s[groups]))

    def _train(
        self,
        setting: Setting,
        updates: int,
        phase: str,
        reason: str,
        *,
        until: float | None = None,
        watch: Watch | None = None,
    ) -> Generator[Trial, Outcome, Outcome]:
        """Go on from where training stands. ``until``: a loss at which that is enough. ``watch``: whether it gets anywhere."""
        trial = Trial(
            len(self.trials),
            setting,
            updates,
            "train",
            phase,
            reason,
            self._start,
            self._give_up_above(),
            until,
            watch=watch,
        )
        self._setting = setting
        self._lengths.clear()
        self._seen.clear()
        outcome = yield trial
        self._reached, self._finished = outcome.reached is not None, outcome.finished
        if outcome.diverged:
            self._diverged += 1
            self._decide("diverged", f"training with {setting} diverged after all: back to its start", **values_of(setting))
            return outcome
        self._start, self._diverged = trial.number, 0
        self._stalled = outcome.stood is not None or outcome.loss > (1 - self._space.worse) * outcome.first
        self._first[trial.number] = outcome.loss if outcome.end is None else outcome.end
        self._drifted = outcome.drifted is not None
        if outcome.drifted is not None:
            self._decide("drift", outcome.drifted, **values_of(setting))
        if outcome.stood is not None:
            self._decide("stands still", outcome.stood, **values_of(setting))
        return outcome


def values_of(setting: Setting) -> dict[str, Any]:
    """As plain values."""
    return {"groups": setting.groups, "momentum": setting.momentum, "lr": setting.lr}
