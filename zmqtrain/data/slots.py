"""Which batch each worker takes at each step, if workers may be lost and others may take their place. Pure.

The data is an endless sequence of *slots*: slot ``step * groups + group`` is the batch that this group takes at this step as long
as nobody is lost. When the members change, a new *era* begins at a step that all of them know. From there on the members take
turns, each step the next slots: first those that lost workers have left (what they have begun comes before the rest), then new
ones. So each slot is trained once, whoever was lost, and an epoch has all its samples::

    era 0: 3 members    step 0: 0 1 2    step 1: 3 4 -        the last one is lost in step 1
    era 1: 2 members    step 2: 5 6      step 3: 7 8    ...

A *life* is one process under a worker's name; or one of a group of several workers, under the name of its first worker: it lasts
as long as somebody of the group is there who was there before (`lives_after`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value

#: A worker's name, and the number that tells its processes apart (`zmqtrain.membership.view.Member.incarnation`).
Life: TypeAlias = tuple[PeerId, int]
#: How far a lost life has got: every gradient before the first step counts everywhere, and none from the second step on counts
#: anywhere. They differ by at most one.
Progress: TypeAlias = tuple[int, int]


def lives_after(before: Sequence[Life], here: Sequence[tuple[PeerId, int | None]]) -> list[Life]:
    """The lives of those that are ``here``: each by its name and the number of a life that begins, or ``None`` if it goes on with
    the one that it had ``before``."""
    known = dict(before)
    return [(name, known[name] if number is None else number) for name, number in here]


@dataclass(frozen=True, slots=True)
class Slot:
    """The batch of one group at one step, as a place in the sequence of all batches."""

    number: int
    torn: tuple[tuple[int, int], ...] = ()
    """The lives (by incarnation) that were lost while they trained it, each with its step: their gradient may already count for
    some parameters, and counts for each only once."""

    def place(self, groups: int) -> tuple[int, int]:
        """The step and the group to which it belongs as long as nobody is lost."""
        return divmod(self.number, groups)


@dataclass(frozen=True, slots=True)
class Era:
    """The steps between two changes of the members."""

    since: int
    """Its first step."""
    members: tuple[Life, ...]
    """The workers that train, in the order in which they take turns."""
    first: int
    """The first slot that nobody has taken before, except for those that are ``left``."""
    left: tuple[Slot, ...] = ()
    """Slots that others have left; they come first."""

    def slot(self, step: int, place: int) -> Slot:
        """The slot of the member at this place."""
        turn = (step - self.since) * len(self.members) + place
        return self.left[turn] if turn < len(self.left) else Slot(self.first + turn - len(self.left))

    def rest(self, step: int) -> tuple[tuple[Slot, ...], int]:
        """What is ``left`` when ``step`` begins, and the ``first`` slot after that."""
        turns = (step - self.since) * len(self.members)
        return self.left[turns:], self.first + max(0, turns - len(self.left))


class SlotPlan:
    """The eras of a run. Every worker has the same plan, or the part of it since it has joined."""

    def __init__(self, members: Sequence[Life], *, since: int = 0, first: int | None = None, left: Sequence[Slot] = ()) -> None:
        """``members``: those that the run begins with, one of each group. ``since``, ``first`` and ``left``: where a resumed run
        goes on."""
        begin = since * len(members) if first is None else first
        self.eras = [Era(since, tuple(members), begin, tuple(left))]
        self.total: int | None = None
        """The number of slots after which training ends, if that is known."""
        self.steps: int | None = None
        """The number of steps after which training ends, if that is known. Only what has been torn is still trained after them, so
        that each batch counts for all parameters or for none."""
        self.handed_on: dict[Life, int] = {}
        """Lost lives of which others have something that not everybody has: they may be lost with it. Each with the step before
        which what it has trained counts."""

    @classmethod
    def from_value(cls, value: object) -> SlotPlan:
        """What `to_value` of another worker has returned. Raises `ProtocolError`."""
        try:
            rows, handed_on = cast(Any, value)
            eras = [
                Era(
                    int(since),
                    tuple((str(peer), int(life)) for peer, life in members),
                    int(first),
                    tuple(Slot(int(number), tuple((int(life), int(step)) for life, step in torn)) for number, torn in left),
                )
                for since, members, first, left in rows
            ]
            known = {(str(peer), int(life)): int(step) for peer, life, step in handed_on}
        except (TypeError, ValueError):
            eras, known = [], {}
        if not eras or not all(era.members for era in eras):
            raise ProtocolError(f"{value!r:.100} does not say who trains which batches")
        plan = cls(eras[0].members, since=eras[0].since)
        plan.eras, plan.handed_on = eras, known
        return plan

    def to_value(self) -> list[Value]:
        """This plan without its end, for a worker that joins."""
        eras: list[Value] = [
            [
                era.since,
                [[peer, life] for peer, life in era.members],
                era.first,
                [[slot.number, [[life, step] for life, step in slot.torn]] for slot in era.left],
            ]
            for era in self.eras
        ]
        return [eras, [[peer, life, step] for (peer, life), step in self.handed_on.items()]]

    def lost(self, living: Collection[Life]) -> list[Life]:
        """Those of whom it is to be decided what counts when others than the ``living`` are gone: first those that are
        `handed_on`."""
        return [*self.handed_on, *(life for life in self.eras[-1].members if life not in living)]

    def go_on_without(self, since: int, living: Sequence[Life], counted: Sequence[tuple[int, bool]]) -> None:
        """These are the members from ``since`` on. ``counted``: for each of those that are `lost`, the step before which what it
        has trained is in somebody's model, and whether it is in everybody's."""
        since = max(since, self.eras[-1].since)
        again: list[Slot] = []
        progress: dict[Life, Progress] = {}
        handed_on = dict(self.handed_on)
        for life, (step, by_all) in zip(self.lost(living), counted, strict=True):
            until = self.handed_on.get(life, since)
            low = min(until, max(step, self.first_step(life)))
            if life in self.handed_on:
                again += self._left_by(life, low, low, until)
            else:
                progress[life] = low, low
            handed_on[life] = low
            if by_all or low == self.first_step(life):
                del handed_on[life]
        self.change(since, living, progress)
        self.handed_on = handed_on
        if again:
            era = self.eras[-1]
            self.eras[-1] = replace(era, left=tuple(sorted((*era.left, *again), key=lambda slot: slot.number)))

    def first_step(self, life: Life) -> int:
        """The first step in which this life has a part."""
        return next(era.since for era in self.eras if life in era.members)

    def taken(self, step: int) -> int:
        """The number of slots that are trained in ``step``."""
        era = self.at(step)
        if step < era.since:
            return 0
        turns = len(era.members)
        left, first = era.rest(step)
        old, new = left[:turns], turns - len(left[:turns])
        if self.steps is not None and step >= self.steps:
            return sum(bool(slot.torn) for slot in old)
        if self.total is None:
            return turns
        return sum(slot.number < self.total for slot in old) + max(0, min(new, self.total - first))

    def done(self, step: int) -> int:
        """The number of slots that are trained before ``step``, if those that others have left count as not trained."""
        left, first = self.at(step).rest(step)
        ended = first if self.total is None else min(first, self.total)
        return ended - sum(self.total is None or slot.number < self.total for slot in left)

    def at(self, step: int) -> Era:
        """The era of ``step``."""
        return next((era for era in reversed(self.eras) if era.since <= step), self.eras[0])

    def slot(self, step: int, life: Life) -> Slot | None:
        """What this life trains at ``step``; ``None`` if it has no part in the step, or there is no slot for it any more."""
        slot = self.turn(step, life)
        if slot is None or (self.total is not None and slot.number >= self.total):
            return None
        return None if self.steps is not None and step >= self.steps and not slot.torn else slot

    def sits_out(self, step: int, life: Life) -> bool:
        """Whether this life has a part in the step, and nothing to train in it, while others have."""
        members = self.at(step).members
        return life in members and self.slot(step, life) is None and self.taken(step) > 0

    def turn(self, step: int, life: Life) -> Slot | None:
        """As `slot`, but as if training went on for ever. Nobody has a part in steps before those of the plan."""
        era = self.at(step)
        return era.slot(step, era.members.index(life)) if life in era.members and step >= era.since else None

    def follow(self, before: Life, after: Life) -> None:
        """The second one goes on in place of the first one, with whatever this one has not done."""
        self.eras = [
            replace(era, members=tuple(after if life == before else life for life in era.members)) if before in era.members else era
            for era in self.eras
        ]

    def change(self, since: int, members: Sequence[Life], progress: Mapping[Life, Progress]) -> None:
        """These are the members from ``since`` on, which is not before the last change. ``progress``: of all that are gone; one
        that is missing has done nothing since the last change."""
        before = self.eras[-1]
        left, first = before.rest(since)
        for life in before.members:
            if life not in members:
                low, high = progress.get(life, (before.since, before.since))
                left += tuple(self._left_by(life, low, high, since))
        era = Era(since, tuple(members), first, tuple(sorted(left, key=lambda slot: (not slot.torn, slot.number))))
        if before.since == since:  # no step of it has begun
            self.eras.pop()
        self.eras.append(era)

    def _left_by(self, life: Life, low: int, high: int, since: int) -> Sequence[Slot]:
        left = []
        for step in range(low, since):
            slot = self.turn(step, life)
            if slot is not None:  # what it has pushed in a step that it sat out is nothing
                torn = step < high and self.slot(step, life) is not None
                left.append(Slot(slot.number, (*slot.torn, (life[1], step))) if torn else slot)
        return left

    @property
    def end(self) -> int | None:
        """The step before which training ends, as far as is known now; ``None`` if nothing ends it."""
        era = self.eras[-1]
        if self.steps is not None:
            torn = sum(bool(slot.torn) for slot in era.left)
            return max(self.steps, era.since + -(-torn // len(era.members)))
        if self.total is None:
            return None
        slots = sum(slot.number < self.total for slot in era.left) + max(0, self.total - era.first)
        return era.since + -(-slots // len(era.members))
