"""What a search asks for and what it is told: settings, trials and their outcomes, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Literal

#: The last part of a trial, of which the loss counts.
SCORED = 1 / 3


@dataclass(frozen=True, slots=True)
class Setting:
    """What is searched for."""

    groups: int
    momentum: float
    """The optimizer's own."""
    lr: float

    def __str__(self) -> str:
        return f"{self.groups} group(s), momentum {self.momentum:g}, learning rate {self.lr:g}"


@dataclass(frozen=True, slots=True)
class Watch:
    """By what training is judged whether it gets anywhere."""

    after: int
    """Updates after which it is looked at."""
    trained: int = 0
    """Updates that were made before it."""
    begin: float | None = None
    """The loss after those, if that is known."""
    goal: float | None = None
    """The loss to reach."""
    below: float | None = None
    """A loss to which another setting came with fewer updates."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Some training, to be done and told about."""

    number: int
    setting: Setting
    updates: int
    """Of the servers, by all groups together."""
    kind: Literal["probe", "train"]
    """A probe is to learn something, and what it trains is thrown away. Training goes on from its end."""
    phase: str
    """Of the search, in a word or two."""
    reason: str
    start: int | None = None
    """The training trial whose end it begins at; none: the initial parameters."""
    give_up_above: float | None = None
    """A loss from which on it is not worth going on."""
    until: float | None = None
    """A smoothed loss at which training has done its part: it ends at its next checkpoint."""
    scored: float = SCORED
    """The last part of it, of which the loss counts."""
    keeps: bool = False
    """Of a probe: other trials may begin at its end."""
    watch: Watch | None = None
    """Of training: it ends at its next checkpoint if it gets nowhere."""

    def to_value(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial."""

    updates: int
    """That were made."""
    seconds: float
    """They took, as the world counts."""
    first: float
    """Loss at its begin."""
    loss: float
    """Mean loss of its last part; infinite where it diverged."""
    noise: float = 0.0
    """Standard error of that mean."""
    reached: float | None = None
    """Seconds after which the target was reached, if it was."""
    reached_updates: int | None = None
    staleness: float | None = None
    """Mean, measured."""
    momentum: float | None = None
    """In all, as fitted by the servers."""
    whole_s: float = 0.0
    """What the run took in all: starting, training, and until it had ended."""
    finished: bool = False
    """The job itself is through: nothing is left to train."""
    end: float | None = None
    """Mean loss of its last updates, as many as are smoothed over."""
    drifted: str | None = None
    """Why it was ended before its time: what was measured is not what it was chosen for."""
    stood: str | None = None
    """Why it was ended before its time: it gets nowhere."""

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)

    @property
    def spent_s(self) -> float:
        """What it cost. What was done after the target was reached does not count."""
        after_s = 0.0 if self.reached is None else self.seconds - self.reached
        return max(self.whole_s, self.seconds) - after_s

    @property
    def around_s(self) -> float:
        """What starting and ending the run cost."""
        return max(0.0, self.whole_s - self.seconds)

    @property
    def update_s(self) -> float:
        """Hardware efficiency as measured."""
        return self.seconds / self.updates if self.updates else 0.0

    @classmethod
    def of(
        cls,
        losses: Sequence[tuple[float, float]],
        *,
        updates: int,
        seconds: float,
        diverged: bool = False,
        target: float | None = None,
        smooth: int = 20,
        scored: float = SCORED,
        **measured: Any,
    ) -> Outcome:
        """From losses and their times since the begin, in order. ``target`` is reached by the loss as smoothed over ``smooth``.
        ``scored``: the last part of them, of which the loss counts."""
        values = [loss for _, loss in losses]
        if not values:
            return cls(updates, seconds, math.nan, math.inf, **measured)
        first = fmean(values[: max(1, len(values) // 20)])
        last = values[-max(1, round(len(values) * scored)) :]
        bad = diverged or not all(map(math.isfinite, values))
        noise = stdev(last) / math.sqrt(len(last)) if len(last) > 1 and not bad else 0.0
        reached = reach(values, target, smooth) if target is not None else None
        return cls(
            updates,
            seconds,
            first,
            math.inf if bad else fmean(last),
            noise,
            None if reached is None else losses[reached][0],
            None if reached is None else max(1, round(updates * (reached + 1) / len(values))),
            end=None if bad else fmean(last[-smooth:]),
            **measured,
        )

    def to_value(self) -> dict[str, Any]:
        """As JSON values; `from_value` gives an equal outcome."""
        values = asdict(self)
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Outcome:
        """What `to_value` was called on. Raises ``TypeError`` for anything else."""
        values = dict(value)
        values["first"] = math.nan if values["first"] is None else values["first"]
        values["loss"] = math.inf if values["loss"] is None else values["loss"]
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the search has made up its mind about."""

    what: str
    reason: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """The search is over."""

    setting: Setting | None
    """The last one trained with; none where nothing could be trained at all."""
    reason: str
    reached: bool = False


class Smoothed:
    """An exponential mean of losses, less noisy than each. It begins as their plain mean."""

    __slots__ = ("_count", "_over", "value")

    def __init__(self, over: int = 20) -> None:
        """``over``: it forgets at 1/over a value."""
        self.value = math.nan
        self._count, self._over = 0, over

    def add(self, loss: float) -> float:
        """The mean, with one more."""
        self._count += 1
        share = 1 / min(self._count, self._over)
        self.value = loss if self._count == 1 else self.value + (loss - self.value) * share
        return self.value

    @property
    def settled(self) -> bool:
        """Whether enough was seen."""
        return self._count >= self._over


def reach(losses: Sequence[float], target: float, over: int = 20) -> int | None:
    """The index of the first loss at which their smoothed mean is at most ``target``."""
    smoothed = Smoothed(over)
    for index, loss in enumerate(losses):
        if smoothed.add(loss) <= target and smoothed.settled:
            return index
    return None
