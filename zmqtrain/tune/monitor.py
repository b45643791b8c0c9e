"""Follows a trial's run by its events: losses and times, and when the run should end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from zmqtrain.tune.drift import Drift
from zmqtrain.tune.progress import Progress
from zmqtrain.tune.trial import Outcome, Smoothed, Trial

#: The number of losses before a very high one counts as divergence: the first few are noisy.
PATIENCE = 5


class TrialMonitor:
    """Feed it the run's events (`observe`); `outcome` at the end.

    An update is a group's step, once all its workers have reported it. Events arrive in batches, worker by worker, so their exact
    order is known only at the end; until then the order of arrival is close enough.
    """

    def __init__(self, trial: Trial, group_size: int, target: float | None = None, smooth: int = 20) -> None:
        """``target``: the loss at which training is done, smoothed over ``smooth`` updates."""
        self._over = smooth
        self._trial, self._size = trial, group_size
        self._target = target if trial.kind == "train" or trial.keeps else None
        self._open: dict[tuple[int, int], list[tuple[float, float]]] = {}  # group and step -> time and loss of each worker so far
        self._updates: list[tuple[float, float]] = []  # the time, and the mean loss of the group's batch
        self._began: float | None = None
        self._smoothed = Smoothed()  # short, to detect divergence soon
        # Of its own losses, and the one that goes on from where it begins.
        self._aim, self._on = Smoothed(smooth), Smoothed(smooth, trial.before)
        self._staleness: list[float] = []
        self._momentum: float | None = None
        self.diverged = False
        """Whether its loss is NaN or infinite, or far above its first loss."""
        self._drift = Drift(trial.setting.groups, trial.setting.momentum, trial.baseline) if trial.kind == "train" else None
        self._drifted: str | None = None
        self._progress = None if trial.watch is None else Progress(trial.watch)
        self._stood: str | None = None
        self._close = False  # its smoothed loss has reached the end of the trial
        self._kept: Counter[object] = Counter()  # step of a checkpoint -> workers whose part of it is on disk
        self.stop: str | None = None
        """Why the run should end, once there is a reason."""

    @property
    def updates(self) -> int:
        """Group steps so far."""
        return len(self._updates)

    def observe(self, event: Mapping[str, Any], rank: int | None = None) -> None:
        """Take an event of a role, as in ``events.jsonl`` (with its time). ``rank``: the worker's rank, if it is a worker's
        event."""
        values = event.get("values") or {}
        if event.get("kind") == "step":
            self._step(rank or 0, event, values)
        elif event.get("kind") == "momentum" and isinstance(values.get("fitted"), float):
            self._momentum = values["fitted"]
            if self._drift is not None:
                self._drift.fitted(values["fitted"])
        elif event.get("kind") == "checkpoint":
            step = event.get("step")
            self._kept[step] += 1
            whole = self._kept[step] == self._size * self._trial.setting.groups
            drifted = None if self._drift is None else self._drift.reason
            stood = None if self._progress is None else self._progress.reason
            if whole and self.stop is None and (self._close or drifted is not None or stood is not None):
                self._drifted, self._stood = drifted, stood
                self.stop = drifted or stood or f"the loss has reached {self._trial.until:.4g}"
        elif event.get("kind") == "server" and isinstance(values.get("momentum"), float):
            self._momentum = values["momentum"]

    def outcome(self, *, whole_s: float = 0.0, diverged: bool = False, finished: bool = False) -> Outcome:
        """The outcome of the trial. ``whole_s``: the total time of the run. ``diverged``, ``finished``: as reported by the run.

        A probe gets the message to stop with a delay. The steps until then cost time, but do not count otherwise: other probes may
        have had more of them."""
        self._updates.sort()
        if self._trial.kind == "probe":
            del self._updates[self._trial.updates :]
        began = self._began or 0.0
        losses = [(time - began, loss) for time, loss in self._updates]
        return Outcome.of(
            losses,
            updates=self.updates,
            seconds=losses[-1][0] if losses else 0.0,
            diverged=diverged or self.diverged,
            smooth=self._over,
            scored=self._trial.scored,
            before=self._trial.before,
            target=self._target,
            staleness=fmean(self._staleness) if self._staleness else None,
            momentum=self._momentum,
            whole_s=whole_s,
            finished=finished,
            drifted=self._drifted,
            stood=self._stood,
            baseline=() if self._drift is None else self._drift.baseline,
        )

    def _step(self, rank: int, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        time, loss = float(event["time"]), values.get("loss")
        begin = time - float(values.get("seconds", 0.0))
        self._began = begin if self._began is None else min(self._began, begin)
        loss = float(loss) if isinstance(loss, int | float) else math.nan
        staleness = values.get("staleness")
        if isinstance(staleness, int | float):
            self._staleness.append(float(staleness))
            if self._drift is not None:
                self._drift.step(float(staleness), rank // self._size)
        key = rank // self._size, int(event.get("step") or 0)
        told = self._open.setdefault(key, [])
        told.append((time, loss))
        if not math.isfinite(loss):
            self.diverged, self.stop = True, f"the loss is {loss}: training diverges"
        if len(told) == self._size:
            del self._open[key]
            self._update(max(when for when, _ in told), fmean(each for _, each in told))

    def _update(self, time: float, loss: float) -> None:
        self._updates.append((time, loss))
        smooth, above = self._smoothed.add(loss), self._trial.give_up_above
        self._aim.add(loss)
        self._on.add(loss)
        if self._progress is not None:
            self._progress.add(loss)
        if above is not None and smooth > above and self.updates > PATIENCE:
            self.diverged, self.stop = True, f"the loss is {loss:.4g}: training diverges"
        elif self._trial.kind == "probe" and not self._trial.keeps and self.updates >= self._trial.updates:
            self.stop = "the probe has made its updates"
        elif self._target is not None and (self._aim.below(self._target) or self._on.below(self._target)):
            self.stop = "the target is reached"
        elif self._trial.until is not None and self._aim.below(self._trial.until):
            self._close = True
