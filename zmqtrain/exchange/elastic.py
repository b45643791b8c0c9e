"""Members that may be lost, and may join, while the training continues.

All members must change over at the same step; otherwise one would wait for a partner that another has already dropped. So when the
view of the members changes, all members in it announce the newest step that they have let begin, and the change takes effect at the
step after the largest of these. From its announcement until the answer a worker lets no further step begin; running steps finish as
planned, without the lost members::

    view changes ──> agree(newest step let begin) ──> from max + 1 on: the new members
                        │                                  ▲
                        └── another member is lost, or ────┘ again, with the next view
                            joins, in the meantime
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.collectives.group import Group
from zmqtrain.data.division import Division, Span
from zmqtrain.data.slots import Life, Slot, SlotPlan, lives_after
from zmqtrain.data.teams import Change as TeamsChange
from zmqtrain.data.teams import Team, first_teams
from zmqtrain.errors import ConnectivityError, PeerLostError, PeerTimeoutError, ProtocolError, ViewChangedError
from zmqtrain.events import Recorder
from zmqtrain.exchange.contents import Contents, known_of, rows_of
from zmqtrain.exchange.groups import Groups
from zmqtrain.exchange.members import Change, Prepare, T, nearest_first
from zmqtrain.exchange.turns import Takers, Turns
from zmqtrain.membership.client import Membership
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Value

#: Members agree on numbers of at most 64 bits, so on so many workers at once.
RANKS_AT_ONCE = 48


@dataclass(frozen=True, slots=True)
class Decision:
    """What the members have agreed on about results that count on all of them or on none."""

    version: int
    """The version of the view that was decided on."""
    living: Mapping[PeerId, int]
    """The workers that are there, and which of their processes."""
    newest: int
    """The newest result (`Commits.step_of`) that one of them has completed; -1 for none."""
    holder: PeerId
    """One that has; if there is any."""
    lack: bool
    """Whether another one, which has trained its step, has not."""


class Commits(Protocol):
    """Something that completes steps on all members or on none; on all of a group, if groups train apart."""

    def hold(self) -> int:
        """Complete nothing from now on, until the next `decide`. Returns the number of the newest that is complete here; -1 for
        none."""
        ...

    def step_of(self, number: int) -> int:
        """The step to which a result belongs, of which a step may have several."""
        ...

    def decide(self, decision: Decision) -> None:
        """The members have agreed; everywhere on the same."""


class ElasticMembers:
    """Implements `zmqtrain.exchange.members.Members`. Make it before the first step."""

    survives = True
    slots: SlotPlan | None = None
    division: Division | None = None
    limits: tuple[int | None, int | None] = (None, None)

    def __init__(
        self,
        endpoint: Endpoint,
        membership: Membership,
        workers: tuple[PeerId, ...],
        timeouts: Timeouts,
        *,
        recorder: Recorder,
        divided: int | None = None,
        usual: int | None = None,
        every: int = 1,
        spares: int = 0,
        groups: Sequence[Sequence[PeerId]] = (),
        apart: Sequence[Sequence[PeerId]] = (),
        whole: Sequence[Sequence[PeerId]] = (),
        repeats: bool = False,
        takes_turns: bool = False,
        prepares: bool = False,
    ) -> None:
        """
        Args:
            workers: all workers that the run can have, by rank.
            divided: the samples of a step, if all workers train in step and divide these.
            usual: those are for so many workers, and others take as many more or fewer. ``None``: they stay.
            every: their gradients are summed in the last of so many steps.
            spares: how many of the workers, the last ones, may come later.
            groups: those that form teams, if groups of several workers train batches of their own, with parameters of model servers
                (`zmqtrain.data.teams`).
            apart: all groups, if these have several workers and models of their own: a group's steps count on all of it or on none.
            whole: all groups, if no worker of one can train without the others: views show all of a group, or none.
            repeats: a group that has lost a worker trains the step once more that it had under way.
            takes_turns: groups with models of their own train what a lost one has left.
            prepares: the exchange calls `before_change` when it starts. Who is lost before that is no exception.
        """
        self.repeats, self.takes_turns = repeats, takes_turns
        self._contents: Contents | None = None
        self._handed_over = -1  # the version of the view with which the `slots` were that another worker has handed over
        self._missed: list[Turns] = []  # of which this worker has no `slots` yet
        self.assigns = bool(apart or (whole and not groups))
        self._takers = Takers(apart or whole) if takes_turns and (apart or whole) else None  # if groups of several take turns
        self._whole = [tuple(group) for group in whole]
        self.splits = bool(apart or groups) and not whole
        self._apart = [tuple(group) for group in apart]
        self._own = next((group for group in self._apart if endpoint.peer in group), ())
        self._sources: dict[Life, Life] = {}
        self._attempts: dict[str, Mapping[PeerId, int]] = {}  # the groups of `together` -> the processes of its members
        self._divided, self._usual, self._every = divided, usual, every
        self.divides = divided is not None
        self.late = membership.late
        self._endpoint, self._membership, self._workers, self._timeouts = endpoint, membership, workers, timeouts
        self._recorder = recorder
        here = self._living(membership.view)
        mine = membership.view.members[endpoint.peer].incarnation
        self._life = (endpoint.peer, mine)
        late = {peer: here.get(peer, mine) for peer in workers if peer in here or peer == endpoint.peer}
        first = late if membership.late else {peer: here.get(peer, 0) for peer in workers[: len(workers) - spares]}
        self._plans: list[tuple[int, Mapping[PeerId, int]]] = [(0, first)]  # first step; members and their incarnations
        self._knows = not membership.late  # who trained before
        named = (*groups, *apart, *whole)
        self._name: PeerId = next((group[0] for group in named if endpoint.peer in group), endpoint.peer)  # of the group
        self._teams: list[TeamsChange] = []
        self._firsts: dict[Life, int] = {}  # the first step of each team that there ever was
        if groups and not membership.late:
            self.form(TeamsChange(0, first_teams(groups, first), {}))
        self._complete = [-1]  # for each of these: the newest step that counted with all who trained it
        self._versions = [-1]  # for each of these: the version of the view
        self._changes_agreed = 0  # how often those that can take part had changed (`View.changes`), in the newest of these views
        self._begun = -1 if membership.late else 0  # the newest step that may have begun
        self._first: int | None = None if membership.late else 0  # this process's first step, once it is known
        self._agreement: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._broken = asyncio.Event()  # set with the error
        self._changes: list[Change] = []
        self._prepare: asyncio.Future[Prepare] | None = asyncio.get_running_loop().create_future() if prepares else None
        self._enter: Callable[[], Awaitable[bool]] | None = None
        self._viewed = asyncio.Event()
        self._groups = Groups(endpoint, timeouts.barrier_s)
        self._commits: Commits | None = None
        self.begins = 0
        """The step with whose parameters this worker has begun."""
        self._stopped = False
        membership.on_view(self._on_view)
        if not self.late:
            self._on_view(membership.view)

    def at(self, step: int) -> tuple[PeerId, ...]:
        return tuple(self._plan(step)[1])

    def slot(self, step: int) -> Slot | None:
        return None if self.slots is None else self.slots.slot(step, self._unit)

    def sits_out(self, step: int) -> bool:
        return self.slots is not None and self.slots.sits_out(step, self._unit)

    @property
    def _unit(self) -> Life:
        me = self._endpoint.peer
        if self._takers is not None and self.slots is not None and self._takers.has_part(me, self.slots.eras[-1]):
            return self._takers.life(me, self.slots.eras[-1])
        team = self.team()
        return self._life if team is None else team.unit

    def unit(self, peer: PeerId, step: int) -> Life:
        if self._takers is None or self.slots is None:
            return peer, self.incarnation(peer, step) or 0
        return self._takers.life(peer, self.slots.at(step))

    def turn(self, step: int) -> Slot | None:
        if self.slots is None:
            return None
        # The team that trains the step may be another one by now.
        unit = next((unit for unit in self.slots.at(step).members if unit[0] == self._name), None)
        return None if unit is None else self.slots.turn(step, unit)

    @property
    def teams(self) -> tuple[Team, ...]:
        return self._teams[-1].teams if self._teams else ()

    def team(self) -> Team | None:
        return next((team for team in self.teams if self._life in team.members), None)

    def form(self, change: TeamsChange) -> None:
        for team in change.teams:
            self._firsts.setdefault(team.unit, change.first(team))
        self._teams.append(change)

    def first_step(self, team: Team) -> int:
        return self._firsts[team.unit]

    @property
    def changed(self) -> object:
        return self._plans[-1]

    def present(self, step: int, among: Collection[PeerId] | None = None) -> tuple[PeerId, ...]:
        planned, living = self._plan(step)[1], self._plans[-1][1]
        of = self._own if among is None else among
        return tuple(peer for peer in of if peer in planned and living.get(peer) == planned[peer])

    def source(self, life: Life) -> Life | None:
        return self._sources.get(life)

    def share(self, step: int) -> tuple[int, int]:
        if self._own:
            there = self.present(step)
            return (there.index(self._endpoint.peer), len(there)) if self._endpoint.peer in there else (0, 1)
        for change in reversed(self._teams):
            team = next((team for team in change.teams if team.name == self._name), None)
            if team is not None and self._firsts[team.unit] <= step and self._life in team.members:
                return team.members.index(self._life), len(team.members)
        return 0, 1

    def begin_slots(self, since: int = 0, first: int | None = None, left: Sequence[int] = ()) -> SlotPlan:
        if self.slots is None:
            present = self._plan(0)[1]
            units = [team.unit for team in self.teams] or list(present.items())
            if self._takers is not None:
                units = self._takers.first(present)
            self.slots = SlotPlan(units, since=since, first=first, left=[Slot(number) for number in left])
            self._take_missed(self.slots)
        return self.slots

    def _take_missed(self, slots: SlotPlan) -> None:
        for turns in self._missed:
            if turns.version > self._handed_over:
                turns.begin(slots)
        self._missed.clear()

    def begin_division(self, since: int = 0, first: int | None = None, left: Sequence[Span] = ()) -> None:
        if self._divided is None or self.division is not None:
            return
        self.begins = since
        start, members = self._plan(since)
        division = Division(list(members.items()), self._divided, since=since, first=first, left=left, usual=self._usual)
        for (step, others), complete in zip(self._plans, self._complete, strict=True):
            if step > start:
                division.change(step, list(others.items()), complete)
        self.division = division

    def take_over(self, contents: Contents) -> None:
        self._contents = contents

    def work_from(self, step: int) -> Value:
        if self._contents is not None and self.slots is not None:
            return [self._versions[-1], self.slots.to_value(), rows_of({**self._contents.known(), self._unit: step})]
        if self.division is None:
            return None
        begun = step // self._every * self._every  # what was added up since then may be given up
        return [self._versions[-1], self.division.to_value(max(begun, self.division.eras[0].since))]

    def take_work(self, step: int, value: Value) -> None:
        match value:
            case [int(version), [*eras], known] if self._contents is not None:
                self.slots, self._handed_over = SlotPlan.from_value(eras), version
                self.slots.steps, self.slots.total = self.limits
                self._take_missed(self.slots)
                self._contents.begin_with({life: until for life, until in known_of(known).items() if life != self._unit})
                return
            case [int(version), [*eras]] if self._divided is not None:
                division = Division.from_value(eras, self._divided, self._usual)
            case _:
                raise ProtocolError(f"{value!r:.100} does not say how samples are divided")
        self.begins = step
        for (since, others), complete, known in zip(self._plans, self._complete, self._versions, strict=True):
            if known > version:
                division.change(since, list(others.items()), complete)
        self.division = division

    def spans(self, step: int) -> tuple[Span, ...]:
        assert self.division is not None
        return self.division.spans(step, self._life)

    def life(self, peer: PeerId, step: int) -> Life:
        """The process of ``peer`` that trains ``step``."""
        return peer, self._plan(step)[1][peer]

    def joins(self, step: int, *, among: Collection[PeerId] | None = None) -> bool:
        before = self._plan(max(0, step - 1))[1]
        there = self._plan(step)[1].items()
        return any(before.get(peer) != process for peer, process in there if among is None or peer in among)

    def there(self, peer: PeerId, step: int) -> bool:
        member = self._membership.view.members.get(peer)
        return member is not None and self._plan(step)[1].get(peer) == member.incarnation

    def incarnation(self, peer: PeerId, step: int) -> int | None:
        return self._plan(step)[1].get(peer)

    @property
    def own_incarnation(self) -> int:
        return self._life[1]

    def neighbours(self) -> tuple[PeerId, ...]:
        here = self._living(self._membership.view)
        return tuple(peer for peer in nearest_first(self._workers, self._endpoint.peer) if peer in here)

    def era(self, step: int) -> str:
        """A name for the steps that the workers of ``step`` train as they are there now: processes of the same names may have sent
        something for the same step before, and been lost."""
        plans = zip(reversed(self._plans), reversed(self._versions), strict=True)
        return next(f"{since}.{version}" for (since, _), version in plans if since <= step)

    def took_part(self, step: int) -> bool:
        """Whether this very process trains ``step``, and has not joined later."""
        me = self._endpoint.peer
        own = self._membership.view.members[me].incarnation
        return self._first is not None and step >= self._first and self.incarnation(me, step) == own

    def commit_with(self, commits: Commits) -> None:
        """Ask and tell ``commits`` whenever the members change. Call it before the first step."""
        self._commits = commits

    async def join(self) -> int:
        await self._membership.ready()
        if self._agreement is None:
            self._begin_agreement()
        await self.settled()
        me, own = self._life
        # The others may have agreed again before this process continues here: with the first of these plans they count on it.
        first = min(step for step, members in self._plans[1:] if members.get(me) == own)
        if (team := self.team()) is not None:
            first = min(first, self.first_step(team))
        self._first = first
        # There may be nothing left to train for that step: then nobody begins it, and others may still take part in it.
        self._begun = first - 1 if self._in_step else first
        self._on_view(self._membership.view)  # which may have changed in the meantime
        return first

    async def release(self, step: int) -> bool:
        await self.settled()
        end = None if self.division is None else self.division.end
        if self.takes_turns and self.slots is not None:
            end = self.slots.end
        if end is not None and step >= end:
            return False  # others may still take part from this step on, with what is left then
        self._begun = step
        return True

    async def broken(self) -> BaseException:
        await self._broken.wait()
        assert self._error is not None
        return self._error

    async def begin(self, step: int, due: Callable[[], bool]) -> bool:
        await self.settled()
        while self._enter is not None and due() and not await self._enter():
            await self.settled()
        if not due():
            return False
        self._begun = max(self._begun, step)
        return True

    def on_change(self, change: Change) -> None:
        self._changes.append(change)

    def before_change(self, prepare: Prepare) -> None:
        assert self._prepare is not None, "changes are prepared by the exchange"
        self._prepare.set_result(prepare)

    def before_steps(self, enter: Callable[[], Awaitable[bool]]) -> None:
        self._enter = enter

    async def all_trained(self, step: int, more: Callable[[], bool]) -> int | None:
        await self.settled()
        if more():
            return None
        view = self._membership.view
        living = self._living(view)
        if self._differs(view):  # the agreement about that begins at once
            await asyncio.sleep(0)
            return None
        if self._in_step:  # one that would take part from here on waits for a state, which it does not get
            planned = self._plan(max(0, step - 1))[1]
            living = {peer: process for peer, process in living.items() if planned.get(peer) == process}
        try:
            return await self._membership.agree("trained", step, tuple(living), version=view.version)
        except (PeerLostError, ViewChangedError) as error:
            await self._newer(view, {}, (), error)
            return None

    async def together(
        self, name: str, step: int, run: Callable[[Group], Awaitable[T]], *, among: Collection[PeerId] | None = None
    ) -> T:
        era, planned = self.era(max(0, step - 1)), self._plan(max(0, step - 1))[1]
        of = "members"
        if among is not None:
            planned = {peer: process for peer, process in planned.items() if peer in among}
            of = f"members/{name}"
        while True:
            view = self._membership.view
            here = self._living(view)
            # A worker that was lost and came back counts as another one: it joins at a later step.
            members = tuple(peer for peer, process in planned.items() if here.get(peer) == process)
            group = f"{of}/{era}/{len(planned) - len(members)}"
            if self._whole:
                self._attempts[group] = planned
            try:
                result = await run(self._groups.of(members, group))
                # Some members may have finished before the others noticed a loss: a result counts only if all have finished.
                await self._all_are_here(name, view, members, planned)
            except PeerLostError as error:
                await self._newer(view, planned, members, error)
            else:
                return result

    async def _all_are_here(self, name: str, view: View, members: tuple[PeerId, ...], planned: Mapping[PeerId, int]) -> None:
        """Return once all ``members`` call this, either on all of them or on none. Raises `PeerLostError` if one is lost."""
        while True:
            here = self._living(view)
            gone = next((peer for peer in members if here.get(peer) != planned[peer]), None)
            if gone is not None:  # perhaps another process has its name
                raise PeerLostError(gone, "it was lost in the meantime", waiting_for=name)
            try:
                await self._membership.agree(f"{name}/{len(members)}", 0, members, version=view.version)
            except ViewChangedError as error:
                await self._newer(view, {}, (), error)
                view = self._membership.view
            else:
                return

    async def aligned(self, name: str, group: Group) -> None:
        planned = self._attempts.get(group.name)
        if self._whole and planned is not None:
            await self._all_are_here(f"{name}/aligned", self._membership.view, group.members, planned)

    async def stop(self) -> None:
        self._stopped = True
        if self._agreement is not None:
            self._agreement.cancel()
            await asyncio.wait({self._agreement})
        self._groups.close()

    @property
    def _in_step(self) -> bool:
        """Whether all train the same steps, of which lost workers may cause more."""
        return self.divides or self.takes_turns

    def _plan(self, step: int) -> tuple[int, Mapping[PeerId, int]]:
        return next(plan for plan in reversed(self._plans) if plan[0] <= step)

    def _living(self, view: View) -> dict[PeerId, int]:
        """Workers that can take part, by rank, with their incarnations."""
        members = view.members
        return {peer: members[peer].incarnation for peer in self._workers if peer in members and members[peer].ready}

    def _on_view(self, view: View) -> None:
        self._viewed.set()
        waiting = self.late and self._begun < 0  # `join` ends this
        if not self._stopped and not waiting and self._agreement is None and self._differs(view):
            self._begin_agreement()

    def _differs(self, view: View) -> bool:
        """Whether the members must agree about this view. They must also if others came and are lost again, so that the same are
        there: some may have announced their newest steps meanwhile, and wait for all."""
        return view.changes != self._changes_agreed or self._living(view) != self._plans[-1][1]

    def _begin_agreement(self) -> None:
        self._agreement = asyncio.get_running_loop().create_task(self._agree(), name="agree on members")
        self._agreement.add_done_callback(self._agreed)

    def _agreed(self, task: asyncio.Task[None]) -> None:
        self._agreement = None
        if task.cancelled():
            return
        self._error = task.exception()
        if self._error is not None:
            self._broken.set()
        else:
            self._on_view(self._membership.view)  # which may have changed at the last moment

    async def settled(self) -> None:
        while self._agreement is not None:
            await asyncio.wait({self._agreement})
            await asyncio.sleep(0)  # lets the callbacks of its end run first
        if self._error is not None:
            raise self._error

    async def _agree(self) -> None:
        """Wait until all members of the newest view know from which step on they are the members."""
        membership = self._membership
        while True:
            view = membership.view
            living = self._living(view)
            # Who had begun the step before the last change may be lost meanwhile. The next one comes no earlier even so.
            begun = max(self._begun, self._plans[-1][0] - 1)
            try:
                newest = await membership.agree("members", begun, tuple(living), version=view.version)
                decision = await self._what_counts(view, living)
                there = await self._who_was_there(view, living) if self.assigns else frozenset()
                here = list(living.items()) if self._takers is None else self._takers.here(living, there, view.version)
                counted = await self._what_is_left(view, living, here)
            except (PeerLostError, ViewChangedError) as error:
                await self._newer(view, {}, (), error)
                continue
            step = newest + 1
            if self._prepare is not None:
                prepare = await asyncio.shield(self._prepare)
                step = await prepare(step, living, view.version)
            self._plans.append((step, living))
            if self.assigns:
                self._knows, self._sources = True, {**self._sources, **self._find_sources(living, there)}
            self._changes_agreed = view.changes
            self._complete.append(decision.newest)
            self._versions.append(decision.version)
            if self.division is not None:
                self.division.change(step, list(living.items()), decision.newest)
            if self.takes_turns:
                self._missed.append(Turns(decision.version, step, here, counted))
            if self.takes_turns and self.slots is not None:
                self._take_missed(self.slots)  # unless the source of this worker's state had agreed before it
            if self._commits is not None:
                self._commits.decide(decision)
            before = self._plans[-2][1]
            gone = [peer for peer in before if peer not in living]
            reason = f"lost {', '.join(gone)}" if gone else "others have joined"
            if living == before and self._begun >= 0:
                reason = "others came, and are lost again"
            self._recorder.event("view", step=step, version=view.version, members=list(living), reason=reason)
            for change in self._changes:
                change(step, tuple(living))
            return

    async def _what_counts(self, view: View, living: Mapping[PeerId, int]) -> Decision:
        """Agree on the newest step that counts. Without losses in the meantime, everybody gets the same answer."""
        if self._commits is None and self.takes_turns:  # models are workers' own, or those of groups of which all are there
            return Decision(view.version, living, -1, "", lack=False)
        those, of = tuple(living), ""
        if self._apart:
            those, of = tuple(peer for peer in self._own if peer in living), f"/{self._own[0]}"

        async def agree(what: str, value: int) -> int:
            return await self._membership.agree(f"members/{what}{of}", value, those, version=view.version)

        own = -1 if self._commits is None else self._commits.hold()
        newest = await agree("complete", own)
        if newest < 0:
            return Decision(view.version, living, -1, "", lack=False)
        me = self._endpoint.peer
        step = newest if self._commits is None else self._commits.step_of(newest)
        lack = await agree("lack", int(self.took_part(step) and own < newest))
        holder = await agree("holder", self._workers.index(me) if own == newest else -1)
        return Decision(view.version, living, newest, self._workers[holder], lack=bool(lack))

    async def _who_was_there(self, view: View, living: Mapping[PeerId, int]) -> Collection[PeerId]:
        """Agree on who of the ``living`` was there before. What groups have agreed on among themselves counts if all have come this
        far."""
        before = self._plans[-1][1] if self._knows else {}
        there: set[PeerId] = set()
        for start in range(0, len(self._workers), RANKS_AT_ONCE):
            ranks = [(n, peer) for n, peer in enumerate(self._workers[start : start + RANKS_AT_ONCE])]
            own = sum(1 << n for n, peer in ranks if peer in living and before.get(peer) == living[peer])
            all_know = await self._membership.agree(f"members/there/{start}", own, tuple(living), version=view.version)
            there |= {peer for n, peer in ranks if all_know >> n & 1}
        return there

    def _find_sources(self, living: Mapping[PeerId, int], there: Collection[PeerId]) -> dict[Life, Life]:
        """Whose state those begin with that come: one of their group, if any of it was ``there`` before, since its model is its
        own; but if none of a group trains without the others, each begins with that of the worker at its place in another group, so
        that together they have one group's model."""
        found: dict[Life, Life] = {}
        for number, group in enumerate(self._whole):
            coming = any(peer in living and peer not in there for peer in group)
            able = (other for other in _nearest(self._whole, number) if all(peer in there for peer in other))
            if coming and (source := next(able, None)) is not None:
                found |= {(peer, living[peer]): (its, living[its]) for peer, its in zip(group, source, strict=True)}
        for group in self._apart:
            nearest = (*group, *nearest_first(self._workers, group[0]))
            one = next((peer for peer in nearest if peer in there), None)
            for peer in group:
                if one is not None and peer in living and peer not in there:
                    found[peer, living[peer]] = (one, living[one])
        return found

    async def _what_is_left(
        self, view: View, living: Mapping[PeerId, int], here: Sequence[tuple[PeerId, int | None]]
    ) -> list[tuple[int, bool]]:
        """If groups take turns: for each lost one (`SlotPlan.lost`) the step before which what it has trained is in the model of
        somebody who is there, and whether it is in everybody's. A worker that is still waiting for a state cannot say who is lost,
        but learns it here. Of a model that is divided among a group it must be in all parts; other groups are of one mind."""
        if not self.takes_turns:
            return []
        lost = [] if self.slots is None else self.slots.lost(lives_after(self.slots.eras[-1].members, here))

        async def agree(what: str, value: int, among: Collection[PeerId] = tuple(living)) -> int:
            return await self._membership.agree(f"members/{what}", value, tuple(among), version=view.version)

        found = []
        for number in range(await agree("lost", len(lost))):
            own = 0
            if lost:
                assert self._contents is not None, "take_over comes before the first step"
                own = self._contents.got(lost[number])
            if self._whole and self._takers is not None:
                own = -await agree(f"lost/{number}/least/{self._name}", -own, self._takers.group(self._endpoint.peer))
            step = await agree(f"lost/{number}", own)
            lacks = await agree(f"lost/{number}/lacks", step - own if lost else 0)
            found.append((step, lacks == 0))
        return found

    async def _newer(
        self, view: View, planned: Mapping[PeerId, int], members: tuple[PeerId, ...], error: ConnectivityError
    ) -> None:
        """Wait for the view that says which members were lost."""
        while True:
            was_away = self._membership.away
            try:
                async with asyncio.timeout(self._timeouts.lost_s + self._timeouts.request_s):
                    while True:
                        self._viewed.clear()
                        now = self._membership.view
                        here = self._living(now)
                        changed = (
                            now.version > view.version if not planned else any(here.get(peer) != planned[peer] for peer in members)
                        )
                        if changed:
                            return
                        await self._viewed.wait()
            except PeerTimeoutError:
                raise
            except TimeoutError:
                if not was_away and not self._membership.away:  # a coordinator that is away tells nobody who was lost
                    raise error from None


def _nearest(groups: Sequence[tuple[PeerId, ...]], own: int) -> list[tuple[PeerId, ...]]:
    """The others of ``groups``, in the order of `nearest_first`."""
    by_first = {group[0]: group for group in groups}
    return [by_first[first] for first in nearest_first(list(by_first), groups[own][0])]
