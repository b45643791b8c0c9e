"""The data of a search: settings, trials and their outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, TypeAlias

from zmqtrain.words import counted

#: The last part of a trial, whose mean loss is its result.
SCORED = 1 / 3


class First(NamedTuple):
    """The staleness of a group's first steps."""

    steps: int = 0
    total: float = 0.0
    squares: float = 0.0
    """The sum of their squares."""


#: Group by group.
Baseline: TypeAlias = tuple[First, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A combination of the values that are searched."""

    groups: int
    momentum: float
    """The optimizer's own momentum."""
    lr: float

    def __str__(self) -> str:
        return f"{counted(self.groups, 'group')}, momentum {self.momentum:g}, learning rate {self.lr:g}"


@dataclass(frozen=True, slots=True)
class Watch:
    """How to judge whether training makes progress."""

    after: int
    """Updates after which it is checked."""
    trained: int = 0
    """Updates that were made before it."""
    begin: float | None = None
    """The loss after those, if it is known."""
    goal: float | None = None
    """The loss to reach."""
    below: float | None = None
    """A loss that another setting reached with fewer updates."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Some training that the search asks for."""

    number: int
    setting: Setting
    updates: int
    """Updates of the servers, by all groups together."""
    kind: Literal["probe", "train"]
    """A probe only gives information, and its model is thrown away. Training is continued from its end."""
    phase: str
    """The phase of the search, in a word or two."""
    reason: str
    start: int | None = None
    """The training trial at whose end it begins; ``None``: the initial parameters."""
    give_up_above: float | None = None
    """A loss at which it is not worth continuing."""
    until: float | None = None
    """A smoothed loss at which training is complete: it ends at its next checkpoint."""
    scored: float = SCORED
    """The last part of it, whose mean loss is the result."""
    keeps: bool = False
    """Whether other trials may begin at the end of this probe."""
    watch: Watch | None = None
    """How to check progress: training ends at its next checkpoint if it makes none."""
    before: tuple[float, int] | None = None
    """The smoothed loss at the end of the trial at whose end it begins, and of how many losses it is."""
    baseline: Baseline = ()
    """The staleness of each group when training with these groups began: drift is a change from it."""

    def to_value(self) -> dict[str, Any]:
        """Encode the trial as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial."""

    updates: int
    """The updates that were made."""
    seconds: float
    """The seconds that the updates took, in the time of the world."""
    first: float
    """The loss at its beginning."""
    loss: float
    """The mean loss of its last part; infinite if it diverged."""
    noise: float = 0.0
    """The standard error of that mean."""
    reached: float | None = None
    """Seconds after which the target was reached, if it was."""
    reached_updates: int | None = None
    staleness: float | None = None
    """Mean, measured."""
    momentum: float | None = None
    """The total momentum, as fitted by the servers."""
    whole_s: float = 0.0
    """The total seconds of the run, from its start to its end."""
    finished: bool = False
    """Whether the job itself is done: nothing is left to train."""
    end: float | None = None
    """The mean loss of its last updates, over the smoothing window."""
    smoothed: tuple[float, int] | None = None
    """The smoothed loss at its end, which goes on from the trial at whose end it began, and of how many losses it is."""
    drifted: str | None = None
    """Why it was ended early: the measurements do not match those for which the setting was chosen."""
    stood: str | None = None
    """Why it was ended early: it made no progress."""
    baseline: Baseline = ()
    """The trial's, completed with its own first steps if that had too few."""

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)

    @property
    def spent_s(self) -> float:
        """Its cost in seconds, without the time after the target was reached."""
        after_s = 0.0 if self.reached is None else self.seconds - self.reached
        return max(self.whole_s, self.seconds) - after_s

    @property
    def around_s(self) -> float:
        """The seconds for starting and ending the run."""
        return max(0.0, self.whole_s - self.seconds)

    @property
    def update_s(self) -> float:
        """The measured hardware efficiency."""
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
        before: tuple[float, int] | None = None,
        **measured: Any,
    ) -> Outcome:
        """The outcome from losses and their times since the beginning, in order. ``target``: to be reached by the loss smoothed
        over ``smooth`` updates, also by the mean that goes on from ``before``. ``scored``: the last part of the losses, whose mean
        is the result."""
        values = [loss for _, loss in losses]
        if not values:
            return cls(updates, seconds, math.nan, math.inf, **measured)
        first = fmean(values[: max(1, len(values) // 20)])
        last = values[-max(1, round(len(values) * scored)) :]
        bad = diverged or not all(map(math.isfinite, values))
        noise = stdev(last) / math.sqrt(len(last)) if len(last) > 1 and not bad else 0.0
        reached = reach(values, target, smooth, before) if target is not None else None
        mean = Smoothed(smooth, before)
        for value in values:
            mean.add(value)
        return cls(
            updates,
            seconds,
            first,
            math.inf if bad else fmean(last),
            noise,
            None if reached is None else losses[reached][0],
            None if reached is None else max(1, round(updates * (reached + 1) / len(values))),
            end=None if bad else fmean(last[-smooth:]),
            smoothed=None if bad else mean.state,
            **measured,
        )

    def to_value(self) -> dict[str, Any]:
        """The outcome as JSON values; `from_value` restores it."""
        values = asdict(self)
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Outcome:
        """The outcome that `to_value` wrote. Raises ``TypeError`` for anything else."""
        values = dict(value)
        values["first"] = math.nan if values["first"] is None else values["first"]
        values["loss"] = math.inf if values["loss"] is None else values["loss"]
        state = values.get("smoothed")
        values["smoothed"] = None if state is None else (float(state[0]), int(state[1]))
        values["baseline"] = tuple(First(*each) for each in values.get("baseline", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SearchDecision:
    """A decision of the search, with its reason."""

    what: str
    reason: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """The search is over."""

    setting: Setting | None
    """The last setting that was trained with; ``None`` if nothing could be trained at all."""
    reason: str
    reached: bool = False


class Smoothed:
    """An exponential moving average of losses. It begins as their plain mean."""

    __slots__ = ("_count", "_over", "value")

    def __init__(self, over: int = 20, before: tuple[float, int] | None = None) -> None:
        """``over``: the weight of a new value is 1/over. ``before``: the mean so far, and of how many losses."""
        self.value, self._count = (math.nan, 0) if before is None else before
        self._over = over

    def add(self, loss: float) -> float:
        """Add a loss and return the mean."""
        self._count += 1
        share = 1 / min(self._count, self._over)
        self.value = loss if self._count == 1 else self.value + (loss - self.value) * share
        return self.value

    @property
    def state(self) -> tuple[float, int]:
        """The mean, and of how many losses it is: what another one goes on from."""
        return self.value, min(self._count, self._over)

    @property
    def settled(self) -> bool:
        """Whether it has seen enough losses."""
        return self._count >= self._over

    def below(self, target: float) -> bool:
        """Whether it has seen enough losses, and is at most ``target``."""
        return self.settled and self.value <= target


def reach(losses: Sequence[float], target: float, over: int = 20, before: tuple[float, int] | None = None) -> int | None:
    """The index of the first loss at which their smoothed mean is at most ``target``: that of these losses, or the one that goes on
    from ``before``."""
    means = [Smoothed(over), Smoothed(over, before)]
    for index, loss in enumerate(losses):
        for mean in means:
            mean.add(loss)
        if any(mean.below(target) for mean in means):
            return index
    return None
