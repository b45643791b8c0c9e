"""A trial's run as its events tell it: losses and times, and when it has gone on for long enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zmqtrain.tune.drift import Drift
from zmqtrain.tune.trial import Outcome, Smoothed, Trial

#: Losses before one that is far too high counts: the first few are noisy.
PATIENCE = 5


class Hearing:
    """Feed it the run's events (`hear`); `outcome` at the end."""

    def __init__(self, trial: Trial, group_size: int, target: float | None = None) -> None:
        self._trial, self._size, self._target = trial, group_size, target
        self._losses: list[tuple[float, float]] = []  # time of the step's end, a worker's loss
        self._began: float | None = None
        self._smoothed = Smoothed()
        self._staleness: list[float] = []
        self._momentum: float | None = None
        self._diverged = False
        self._drift = Drift(trial.setting.groups, trial.setting.momentum) if trial.kind == "train" else None
        self._drifted: str | None = None
        self._kept = 0  # parts of checkpoints that are on disk
        self.stop: str | None = None
        """Why the run should end, once there is a reason."""

    @property
    def updates(self) -> int:
        """Group steps so far."""
        return len(self._losses) // self._size

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take an event of a role, as it stands in ``events.jsonl`` (with its time)."""
        values = event.get("values") or {}
        if event.get("kind") == "step":
            self._step(float(event["time"]), values)
        elif event.get("kind") == "momentum" and isinstance(values.get("fitted"), float):
            self._momentum = values["fitted"]
            if self._drift is not None and self._drifted is None:
                self._drifted = self._drift.fitted(values["fitted"])
        elif event.get("kind") == "checkpoint":
            self._kept += 1
            if self._drifted is not None and self.stop is None and self._kept % (self._size * self._trial.setting.groups) == 0:
                self.stop = self._drifted
        elif event.get("kind") == "server" and isinstance(values.get("momentum"), float):
            self._momentum = values["momentum"]

    def _step(self, time: float, values: Mapping[str, Any]) -> None:
        begin = time - float(values.get("seconds", 0.0))
        self._began = begin if self._began is None else min(self._began, begin)
        loss = values.get("loss")
        loss = float(loss) if isinstance(loss, int | float) else math.nan
        self._losses.append((time, loss))
        smooth, above = self._smoothed.add(loss), self._trial.give_up_above
        staleness = values.get("staleness")
        if isinstance(staleness, int | float):
            self._staleness.append(float(staleness))
            if self._drift is not None and self._drifted is None:
                self._drifted = self._drift.step(float(staleness))
        if not math.isfinite(loss) or (above is not None and smooth > above and len(self._losses) > PATIENCE):
            self._diverged, self.stop = True, f"the loss is {loss:.4g}: this diverges"
        elif self._trial.kind == "probe" and self.updates >= self._trial.updates:
            self.stop = "the probe has made its updates"
        elif self._target is not None and self._trial.kind == "train" and self._smoothed.settled and smooth <= self._target:
            self.stop = "the target is reached"

    def outcome(self, *, diverged: bool = False) -> Outcome:
        """What came of it. ``diverged``: the run itself says so."""
        self._losses.sort()
        began = self._began or 0.0
        losses = [(time - began, loss) for time, loss in self._losses]
        return Outcome.of(
            losses,
            updates=self.updates,
            seconds=losses[-1][0] if losses else 0.0,
            diverged=diverged or self._diverged,
            target=self._target if self._trial.kind == "train" else None,
            staleness=sum(self._staleness) / len(self._staleness) if self._staleness else None,
            momentum=self._momentum,
            drifted=self._drifted,
        )
