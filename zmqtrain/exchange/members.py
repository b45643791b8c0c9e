"""The workers that take part in the training at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from zmqtrain.collectives.group import Group
from zmqtrain.data.division import Division, Span
from zmqtrain.data.slots import Life, Slot, SlotPlan
from zmqtrain.data.teams import Change as TeamsChange
from zmqtrain.data.teams import Team
from zmqtrain.exchange.contents import Contents
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.wire.payload import Value

T = TypeVar("T")

#: Called when others take part from a step on: with the step, and all workers that then take part.
Change = Callable[[int, tuple[PeerId, ...]], None]
#: Prepares a change of the members, which all have agreed on, for a step: gets the step, the processes (incarnations) that take
#: part from there on, and the version of the view that says so. Returns the step from which they do; the same on all members, and
#: not before the given one.
Prepare = Callable[[int, Mapping[PeerId, int], int], Awaitable[int]]


class Members(Protocol):
    """The workers that train a step. All of them give the same answer for the same step."""

    survives: bool
    """Whether the others continue after the loss of a member. If not, a loss ends the run."""
    late: bool
    """Whether this worker joins a run that has already begun."""
    slots: SlotPlan | None
    """Who trains which batches, if that depends on who was lost. Set by an exchange that knows how far the lost ones have got."""
    limits: tuple[int | None, int | None]
    """After how many steps, and after how many slots, training ends, as far as the job says so. Set before an exchange begins."""
    repeats: bool
    """Whether a group that has lost a worker trains the step once more that it had under way. Its others wait for that."""
    splits: bool
    """Whether groups have several workers of which some may be lost, and the others go on."""
    assigns: bool
    """Whether all agree with whose state a worker begins that comes later (`source`), so that it need not ask for one."""
    divides: bool
    """Whether all workers train in step, and divide the samples of each step anew whenever the members change: by `division`."""
    division: Division | None
    """Who trains which samples, once it has begun."""
    takes_turns: bool
    """Whether groups with models of their own, which train in step, take turns at batches: others train what a lost one has left.
    Then there are `slots`, unless the data is a stream."""

    @property
    def teams(self) -> tuple[Team, ...]:
        """The teams of all groups now, if groups have several workers of which some may be lost and the others go on."""
        ...

    def at(self, step: int) -> tuple[PeerId, ...]:
        """The workers that train ``step``, by rank."""
        ...

    def slot(self, step: int) -> Slot | None:
        """What this worker trains at ``step`` (its team, if there are `teams`), if there are `slots`; ``None``: nothing."""
        ...

    def sits_out(self, step: int) -> bool:
        """Whether this worker (or its team) has a part in ``step``, and nothing to train in it, while others have."""
        ...

    def turn(self, step: int) -> Slot | None:
        """As `slot`, but as if training went on for ever. May be called in any thread."""
        ...

    def unit(self, peer: PeerId, step: int) -> Life:
        """What takes a turn at ``step``, if ``peer`` trains it and these are taken by turns: the process, or its group."""
        ...

    def begin_slots(self, since: int = 0, first: int | None = None, left: Sequence[int] = ()) -> SlotPlan:
        """Begin `slots`, if they have not begun: with what is left at ``since`` in a run that is resumed there, if that is not what
        follows from the step alone."""
        ...

    def team(self) -> Team | None:
        """This worker's team now, if there are `teams`."""
        ...

    def form(self, change: TeamsChange) -> None:
        """There are other `teams`."""

    def first_step(self, team: Team) -> int:
        """The step with which one of the `teams` began."""
        ...

    @property
    def changed(self) -> object:
        """Another object after each change of the members."""
        ...

    def present(self, step: int, among: Collection[PeerId] | None = None) -> tuple[PeerId, ...]:
        """Those of this worker's group (or ``among`` these), if groups have several workers and models of their own, that train
        ``step``, as far as all of the group know now. May be called in any thread."""
        ...

    def source(self, life: Life) -> Life | None:
        """With whose state this process begins, or has begun, if it has come later and all agree on that (`assigns`)."""
        ...

    def share(self, step: int) -> tuple[int, int]:
        """This worker's place among those that divide the samples of its batch at ``step``, and their number. May be called in any
        thread."""
        ...

    def begin_division(self, since: int = 0, first: int | None = None, left: Sequence[Span] = ()) -> None:
        """Begin `division`, if this run `divides` and it has not begun: with what is left at ``since``, if that is not what follows
        from the step alone."""

    def work_from(self, step: int) -> Value:
        """Who trains what from ``step`` on (the `division`, or the `slots` of those who take turns), for a worker that joins;
        ``None`` if that follows from the step."""
        ...

    def take_work(self, step: int, value: Value) -> None:
        """Begin with what another worker's `work_from` has returned. Raises `ProtocolError`."""

    def take_over(self, contents: Contents) -> None:
        """Whenever somebody of those who take turns is lost, ask what this worker's model contains of it. Call it before the first
        step."""

    def spans(self, step: int) -> tuple[Span, ...]:
        """What this worker trains at ``step``, if there is a `division`. May be called in any thread."""
        ...

    def joins(self, step: int, *, among: Collection[PeerId] | None = None) -> bool:
        """Whether any worker (``among`` these) takes part from ``step`` on. Only to be asked once it is known who trains that
        step."""
        ...

    def there(self, peer: PeerId, step: int) -> bool:
        """Whether ``peer``, which trains ``step``, is still present. Another process that now has its name does not count."""
        ...

    def incarnation(self, peer: PeerId, step: int) -> int | None:
        """Which process of ``peer`` trains ``step``, counted from 0; None if none does."""
        ...

    @property
    def own_incarnation(self) -> int:
        """Which process of this worker this one is."""
        ...

    def neighbours(self) -> tuple[PeerId, ...]:
        """The other workers that can take part at the moment: those before this one, from near to far, then the others."""
        ...

    async def join(self) -> int:
        """Take part from now on, if late. Returns the first step."""
        ...

    async def release(self, step: int) -> bool:
        """Wait until it is known who trains ``step``. Only afterwards may it begin. Returns false if, as far as is known, there is
        nothing to train any more: should others leave something, call this again."""
        ...

    async def settled(self) -> None:
        """Wait until it is known who trains the steps from now on. Raises the error that prevents it."""

    async def broken(self) -> BaseException:
        """Wait until it can no longer be agreed on who trains the steps from now on, and return the error."""
        ...

    async def begin(self, step: int, due: Callable[[], bool]) -> bool:
        """As `release`, just before ``step`` begins: it may begin if ``due()`` then says so, which is returned."""
        ...

    async def all_trained(self, step: int, more: Callable[[], bool]) -> int | None:
        """This worker has trained up to ``step``, and had no more to do. Wait until that is so of all members. Returns the largest
        of their steps; ``None`` if others take part from now on, so that there may be ``more()`` to do."""
        ...

    def before_change(self, prepare: Prepare) -> None:
        """Call ``prepare`` before each change, and wait for it."""

    def before_steps(self, enter: Callable[[], Awaitable[bool]]) -> None:
        """`begin` lets a step begin only if ``enter()`` has returned true, with nobody lost or come since."""

    def on_change(self, change: Change) -> None:
        """Call ``change(step, members)`` whenever it becomes known that other workers train from ``step`` on, before that step may
        begin."""

    async def together(
        self, name: str, step: int, run: Callable[[Group], Awaitable[T]], *, among: Collection[PeerId] | None = None
    ) -> T:
        """Run a collective of all workers (of those ``among`` these) that trained the step before ``step`` and are still present;
        all of them call it.

        If one is lost in the meantime, ``run`` is called again from the start, with a smaller group. ``name`` must differ in each
        call, and so must the tags of its collectives."""
        ...

    async def aligned(self, name: str, group: Group) -> None:
        """Within `together`, called by all of the ``group`` that it has given: returns on all of them or raises `PeerLostError` on
        all of them. So what only some of them do together after it (those who divide a model) is about the same attempt."""

    async def stop(self) -> None:
        """End this worker's part in agreements about the members."""


