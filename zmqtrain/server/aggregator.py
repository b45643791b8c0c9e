"""How a server handles incoming gradients: it checks and collects them, and decides what to apply and which groups to answer.

A state machine without I/O around `StalenessMachine`. What is decided together is a *unit*: one piece, so that the answer to a
bucket never waits for another bucket; or all pieces of the server, if a global norm or snapshots require it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zmqtrain.net.endpoint import PeerId
from zmqtrain.server.shard_entry import Gradient, Sum
from zmqtrain.server.staleness import Decision, DuplicatePushError, Policy, StalenessMachine
from zmqtrain.wire.payload import Value

#: ``none``: pushes are applied as they arrive. With snapshots all servers apply the steps of groups in one order: server 0
#: ``decide``s it, the others ``follow``.
Order = Literal["none", "decide", "follow"]
#: With which values of a piece a team begins that follows another one of its group: the present ones; those that answer what the
#: other one has pushed; the present ones, or those before the last update, for a step that the other one has pushed already; or
#: those with which the group enters ``later``.
Begins = Literal["now", "answer", "again", "again before", "later"]
#: What has become of a push: it is the group's next one; it has arrived, and the answer comes later; it was answered.
Standing = Literal["new", "waits", "answered"]


@dataclass(frozen=True, slots=True)
class Push:
    """A group's gradient of one piece for one step. The gradient is only read."""

    group: int
    step: int
    piece: int
    version: int
    gradient: Gradient
    hyperparameters: Mapping[str, Value] | None = None
    passed_over: bool = False
    """Whether the group's whole gradient was not finite."""
    life: int | None = None
    """Which of the group's processes has pushed it, if groups may be lost."""
    torn: tuple[tuple[int, int], ...] = ()
    """The lives that were lost while they trained this batch, and their steps: if the gradient of one of them counts here, this one
    must not."""
    nothing: bool = False
    """The group has no batch in this step, and no gradient. It is answered as the others are."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step of one piece's optimizer."""

    piece: int
    gradient: Gradient
    hyperparameters: Mapping[str, Value] | None
    reads: tuple[tuple[int, int, int], ...]
    """(group, step, version that it had read) of each gradient in the update."""
    passed_over: bool = False
    """Whether the update is counted but changes nothing."""
    skipped: tuple[int, ...] = ()
    """Groups whose gradients do not count, because they have none, or because the same batch has already counted."""


EventKind = Literal["step", "left", "keep", "show"]


@dataclass(frozen=True, slots=True)
class OrderedEvent:
    """What comes next with snapshots: a group's step, the leaving of a group, or that servers keep (or keep and show) their state
    for a checkpoint."""

    kind: EventKind
    number: int
    """The number of the group, or the step of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the server's state for the checkpoint at ``step``; with ``show`` workers read it, too."""

    step: int
    show: bool
    to: PeerId | None = None
    """The worker that reads it; ``None``: those of ``group``, each its own part."""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """First apply ``updates``, then send the parameters of ``pieces`` to each (group, for step) of ``answer`` and to those that
    have ``entered``, then ``keep``."""

    updates: tuple[Update, ...]
    pieces: tuple[int, ...]
    answer: tuple[tuple[int, int], ...]
    reason: str
    keep: Keep | None = None
    entered: tuple[int, ...] = ()


