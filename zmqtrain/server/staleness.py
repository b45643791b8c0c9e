"""Which group may read when: the staleness policies as one state machine without I/O.

=========  ============================================  ==========================================================
policy     a group's gradient of step t is applied       the group may read the parameters for step t + 1
=========  ============================================  ==========================================================
sync       with all other groups' gradients of step t    once step t is applied
async      when it arrives                               at once
bound n    when it arrives                               once every group has pushed step t - n
=========  ============================================  ==========================================================

A machine represents whatever is pushed together: a piece, or with snapshots a whole step of a group.

Groups may `leave`: they train no more, or are lost. Others may `enter` at a step that everybody knows. A group that is done for now
may `rest`: the others do not wait for it, until it pushes again or has to enter at a later step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from zmqtrain.errors import ProtocolError

PolicyKind = Literal["sync", "async", "bound"]


def staleness_values(counts: Counter[int]) -> dict[str, Any]:
    """The staleness values of a server's last event. ``counts``: staleness -> the number of gradients that had it."""
    total = sum(counts.values())
    return {
        "staleness": {str(staleness): count for staleness, count in sorted(counts.items())},
        "staleness_mean": sum(staleness * count for staleness, count in counts.items()) / total if total else 0.0,
        "staleness_max": max(counts, default=0),
    }


@dataclass(frozen=True, slots=True)
class Policy:
    """``bound`` is a number of steps, and is used only by the kind ``bound``."""

    kind: PolicyKind
    bound: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("sync", "async", "bound") or self.bound < 0:
            raise ValueError(f"invalid staleness policy: {self}")


@dataclass(frozen=True, slots=True)
class Decision:
    """The consequences of a push, or of a group's leaving."""

    apply: tuple[int, ...] = ()
    """Groups whose gradients are to be applied now, as one update, in this order."""
    answer: tuple[tuple[int, int], ...] = ()
    """(group, step) of the groups that may now read parameters for that step, after the update."""
    reason: str = ""
    entered: tuple[int, ...] = ()
    """Groups that may now read parameters for their first step, after the update."""


class DuplicatePushError(ProtocolError):
    """A group's gradient of a step arrived twice."""


class OutOfOrderPushError(ProtocolError):
    """A group skipped a step."""


class UnknownGroupError(ProtocolError):
    """There is no such group, or it has left."""


