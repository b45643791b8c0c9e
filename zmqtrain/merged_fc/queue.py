"""What an FC server computes next, and which gradients are applied then: decisions without I/O.

The workers of a group send their parts of a micro-batch; when all have arrived, it waits for its turn. The turn goes to the waiting
group whose last turn is longest ago, so that no group gets ahead by asking more often. When the last micro-batch of a group's step
has been computed, `zmqtrain.server.staleness` decides whose gradients are applied: in synchronous training those of all groups
together, otherwise the group's own, at once. No other update then comes between a group's read and its update, so nothing is stale.
Only if a step has several micro-batches may others have their turns between them, and that staleness is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.server.staleness import Policy, StalenessMachine

#: The most uncomputed micro-batches of a worker: one is being computed or waits while the next is on its way.
MOST_AHEAD = 2


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker's place: its group, and its position there."""

    group: int
    position: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete micro-batch of a group."""

    group: int
    step: int
    micro_batch: int
    positions: tuple[int, ...]
    """The workers whose parts it consists of, in this order."""
    last: bool
    """Whether it is the step's last micro-batch."""


@dataclass(frozen=True, slots=True)
class EvaluationTurn:
    """A worker's batch that is only evaluated."""

    worker: PeerId
    number: int


@dataclass(frozen=True, slots=True)
class Applied:
    """One update of the parameters, with the mean of these gradients."""

    groups: tuple[int, ...]
    steps: tuple[int, ...]
    """The step of each group's gradient."""
    staleness: tuple[int, ...]
    """For each group, the updates between its first read and this update."""
    reason: str


class FcQueue:
    """Tracks what has arrived from which group, and grants turns. Invalid calls raise `ProtocolError` and change nothing."""

    def __init__(self, groups: int, group_size: int, policy: Policy, first_step: int = 0) -> None:
        # The model servers, to which a group goes next, enforce bounds.
        kind = Policy("sync") if policy.kind == "sync" else Policy("async")
        self._machine = StalenessMachine(kind, range(groups), first_step)
        self._size = group_size
        self._steps = [_Step(first_step) for _ in range(groups)]
        self._next = {WorkerPlace(group, position): (first_step, 0) for group in range(groups) for position in range(group_size)}
        self._waiting: dict[Turn | EvaluationTurn, int] = {}  # complete batches, and the order of their completion
        self._last_turn: Counter[int | PeerId] = Counter()  # of groups, and of workers that evaluate
        self._turns = 0
        self._completed = 0
        self.version = 0
        """The number of updates so far."""

    def arrived(self, place: WorkerPlace, step: int, micro_batch: int, micro_batches: int) -> None:
        """A worker's part of a micro-batch has arrived; its step has ``micro_batches`` of them."""
        group = self._steps[place.group]
        if (step, micro_batch) != self._next[place]:
            due = self._next[place]
            raise ProtocolError(
                f"worker {place.position} of group {place.group} sent micro-batch {micro_batch} of step {step}; expected: {due[1]} "
                f"of step {due[0]}"
            )
        if not 0 < micro_batches <= 1 << 16 or group.parts.get(place.position, micro_batches) != micro_batches:
            raise ProtocolError(
                f"worker {place.position} of group {place.group} says that step {step} has {micro_batches} micro-batches"
            )
        if micro_batch - group.computed >= MOST_AHEAD or step != group.step:
            raise ProtocolError(
                f"worker {place.position} of group {place.group} sent micro-batch {micro_batch} of step {step} before it had the "
                "gradients of the previous ones"
            )
        group.parts[place.position] = micro_batches
        group.here.setdefault(micro_batch, set()).add(place.position)
        self._next[place] = (step, micro_batch + 1) if micro_batch + 1 < micro_batches else (step + 1, 0)
        self._complete(place.group)

    def asked(self, worker: PeerId, number: int) -> None:
        """A worker's batch to be evaluated has arrived."""
        self._completed += 1
        self._waiting[EvaluationTurn(worker, number)] = self._completed

    def next(self, *, training: bool = True) -> Turn | EvaluationTurn | None:
        """The next turn, if any group waits (only evaluations unless ``training``). It no longer waits then."""
        waiting = [each for each in self._waiting if training or isinstance(each, EvaluationTurn)]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda each: (self._last_turn[_claimant(each)], self._waiting[each]))
        del self._waiting[chosen]
        self._turns += 1
        self._last_turn[_claimant(chosen)] = self._turns
        if isinstance(chosen, Turn) and chosen.micro_batch == 0:
            self._steps[chosen.group].read = self.version
        return chosen

    def computed(self, turn: Turn) -> Applied | None:
        """The turn's gradients have been computed. Returns the update to make before the next turn, if one is due."""
        group = self._steps[turn.group]
        group.computed += 1
        if not turn.last:
            self._complete(turn.group)
            return None
        decision = self._machine.pushed(turn.group, turn.step)
        self._steps[turn.group] = _Step(turn.step + 1, read=group.read)
        return self._applied(decision.apply, decision.reason)

    def left(self, group: int) -> Applied | None:
        """The group trains no more: others stop waiting for its gradients."""
        decision = self._machine.left(group)
        return self._applied(decision.apply, decision.reason)

    @property
    def groups(self) -> Collection[int]:
        """The groups that still train."""
        return self._machine.groups

    def _complete(self, number: int) -> None:
        """Let the group's next micro-batch wait for its turn, if it is complete and not waiting yet."""
        group = self._steps[number]
        if len(group.parts) < self._size:
            return  # the number of each worker's micro-batches is known when the first one is complete
        most = max(group.parts.values())
        for micro_batch in range(group.queued, most):
            due = {position for position, micro_batches in group.parts.items() if micro_batch < micro_batches}
            if group.here.get(micro_batch, set()) != due:
                return
            del group.here[micro_batch]
            self._completed += 1
            turn = Turn(number, group.step, micro_batch, tuple(sorted(due)), micro_batch == most - 1)
            self._waiting[turn] = self._completed
            group.queued += 1

    def _applied(self, groups: tuple[int, ...], reason: str) -> Applied | None:
        if not groups:
            return None
        steps = [self._steps[group] for group in groups]
        applied = Applied(groups, tuple(s.step - 1 for s in steps), tuple(self.version - s.read for s in steps), reason)
        self.version += 1
        return applied


class _Step:
    """A group's progress in its step."""

    __slots__ = ("computed", "here", "parts", "queued", "read", "step")

    def __init__(self, step: int, read: int = 0) -> None:
        self.step = step
        self.parts: dict[int, int] = {}  # position -> its number of micro-batches
        self.here: dict[int, set[int]] = {}  # micro-batch -> positions whose parts have arrived
        self.queued = 0
        """The number of complete micro-batches."""
        self.computed = 0
        self.read = read
        """The version with which the first micro-batch was computed."""


def _claimant(waiting: Turn | EvaluationTurn) -> int | PeerId:
    return waiting.group if isinstance(waiting, Turn) else waiting.worker