class FixedMembers:
    """Implements `Members` for a fixed set of workers that stay from beginning to end."""

    survives = False
    late = False
    slots: SlotPlan | None = None
    limits: tuple[int | None, int | None] = (None, None)
    repeats = False
    splits = False
    assigns = False
    divides = False
    division: Division | None = None
    takes_turns = False

    def __init__(self, endpoint: Endpoint, members: tuple[PeerId, ...], *, timeout_s: float) -> None:
        self._endpoint, self._members, self._timeout_s = endpoint, members, timeout_s
        self._group: Group | None = None

    def at(self, step: int) -> tuple[PeerId, ...]:
        return self._members

    def slot(self, step: int) -> Slot | None:
        return None

    def sits_out(self, step: int) -> bool:
        return False

    def turn(self, step: int) -> Slot | None:
        return None

    def unit(self, peer: PeerId, step: int) -> Life:
        return peer, 0

    def begin_slots(self, since: int = 0, first: int | None = None, left: Sequence[int] = ()) -> SlotPlan:
        raise AssertionError("fixed members take the batches that follow from the step")

    @property
    def teams(self) -> tuple[Team, ...]:
        return ()

    def team(self) -> Team | None:
        return None

    def form(self, change: TeamsChange) -> None:
        raise AssertionError("fixed members form no teams")

    def first_step(self, team: Team) -> int:
        raise AssertionError("fixed members form no teams")

    @property
    def changed(self) -> object:
        return None

    def present(self, step: int, among: Collection[PeerId] | None = None) -> tuple[PeerId, ...]:
        return ()

    def source(self, life: Life) -> Life | None:
        return None

    def share(self, step: int) -> tuple[int, int]:
        raise AssertionError("fixed members take the samples that follow from the step")

    def begin_division(self, since: int = 0, first: int | None = None, left: Sequence[Span] = ()) -> None:
        return None

    def work_from(self, step: int) -> Value:
        return None

    def take_work(self, step: int, value: Value) -> None:
        raise AssertionError("fixed members do not join late")

    def take_over(self, contents: Contents) -> None:
        return None

    def spans(self, step: int) -> tuple[Span, ...]:
        raise AssertionError("fixed members take the samples that follow from the step")

    def joins(self, step: int, *, among: Collection[PeerId] | None = None) -> bool:
        return False

    def there(self, peer: PeerId, step: int) -> bool:
        return True

    def incarnation(self, peer: PeerId, step: int) -> int | None:
        return 0 if peer in self._members else None

    @property
    def own_incarnation(self) -> int:
        return 0

    def neighbours(self) -> tuple[PeerId, ...]:
        return nearest_first(self._members, self._endpoint.peer)

    async def join(self) -> int:
        return 0

    async def release(self, step: int) -> bool:
        return True

    async def settled(self) -> None:
        return None

    async def broken(self) -> BaseException:
        await asyncio.Event().wait()
        raise AssertionError("fixed members agree on nothing")

    async def begin(self, step: int, due: Callable[[], bool]) -> bool:
        return True

    async def all_trained(self, step: int, more: Callable[[], bool]) -> int | None:
        raise AssertionError("fixed members wait at a barrier")

    def before_change(self, prepare: Prepare) -> None:
        return None

    def before_steps(self, enter: Callable[[], Awaitable[bool]]) -> None:
        return None

    def on_change(self, change: Change) -> None:
        return None

    async def together(
        self, name: str, step: int, run: Callable[[Group], Awaitable[T]], *, among: Collection[PeerId] | None = None
    ) -> T:
        assert among is None, "fixed members do all of it together"
        if self._group is None:
            self._group = group_of(self._endpoint, self._members, "members", self._timeout_s)
        return await run(self._group)

    async def aligned(self, name: str, group: Group) -> None:
        return None

    async def stop(self) -> None:
        return None


def nearest_first(workers: Sequence[PeerId], me: PeerId) -> tuple[PeerId, ...]:
    """The others of ``workers``, by rank: those before ``me``, from near to far, then those after it, from the last one on."""
    own = workers.index(me)
    return (*reversed(workers[:own]), *reversed(workers[own + 1 :]))


def group_of(endpoint: Endpoint, members: tuple[PeerId, ...], name: str, timeout_s: float) -> Group:
    """A group of these workers, this endpoint among them."""
    # The others may evaluate or write a checkpoint while this worker waits for them.
    return Group(endpoint, members, members.index(endpoint.peer), name, timeout_s=timeout_s)