class StalenessMachine:
    """Tracks how many steps each group has pushed. ``first_step``: the step of the first push (not 0 after a resume)."""

    __slots__ = ("_begun", "_clock", "_coming", "_entering", "_policy", "_resting", "_since", "_waiting")

    def __init__(self, policy: Policy, groups: Collection[int], first_step: int = 0) -> None:
        self._policy = policy
        self._clock = dict.fromkeys(sorted(groups), first_step)  # group -> its next step to push
        self._waiting: list[int] = []  # groups that have pushed and wait for an answer, in the order of their pushes
        self._resting: set[int] = set()
        self._begun: dict[int, int] = {}  # a group that was to enter while it rested -> the step before, which it may have begun
        self._since: dict[int, list[int]] = {}  # a group -> where changes begin that it has not reached, with which it may go on
        self._entering: set[int] = set()  # of those that wait: they have not pushed yet
        self._coming: dict[int, int] = {}  # sync: groups that enter when all others have done the steps before this one

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that train, in order."""
        return tuple(self._clock)

    def clock(self, group: int) -> int | None:
        """The group's next step to push; ``None`` if it does not take part."""
        return self._clock.get(group, self._coming.get(group))

    def done(self, group: int) -> int | None:
        """The number of steps that the group has pushed, those that it has left out included; ``None`` if it does not take part."""
        return self._begun.get(group, self.clock(group))

    def rests(self, group: int) -> bool:
        """Whether the group has nothing to push for now."""
        return group in self._resting

    def waits(self, group: int) -> bool:
        """Whether the group has pushed, or is to enter, and has had no answer yet."""
        return group in self._waiting or group in self._coming

    def comes(self, group: int) -> bool:
        """Whether the group enters when the others have done the steps before its own (sync)."""
        return group in self._coming

    def state(self) -> dict[str, Any]:
        """Plain values for `load`."""
        return {
            "clock": [[group, step] for group, step in self._clock.items()],
            "waiting": list(self._waiting),
            "resting": sorted(self._resting),
            "begun": [[group, step] for group, step in self._begun.items()],
            "entering": sorted(self._entering),
            "coming": [[group, step] for group, step in self._coming.items()],
            "since": [[group, list(steps)] for group, steps in self._since.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what `state` has told of."""
        self._clock = dict(state["clock"])
        self._waiting = list(state["waiting"])
        self._resting, self._entering = set(state["resting"]), set(state["entering"])
        self._coming, self._begun = dict(state["coming"]), dict(state["begun"])
        self._since = {group: list(steps) for group, steps in state["since"]}

    def expected(self, group: int) -> int:
        """The next step that the group has to push. Raises `UnknownGroupError`."""
        if group not in self._clock:
            raise UnknownGroupError(f"there is no group {group} here; these groups train: {list(self._clock)}")
        return self._clock[group]

    def lead(self, group: int) -> int:
        """The number of steps by which the group is ahead of the slowest."""
        return self._clock[group] - self._slowest()

    def _slowest(self) -> int:
        if not self._resting:
            return min(self._clock.values())
        return min((step for group, step in self._clock.items() if group not in self._resting), default=max(self._clock.values()))

    def check(self, group: int, step: int) -> None:
        """Raise the errors that `pushed` would raise, and change nothing."""
        expected = self.expected(group)
        if step == self._begun.get(group):
            return
        if step < expected:
            raise DuplicatePushError(f"group {group} has already pushed step {step}; its next step is {expected}")
        if step > expected and step not in self._since.get(group, ()):
            raise OutOfOrderPushError(f"group {group} pushed step {step}, but its next step is {expected}")

    def pushed(self, group: int, step: int) -> Decision:
        """The group's gradient of ``step`` has arrived. Raises a `ProtocolError` (and changes nothing) if it is not expected."""
        self.check(group, step)
        self._clock[group] = max(self._clock[group], step + 1)
        self._resting.discard(group)
        self._begun.pop(group, None)
        self._waiting.append(group)
        if self._policy.kind == "sync":
            return self._sync()
        return self._released((group,), self._reason)

    def enter(self, group: int, step: int) -> Decision:
        """The group takes part from ``step`` on, which it must push next. No other group has pushed it yet, if all wait for each
        other. A group that already takes part stays as it is, but must not rest any more: its next step is this one, or first
        the one that it has begun meanwhile. One that did not rest goes on with its next step or, if it has no part in those before
        it, with this one."""
        self._since[group] = [*(since for since in self._since.get(group, ()) if since > self._clock.get(group, step)), step]
        if group in self._clock:
            if group in self._resting:
                self._resting.discard(group)
                if self._clock[group] < step:
                    self._begun[group], self._clock[group] = self._clock[group], step
            return Decision()
        if group in self._coming:
            return Decision()
        if self._policy.kind == "sync":
            self._coming[group] = step
            return self._admitted(Decision(reason=f"group {group} enters at step {step}"))
        self._clock = dict(sorted({**self._clock, group: step}.items()))
        self._waiting.append(group)
        self._entering.add(group)
        return self._released((), lambda _group: f"group {group} enters at step {step}")

    def rest(self, group: int) -> Decision:
        """The group has no more steps to push for now, and all its pushes have been answered."""
        if group not in self._clock or group in self._waiting:
            return Decision()
        self._resting.add(group)
        self._begun.pop(group, None)
        if self._policy.kind == "sync":
            return self._sync()
        return self._released((), lambda _group: f"group {group} rests")

    def left(self, group: int) -> Decision:
        """The group trains no more: others stop waiting for it. Its pending gradient, if any, is still applied."""
        self._coming.pop(group, None)
        self._begun.pop(group, None)
        self._since.pop(group, None)
        if group not in self._clock:
            return Decision()
        self._resting.discard(group)
        if self._policy.kind == "sync":
            decision = self._sync(leaving=group)
            self._clock.pop(group, None)
            return self._admitted(decision)
        del self._clock[group]
        self._entering.discard(group)
        self._waiting = [other for other in self._waiting if other != group]
        return self._released((), lambda _group: f"group {group} left")

    def _sync(self, leaving: int | None = None) -> Decision:
        away = self._resting | {leaving}
        behind = [group for group in self._clock if group not in self._waiting and group not in away]
        if behind:
            return Decision(reason=f"waiting for the gradients of groups {behind}")
        # In the order of groups, not of arrival: sums must not depend on timing.
        together = tuple(sorted(self._waiting))
        self._waiting = []
        answer = tuple((group, self._clock[group]) for group in together if group in self._clock and group != leaving)
        decision = Decision(together, answer, "all groups' gradients have arrived") if together else Decision()
        return self._admitted(decision)  # also if none had a gradient: the last of them may just have begun to rest

    def _admitted(self, decision: Decision) -> Decision:
        """The decision, and those that enter now, because all steps before theirs are done."""
        if not self._coming or self._waiting:
            return decision
        first = min(self._coming.values())  # if nobody else is left
        done = max((step for group, step in self._clock.items() if group not in self._resting), default=first)
        entered = tuple(sorted(group for group, step in self._coming.items() if step <= done))
        if not entered:
            return decision
        self._clock = dict(sorted({**self._clock, **{group: self._coming.pop(group) for group in entered}}.items()))
        return replace(decision, entered=entered)

    def _released(self, apply: tuple[int, ...], reason: Callable[[int], str]) -> Decision:
        answered = self._ready()
        entered = tuple(group for group, _ in answered if group in self._entering)
        self._entering.difference_update(entered)
        answer = tuple(each for each in answered if each[0] not in entered) if entered else answered
        return Decision(apply, answer, reason(apply[0] if apply else -1), entered)

    def _ready(self) -> tuple[tuple[int, int], ...]:
        ready = [group for group in self._waiting if self._policy.kind == "async" or self.lead(group) <= self._policy.bound]
        self._waiting = [group for group in self._waiting if group not in ready]
        return tuple((group, self._clock[group]) for group in ready)

    def _reason(self, group: int) -> str:
        if group not in self._waiting:
            return "applied on arrival"
        slowest = min(self._clock.keys() - self._resting, key=lambda other: self._clock[other], default=group)
        return f"group {group} is {self.lead(group)} steps ahead of group {slowest}; {self._policy.bound} are allowed"
