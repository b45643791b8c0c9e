"""The base of all strategies: a machine that says what to try next, and takes the result.

A strategy is a generator of trials; the machine's state consists of the results so far, so it is resumed by replaying them
(`replay`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, Self, TypeAlias

from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Baseline, Done, Outcome, SearchDecision, Setting, Trial, Watch

#: A probe is given up if its loss reaches this multiple of its first loss.
GIVE_UP = 3.0
#: A loss below this fraction of the very first one is not a divergence, even if it has tripled: the batch may just be a hard one.
LITTLE = 0.1
#: A search with a time limit shortens its probes so that it can afford this many of them, if they do not get too short.
PROBES = 18
#: The length of unlimited training in seconds: ten years.
FOREVER_S = 3e8

Life: TypeAlias = Generator[Trial, Outcome, Done]


class Machine(ABC):
    """Decides what to try next. Its caller runs the trials and passes on the results."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._update_s = dict(space.update_s)
        self._told: list[Outcome] = []
        self.trials: list[tuple[Trial, Outcome]] = []
        """All trials so far, in order."""
        self._decisions: list[SearchDecision] = []
        self._lengths: dict[int, float] = {}  # lengths of the probes since the last training, in updates
        self._seen: dict[Setting, Outcome] = {}  # their outcomes
        self._first: dict[int | None, float] = {}  # the starting point of trials -> the loss there
        self.search_s = 0.0
        """Seconds spent on probes, including their start and end."""
        self.train_s = 0.0
        self._start: int | None = None  # the number of the trial at whose end training stands
        self._setting: Setting | None = None
        self._reached = self._finished = False
        self._diverged = 0  # trainings one after another
        self._stalled = False  # the last training made no progress
        self._drifted = False  # it was ended for that reason
        self._baseline: dict[int, Baseline] = {}  # groups -> their staleness when training with them began
        self._algorithm = self._life()
        self._now: Trial | Done
        self._advance(None)

    # The machine

    def next(self) -> Trial | Done:
        """The next trial, or the end; the same until its result is given."""
        return self._now

    def result(self, trial: Trial, outcome: Outcome) -> None:
        """Take the outcome of the trial that `next` returned."""
        if trial != self._now:
            raise ValueError(f"this is not the trial that is running: {trial}")
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

    def decisions(self) -> list[SearchDecision]:
        """The decisions since the last call."""
        found, self._decisions = self._decisions, []
        return found

    def to_value(self) -> dict[str, Any]:
        """All results so far, as JSON values."""
        return {"outcomes": [outcome.to_value() for outcome in self._told]}

    def replay(self, value: Mapping[str, Any]) -> Self:
        """Bring a new machine to the state that `to_value` wrote. Raises ``ValueError`` if it belongs to a different space."""
        for each in value["outcomes"]:
            trial = self.next()
            if isinstance(trial, Done):
                raise ValueError("it has more results than this search asks for, so it belongs to a different search")
            self.result(trial, Outcome.from_value(each))
        self.decisions()
        return self

    @property
    def start(self) -> int | None:
        """The trial at whose end training stands; ``None``: the initial parameters."""
        return self._start

    @property
    def share(self) -> float:
        """The share of all time so far that was spent on probes."""
        total = self.search_s + self.train_s
        return self.search_s / total if total else 0.0

    def _advance(self, outcome: Outcome | None) -> None:
        try:
            trial = next(self._algorithm) if outcome is None else self._algorithm.send(outcome)
            self._now = trial if trial.start is None else replace(trial, before=self._before(trial.start))
        except StopIteration as stop:
            done: Done = stop.value
            self._now = done
            self._decide("done", done.reason, reached=done.reached, search_s=self.search_s, train_s=self.train_s, share=self.share)

    def _decide(self, what: str, reason: str, **values: Any) -> None:
        self._decisions.append(SearchDecision(what, reason, values))

    def _before(self, start: int) -> tuple[float, int] | None:
        """The smoothed loss at the end of the trial ``start``, and of how many losses it is."""
        return self.trials[start][1].smoothed

    @abstractmethod
    def _life(self) -> Life:
        """The strategy."""

    # For strategies

    def _probe_s(self) -> float:
        """The length of a probe in seconds."""
        space = self._space
        return min(space.probe * self._update_s[space.groups[-1]], space.share * space.limit_s / PROBES)

    def _probe(self, setting: Setting, phase: str, reason: str, *, times: int = 1) -> Trial:
        groups = setting.groups
        # As long as the earlier probes, with which it will be compared, even if other speeds were measured since.
        length = self._lengths.setdefault(groups, max(self._space.probe / 4, self._probe_s() / self._update_s[groups]))
        updates = max(groups, round(times * length))
        return Trial(len(self.trials), setting, updates, "probe", phase, reason, self._start, self._give_up_above())

    def _leg(self, setting: Setting, updates: int, phase: str, reason: str, start: int | None) -> Trial:
        """A probe from ``start`` that other trials may continue."""
        first = self._first.get(None)
        above = None if first is None else GIVE_UP * first
        return Trial(len(self.trials), setting, max(setting.groups, updates), "probe", phase, reason, start, above, keeps=True)

    def _adopt(self, setting: Setting, number: int, spent_s: float) -> None:
        """Turn a probe, or a chain of probes, into training that continues from its end. ``spent_s``: their time."""
        self.search_s -= spent_s
        self.train_s += spent_s
        self._setting, self._start, self._diverged = setting, number, 0
        outcome = self.trials[number][1]
        self._first[number] = outcome.loss if outcome.end is None else outcome.end
        self._reached = outcome.reached is not None
        self._lengths.clear()
        self._seen.clear()

    def _speed(self, groups: int) -> Trial:
        """A few steps from the beginning, which measure how long an update takes with ``groups`` groups."""
        space, reason = self._space, "to measure how long an update takes with each number of groups"
        setting = Setting(groups, 0.0, min(space.rates))
        return Trial(len(self.trials), setting, groups * space.speed, "probe", "speed", reason)

    def _try(self, setting: Setting, phase: str, reason: str) -> Generator[Trial, Outcome, Outcome]:
        """A probe, unless the same one was made from this point already."""
        if setting not in self._seen:
            self._seen[setting] = yield self._probe(setting, phase, reason)
        return self._seen[setting]

    def _around_s(self) -> float:
        """The seconds that starting and ending a run takes."""
        probes = [outcome for each, outcome in self.trials if each.kind == "probe"]
        return fmean(each.spent_s - each.seconds for each in probes) if probes else 0.0

    def _affords(self, *trials: Trial, part: float = 1.0) -> bool:
        """Whether there is time for these probes within the search's share of the time limit. ``part``: the part of that share to
        use."""
        around_s = self._around_s()
        cost_s = sum(each.updates * self._update_s[each.setting.groups] + around_s for each in trials)
        return self.search_s + cost_s <= part * self._space.share * self._space.limit_s

    def _best_rate(self, losses: Mapping[float, float]) -> float:
        """The highest of the learning rates that are as good as the best: a model that has not begun to learn shows no
        difference."""
        lowest = min(losses.values())
        return max(rate for rate, loss in losses.items() if loss <= lowest + self._space.worse * abs(lowest))

    def _end(self) -> Done | None:
        if self._reached:
            return Done(self._setting, "the target is reached", reached=True)
        if self._finished:
            return Done(self._setting, "the job is complete", reached=True)
        if self.search_s + self.train_s >= self._space.limit_s:
            return Done(self._setting, f"the time is up: {rounded_duration(self._space.limit_s)}")
        return None

    def _give_up_above(self) -> float | None:
        first, begin = self._first.get(self._start), self._first.get(None, 0.0)
        return None if first is None else GIVE_UP * max(first, LITTLE * begin)

    def _left(self, groups: int) -> int:
        """The updates that fit into the remaining time."""
        left_s = self._space.limit_s - self.search_s - self.train_s
        return max(groups, math.ceil(left_s / self._update_s[groups]))

    def _due(self, groups: int, search_s: float) -> int:
        """Updates of training that make the search's share of all time small enough; to the end, if there would be too little time
        after it for another search like the last one (``search_s``)."""
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
        """Continue training. ``until``: the loss at which to stop. ``watch``: how to detect a lack of progress."""
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
            baseline=self._baseline.get(setting.groups, ()),
        )
        self._setting = setting
        self._lengths.clear()
        self._seen.clear()
        outcome = yield trial
        self._reached, self._finished = outcome.reached is not None, outcome.finished
        if outcome.diverged:
            self._diverged += 1
            self._decide("diverged", f"training with {setting} diverged later: back to its start", **values_of(setting))
            return outcome
        self._start, self._diverged = trial.number, 0
        self._stalled = outcome.stood is not None or outcome.loss > (1 - self._space.worse) * outcome.first
        self._first[trial.number] = outcome.loss if outcome.end is None else outcome.end
        self._drifted = outcome.drifted is not None
        if self._drifted:
            self._baseline.clear()
        else:
            self._baseline[setting.groups] = outcome.baseline
        if outcome.drifted is not None:
            self._decide("drift", outcome.drifted, **values_of(setting))
        if outcome.stood is not None:
            self._decide("stands still", outcome.stood, **values_of(setting))
        return outcome


def values_of(setting: Setting) -> dict[str, Any]:
    """A setting as plain values."""
    return {"groups": setting.groups, "momentum": setting.momentum, "lr": setting.lr}