class Aggregator:
    """Takes the pushes to one server. An invalid push raises `ProtocolError` and changes nothing."""

    def __init__(
        self,
        pieces: Sequence[int],
        policy: Policy,
        groups: int,
        *,
        sums: Callable[[Sequence[int]], Sum],
        first_step: int = 0,
        whole: bool = False,
        order: Order = "none",
    ) -> None:
        """``sums(groups)`` makes a sum for a piece's gradients of these groups. ``whole``: the server's pieces are one unit
        (``order`` needs it); otherwise each piece is a unit."""
        assert whole or order == "none"
        members = range(groups)
        cut = [tuple(pieces)] if whole else [(piece,) for piece in pieces]
        make_sum = sums if policy.kind == "sync" else None
        self._units = [_Unit(part, StalenessMachine(policy, members, first_step), make_sum) for part in cut]
        self._unit_of = {piece: unit for unit in self._units for piece in unit.pieces}
        self._order = order
        self._to_come: deque[OrderedEvent] = deque()
        #: With order "decide": what the other servers must be told, oldest first; the caller empties it.
        self.decided: list[OrderedEvent] = []

    def lead(self, piece: int, group: int) -> int:
        """The number of steps by which the group's pushes of this piece are ahead of the slowest group's."""
        return self._unit_of[piece].machine.lead(group)

    def pushed(self, push: Push) -> list[Batch]:
        """Take a gradient of a piece of this server."""
        unit = self._unit_of[push.piece]
        if not unit.take(push):
            return []
        if self._order == "follow":
            return self._follow()
        if self._order == "decide":
            self.decided.append(OrderedEvent("step", push.group))
        return [unit.complete(push.group)]

    def left(self, group: int) -> list[Batch]:
        """The group trains no more. If another server orders events, that server's order counts and this does nothing."""
        if self._order == "follow":
            return []
        if self._order == "decide":
            self.decided.append(OrderedEvent("left", group))
        return _useful(unit.leave(group) for unit in self._units)

    # If groups may be lost. Pieces are then decided about one by one, in no given order.

    def drop(self, group: int, life: int) -> list[Batch]:
        """This life of the group is lost. What it has pushed still counts; later pushes must not reach `pushed`."""
        return _useful(unit.drop(group, life) for unit in self._units)

    def hold(self, group: int, life: int) -> None:
        """As `drop`, but the group keeps its place: the others wait until another team of it goes on."""
        for unit in self._units:
            unit.note(group, life)

    def follow(self, group: int, first: int) -> dict[int, Begins]:
        """Another team of the group goes on at step ``first``. Returns what it begins with, by piece."""
        return {piece: unit.follow(group, first) for piece, unit in self._unit_of.items()}

    def progress(self, life: int) -> tuple[int, int] | None:
        """How far a dropped life has got: the fewest and the most steps that it has pushed of a piece. ``None``: it never took
        part, or there is no piece here."""
        steps = [unit.gone[life] for unit in self._units if life in unit.gone]
        return (min(steps), max(steps)) if steps else None

    def away(self, group: int) -> bool:
        """Whether the group takes no part now, or rests."""
        return any(unit.machine.clock(group) is None or unit.machine.rests(group) for unit in self._units)

    def enter(self, group: int, step: int) -> list[Batch]:
        """See `StalenessMachine.enter`."""
        return _useful(unit.enter(group, step) for unit in self._units)

    def rest(self, group: int) -> list[Batch]:
        """See `StalenessMachine.rest`."""
        return _useful(unit.rest(group) for unit in self._units)

    # If another server has a copy. Workers may then send again what has arrived here by another way.

    def standing(self, piece: int, group: int, step: int) -> Standing:
        """What has become of the group's push of this step. Raises `ProtocolError` if it is neither the group's next one nor the
        one before that."""
        unit = self._unit_of[piece]
        done = unit.machine.done(group)
        if done is not None and step == done - 1:
            return "waits" if unit.machine.waits(group) else "answered"
        unit.machine.check(group, step)
        return "new"

    def enters(self, piece: int, group: int) -> bool:
        """Whether the group is to get the parameters for its first step later."""
        return self._unit_of[piece].machine.waits(group)

    def keeps(self, piece: int) -> bool:
        """Whether a push of the piece has arrived that is not applied yet."""
        return bool(self._unit_of[piece].arrived)

    def state(self) -> list[Any]:
        """Plain values for `load`, for each piece in order; without the pushes that are not applied yet, which `put_back` takes."""
        assert all(len(unit.pieces) == 1 for unit in self._units), "pieces are decided about together"
        return [[unit.machine.state(), [[life, step] for life, step in unit.gone.items()]] for unit in self._units]

    def load(self, state: Sequence[Any]) -> None:
        """Become what `state` has told of, of the same pieces."""
        for unit, (machine, gone) in zip(self._units, state, strict=True):
            unit.machine.load(machine)
            unit.gone = dict(gone)

    def put_back(self, push: Push, groups: Collection[int]) -> None:
        """After `load`: a push that had arrived, and is not applied yet. ``groups``: all of which there is one of this piece."""
        self._unit_of[push.piece].put_back(push, groups)

    def keep(self, keep: Keep) -> list[Batch]:
        """A checkpoint is to be kept. If another server orders events, that server's order counts and this does nothing."""
        if self._order == "follow":
            return []
        if self._order == "decide":
            self.decided.append(OrderedEvent("show" if keep.show else "keep", keep.step))
        return [_keeping(keep)]

    def ordered(self, event: OrderedEvent) -> list[Batch]:
        """With order "follow": server 0 has decided what comes next. (A server without pieces has nothing to order.)"""
        if self._order != "follow":
            return []
        self._to_come.append(event)
        return self._follow()

    def _follow(self) -> list[Batch]:
        """Everything that has been both ordered and received, in the given order."""
        (unit,) = self._units
        batches = []
        while self._to_come:
            event = self._to_come[0]
            if event.kind in ("keep", "show"):
                batches.append(_keeping(Keep(event.number, event.kind == "show")))
            elif event.kind == "left":
                batches.append(unit.leave(event.number))
            elif unit.is_complete(event.number):
                batches.append(unit.complete(event.number))
            else:
                break
            self._to_come.popleft()
        return _useful(batches)


