"""What an FC server computes next, and which gradients are applied then: decisions without I/O.

The workers of a group send their parts of a micro-batch; when all have arrived, it waits for its turn. The turn goes to the waiting
group whose last turn is longest ago, so that no group gets ahead by asking more often. When the last micro-batch of a group's step
has been computed, `zmqtrain.server.staleness` decides whose gradients are applied: in synchronous training those of all groups
together, otherwise the group's own, at once. No other update then comes between a group's read and its update, so nothing is stale.
Only if a step has several micro-batches may others have their turns between them, and that staleness is counted.

If workers may be lost, groups have teams, and each team a life (`zmqtrain.data.teams`); a step is then one micro-batch. Teams are
dropped, held and followed as in `zmqtrain.server.aggregator`, as if the merged layers were one more piece: a batch counts once,
and a turn whose batch has counted already only gives gradients of the activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

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
    counts: bool = True
    """Whether the layers learn from it. Otherwise only the gradients of the activations are wanted."""


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
        self._positions = dict.fromkeys(range(groups), tuple(range(group_size)))  # of those who train, by group
        self._pushed: dict[int, _Pushed] = {}  # group -> what waits to be applied
        self._lives: dict[int, int] | None = None  # group -> its team, if workers may be lost
        self._held: dict[int, int] = {}  # group -> its team that trains no more; its place is kept
        self._again: dict[int, int] = {}  # group -> the step that its team trains once more
        self._gone: dict[int, int] = {}  # lives that were dropped -> the number of steps that count here
        self._steps = [_Step(first_step) for _ in range(groups)]
        self._next = {WorkerPlace(group, position): (first_step, 0) for group in range(groups) for position in range(group_size)}
        self._waiting: dict[Turn | EvaluationTurn, int] = {}  # complete batches, and the order of their completion
        self._last_turn: Counter[int | PeerId] = Counter()  # of groups, and of workers that evaluate
        self._turns = 0
        self._completed = 0
        self.version = 0
        """The number of updates so far."""

    def arrived(
        self, place: WorkerPlace, step: int, micro_batch: int, micro_batches: int, torn: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """A worker's part of a micro-batch has arrived; its step has ``micro_batches`` of them. ``torn``: the lives that were lost
        while they trained this batch, and their steps."""
        if self._lives is not None:
            self._go_to(place.group, step)
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
        group.torn = torn
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
        self._steps[turn.group] = _Step(turn.step + 1, read=group.read)
        if self._again.pop(turn.group, None) is not None:
            return None  # the team before has done this step
        self._pushed[turn.group] = _Pushed(turn.step, group.read, turn.counts)
        decision = self._machine.pushed(turn.group, turn.step)
        return self._applied(decision.apply, decision.reason)

    def left(self, group: int) -> Applied | None:
        """The group trains no more: others stop waiting for its gradients."""
        decision = self._machine.left(group)
        return self._applied(decision.apply, decision.reason)

    @property
    def groups(self) -> Collection[int]:
        """The groups that still train."""
        return self._machine.groups

    # If workers may be lost. A group that is dropped or held has no turn that is being computed.

    def begin(self, lives: Mapping[int, int]) -> None:
        """Workers may be lost from now on. ``lives``: the team of each group that is there."""
        self._lives = dict(lives)

    def life(self, group: int) -> int | None:
        """The team of the group that trains now."""
        return None if self._lives is None else self._lives.get(group)

    @property
    def lives(self) -> Mapping[int, int]:
        """The teams that train now, by group."""
        return self._lives or {}

    def seat(self, positions: Mapping[int, tuple[int, ...]]) -> None:
        """The positions of the workers of these groups who are there."""
        self._positions.update(positions)

    def drop(self, group: int) -> Applied | None:
        """Go on without the present team of the group, if it has one. What was computed for it still counts."""
        life = self._unseat(group)
        life = self._held.pop(group, None) if life is None else life
        if life is None:
            return None
        self._note(group, life)
        return self.left(group)

    def hold(self, group: int) -> None:
        """As `drop`, but others wait for the team that follows the present one, and has its place."""
        life = self._unseat(group)
        assert life is not None
        self._held[group] = life
        self._note(group, life)

    def follow(self, group: int, life: int, first: int) -> None:
        """This team has the place that was kept for it, and goes on at step ``first``, which the team before may have done."""
        assert self._lives is not None
        del self._held[group]
        self._lives[group] = life
        done = self._machine.done(group)
        if not self._machine.comes(group) and done is not None and done > first:
            self._again[group] = first

    def enter(self, step: int, lives: Mapping[int, int]) -> list[Applied]:
        """From ``step`` on these teams of the groups train, and no others, but for those whose places are kept."""
        dropped = [self.drop(group) for group, life in list(self.lives.items()) if lives.get(group) != life]
        self._lives = dict(lives)
        for group in sorted({*lives, *self._held}):
            self._machine.enter(group, step)  # nobody is sent anything: model servers say when a group begins
        return [applied for applied in dropped if applied is not None]

    def rest(self, group: int) -> Applied | None:
        """The group has nothing to train for now, so the others do not wait for it."""
        decision = self._machine.rest(group)
        return self._applied(decision.apply, decision.reason)

    def sit_out(self, group: int, life: int, step: int) -> Applied | None:
        """This team of the group has nothing to train in a step that others train (sync). All its workers say so; once counts."""
        done = self._machine.done(group)
        if self.life(group) != life or done is None or done > step:
            return None
        self._machine.check(group, step)
        self._begin_at(group, step + 1)
        self._pushed[group] = _Pushed(step, self.version, counts=False)
        decision = self._machine.pushed(group, step)
        return self._applied(decision.apply, decision.reason)

    def progress(self, life: int) -> tuple[int, int] | None:
        """How far a lost life has got: see `zmqtrain.server.aggregator.Aggregator.progress`."""
        done = self._gone.get(life)
        return None if done is None else (done, done)

    def forget(self, worker: PeerId) -> None:
        """The worker is lost: what it wanted to have evaluated is no longer."""
        for turn in [turn for turn in self._waiting if isinstance(turn, EvaluationTurn) and turn.worker == worker]:
            del self._waiting[turn]

    # A copy on another server, if groups have one worker.

    @property
    def unapplied(self) -> bool:
        """Whether gradients wait to be applied."""
        return bool(self._pushed)

    def state(self) -> dict[str, Any]:
        """Plain values for `load`, when nothing is `unapplied`. What has arrived, but has had no turn, is not in it."""
        assert not self._pushed
        assert not self._held
        assert not self._again
        return {
            "machine": self._machine.state(),
            "steps": [[step.step, step.read] for step in self._steps],
            "gone": [[life, done] for life, done in self._gone.items()],
            "version": self.version,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what `state` has told of, but for the lives (`begin`)."""
        self._machine.load(state["machine"])
        for group, (step, read) in enumerate(state["steps"]):
            self._begin_at(group, step)
            self._steps[group].read = read
        self._gone = dict(state["gone"])
        self.version = state["version"]

    def _go_to(self, group: int, step: int) -> None:
        """The team's next step is this one, if it may be. Raises `ProtocolError`."""
        if self._again.get(group, step) != step:
            raise ProtocolError(f"group {group} sent step {step}, but must train step {self._again[group]} once more")
        if group not in self._again:
            self._machine.check(group, step)
        if step != self._steps[group].step and not self._steps[group].parts:
            self._begin_at(group, step)

    def _begin_at(self, group: int, step: int) -> None:
        self._steps[group] = _Step(step, read=self._steps[group].read)
        for place in [place for place in self._next if place.group == group]:
            self._next[place] = (step, 0)

    def _unseat(self, group: int) -> int | None:
        """The group's team trains no more. Returns it. What has arrived from it is forgotten."""
        for turn in [turn for turn in self._waiting if isinstance(turn, Turn) and turn.group == group]:
            del self._waiting[turn]
        self._begin_at(group, self._steps[group].step)
        self._again.pop(group, None)
        return None if self._lives is None else self._lives.pop(group, None)

    def _note(self, group: int, life: int) -> None:
        done = self._machine.done(group)
        if done is not None:
            self._gone[life] = done

    def _counts(self, group: int) -> bool:
        """Whether the group's batch has not counted yet."""
        return group not in self._again and not any(self._gone.get(life, -1) > step for life, step in self._steps[group].torn)

    def _complete(self, number: int) -> None:
        """Let the group's next micro-batch wait for its turn, if it is complete and not waiting yet."""
        group = self._steps[number]
        if len(group.parts) < len(self._positions[number]):
            return  # the number of each worker's micro-batches is known when the first one is complete
        most = max(group.parts.values())
        for micro_batch in range(group.queued, most):
            due = {position for position, micro_batches in group.parts.items() if micro_batch < micro_batches}
            if group.here.get(micro_batch, set()) != due:
                return
            del group.here[micro_batch]
            self._completed += 1
            turn = Turn(number, group.step, micro_batch, tuple(sorted(due)), micro_batch == most - 1, self._counts(number))
            self._waiting[turn] = self._completed
            group.queued += 1

    def _applied(self, groups: tuple[int, ...], reason: str) -> Applied | None:
        pushed = {group: self._pushed.pop(group) for group in groups}
        count = tuple(group for group in groups if pushed[group].counts)
        if not count:
            return None
        of = [pushed[group] for group in count]
        applied = Applied(count, tuple(each.step for each in of), tuple(self.version - each.read for each in of), reason)
        self.version += 1
        return applied


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A group's gradients that are complete."""

    step: int
    read: int
    """The version with which the first of them was computed."""
    counts: bool


class _Step:
    """A group's progress in its step."""

    __slots__ = ("computed", "here", "parts", "queued", "read", "step", "torn")

    def __init__(self, step: int, read: int = 0) -> None:
        self.step = step
        self.parts: dict[int, int] = {}  # position -> its number of micro-batches
        self.here: dict[int, set[int]] = {}  # micro-batch -> positions whose parts have arrived
        self.queued = 0
        """The number of complete micro-batches."""
        self.computed = 0
        self.torn: tuple[tuple[int, int], ...] = ()
        self.read = read
        """The version with which the first micro-batch was computed."""


def _claimant(waiting: Turn | EvaluationTurn) -> int | PeerId:
    return waiting.group if isinstance(waiting, Turn) else waiting.worker