class _Unit:
    """Pieces about which decisions are made together."""

    __slots__ = ("_make_sum", "_sums", "arrived", "gone", "machine", "pieces")

    def __init__(self, pieces: tuple[int, ...], machine: StalenessMachine, make_sum: Callable[[Sequence[int]], Sum] | None) -> None:
        """``make_sum``: given if the gradients of all groups are applied together."""
        self.pieces = pieces
        self.machine = machine
        self._make_sum = make_sum
        self.arrived: dict[int, dict[int, Push]] = {}
        """group -> piece -> push; a group has at most one pending step."""
        self._sums: dict[int, Sum] = {}
        self.gone: dict[int, int] = {}
        """Lives that were dropped, each with the number of steps that count here."""

    def take(self, push: Push) -> bool:
        """Store a push. Returns whether the group's step is complete now."""
        self.machine.check(push.group, push.step)
        arrived = self.arrived.get(push.group, {})
        if push.piece in arrived:
            raise DuplicatePushError(f"group {push.group} has already pushed piece {push.piece} of step {push.step}")
        self._add(push, self.machine.groups)
        arrived[push.piece] = push
        self.arrived[push.group] = arrived
        return len(arrived) == len(self.pieces)

    def put_back(self, push: Push, groups: Collection[int]) -> None:
        self._add(push, sorted({*self.machine.groups, *groups}))  # some of them may be gone since
        self.arrived[push.group] = {push.piece: push}

    def _add(self, push: Push, groups: Sequence[int]) -> None:
        if self._make_sum is not None and not self._must_not_count(push):
            if push.piece not in self._sums:
                self._sums[push.piece] = self._make_sum(groups)
            self._sums[push.piece].add(push.group, push.gradient)

    def _must_not_count(self, push: Push) -> bool:
        """Whether there is nothing that could, or the same batch already counts here."""
        return push.nothing or any(self.gone.get(life, -1) > step for life, step in push.torn)

    def note(self, group: int, life: int) -> None:
        """So far this life of the group has got; it does nothing more."""
        assert len(self.pieces) == 1, "a step of several pieces would be dropped in part"
        done = self.machine.done(group)
        if done is not None:
            self.gone[life] = done

    def drop(self, group: int, life: int) -> Batch:
        self.note(group, life)
        return self.leave(group)

    def follow(self, group: int, first: int) -> Begins:
        machine = self.machine
        waits, done = machine.waits(group), machine.done(group)
        if machine.comes(group):
            return "later"
        assert done is not None, "its place was kept"
        if done > first:
            assert done == first + 1
            return "again" if waits else "again before"
        return "answer" if waits else "now"

    def enter(self, group: int, step: int) -> Batch:
        return self._batch(self.machine.enter(group, step))

    def rest(self, group: int) -> Batch:
        return self._batch(self.machine.rest(group))

    def is_complete(self, group: int) -> bool:
        return len(self.arrived.get(group, {})) == len(self.pieces)

    def complete(self, group: int) -> Batch:
        """Apply the group's complete step."""
        step = next(iter(self.arrived[group].values())).step
        return self._batch(self.machine.pushed(group, step))

    def leave(self, group: int) -> Batch:
        return self._batch(self.machine.left(group))

    def _batch(self, decision: Decision) -> Batch:
        updates: list[Update] = []
        if decision.apply:
            pushes = [self.arrived.pop(group) for group in decision.apply]
            for piece in self.pieces:
                of_piece = [by_piece[piece] for by_piece in pushes]
                skipped = tuple(push.group for push in of_piece if self._must_not_count(push))
                none = len(skipped) == len(of_piece)
                summed = self._make_sum is not None and not none
                gradient = self._sums.pop(piece).mean() if summed else of_piece[0].gradient
                reads = tuple((push.group, push.step, push.version) for push in of_piece)
                passed_over = none or any(push.passed_over for push in of_piece)
                updates.append(Update(piece, gradient, of_piece[0].hyperparameters, reads, passed_over, skipped))
        return Batch(tuple(updates), self.pieces, decision.answer, decision.reason, entered=decision.entered)


def _useful(batches: Iterable[Batch]) -> list[Batch]:
    return [batch for batch in batches if batch.updates or batch.answer or batch.keep or batch.entered]


def _keeping(keep: Keep) -> Batch:
    return Batch((), (), (), f"checkpoint {keep.step}", keep)
