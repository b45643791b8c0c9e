"""Changes of the members, with model servers: all workers tell all servers who takes part from a step on, and learn how far those
have got that were lost.

::

    all members agree on a step -> "members": servers go on without the others, and say how far these have got
                                -> "change": from this step on (not before any of them) servers expect the members

Both requests come from every member, and count once. So whichever of them is lost in between, the others finish the change; and no
step of the new members begins before all servers know them. What a lost worker has got done is final with the answer to "members":
what arrives later is dropped. A worker that comes late learns of all changes before it from the servers, too.

What servers know are teams (`zmqtrain.data.teams`); a worker that is a group of its own is one. An FC server is told the same: what
it holds is one more piece of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, cast

from zmqtrain.data.slots import Life, Progress, Slot, SlotPlan
from zmqtrain.data.teams import Change, Team, next_teams, teams_of
from zmqtrain.errors import ProtocolError
from zmqtrain.events import Recorder
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.server_heads import Heads
from zmqtrain.net.endpoint import PeerId
from zmqtrain.waiting import task_group
from zmqtrain.wire.payload import Value

MEMBERS, CHANGE, HISTORY = "members", "change", "history"
#: Tells an FC server what the run begins with (`base_value`), and whether groups keep their places.
BEGIN = "fc_begin"
#: Tells an FC server that a team (its life) has nothing to train in a step that others train.
SITS_OUT = "sits_out"


class ServerChanges:
    """One worker's side. Make it before the first step."""

    def __init__(
        self,
        heads: Heads,
        members: Members,
        groups: Sequence[Sequence[PeerId]],
        *,
        ask_fc: Callable[..., Coroutine[Any, Any, Sequence[Value]]],
        timeout_s: float,
        recorder: Recorder,
    ) -> None:
        """``groups``: those that form teams, if groups have several workers. ``ask_fc(method, *values)``: asks the FC server, if
        there is one."""
        self._heads, self._members, self._groups, self._ask_fc = heads, members, groups, ask_fc
        self._timeout_s, self._recorder = timeout_s, recorder
        self._late = members.late
        if not members.late:
            self._limited(members.begin_slots())
        members.before_change(self._prepare)

    async def _prepare(self, step: int, living: Mapping[PeerId, int], version: int) -> int:
        history: Value = None
        before = self._members.teams
        if self._late and self._groups:  # others may have told servers already of the change with which it comes
            history = await self._heads.request(0, HISTORY, timeout=self._timeout_s)
            before = last_teams(history)
        if self._groups:
            teams = next_teams(self._groups, living, before, version)
        else:
            teams = tuple(Team.alone(peer, incarnation) for peer, incarnation in living.items())
        told: list[Value] = [team.to_value() for team in teams]
        # Servers answer once they have begun, and when what they are computing is done.
        answers = [_Members.of(answer) for answer in await self._ask(MEMBERS, told)]
        progress = merged(each.progress for each in answers)
        since = max(step, *(each.floor for each in answers))
        if history is not None and teams == before and (known := last_change(history)) is not None:
            change = known
        else:
            plan = self._members.slots if history is None else self._limited(plan_of(history, progress))
            kept = set[Life].intersection(*(each.kept for each in answers))
            follow = {} if plan is None else _following(plan, before, teams, since, kept, progress)
            change = Change(since, teams, follow, version)
        since = change.since
        await self._ask(CHANGE, *change.to_value())
        if self._late:
            self._late = False
            self._members.slots = self._limited(plan_of(await self._heads.request(0, HISTORY, timeout=self._timeout_s), progress))
        elif (plan := self._members.slots) is not None:
            changed(plan, change, before, progress)
        if self._groups:
            self._members.form(change)
        plan = self._members.slots
        assert plan is not None
        lives = [team.unit for team in teams]
        self._recorder.audit("era", since=since, members=lives, left=[slot.number for slot in plan.eras[-1].left])
        return since

    async def _ask(self, method: str, *values: Value) -> list[Value]:
        """A request to all servers. Returns their answers."""
        async with task_group() as tasks:
            of_servers = tasks.create_task(self._heads.request_all(method, *values, timeout=self._timeout_s))
            of_fc = tasks.create_task(self._ask_fc(method, *values))
        return [*of_servers.result(), *of_fc.result()]

    def _limited(self, plan: SlotPlan) -> SlotPlan:
        """The plan, which ends where that of the others does."""
        plan.steps, plan.total = self._members.limits
        return plan


class _Members:
    """A server's answer to "members"."""

    __slots__ = ("floor", "kept", "progress")

    def __init__(self, floor: int, progress: Mapping[Life, Progress], kept: set[Life]) -> None:
        self.floor, self.progress, self.kept = floor, progress, kept

    @classmethod
    def of(cls, value: Value) -> _Members:
        try:
            floor, rows, kept = cast(Any, value)
            progress = {(str(peer), int(life)): (int(low), int(high)) for peer, life, low, high in rows}
            return cls(int(floor), progress, {(str(name), int(life)) for name, life in kept})
        except (TypeError, ValueError):
            raise ProtocolError(f"a model server answered a change of the members with {value!r:.60}") from None


def merged(parts: Iterable[Mapping[Life, Progress]]) -> dict[Life, Progress]:
    """How far lives have got over all servers."""
    found: dict[Life, Progress] = {}
    for part in parts:
        for life, (low, high) in part.items():
            before = found.get(life, (low, high))
            found[life] = (min(low, before[0]), max(high, before[1]))
    return found


def base_value(plan: SlotPlan, teams: Sequence[Team] = ()) -> Value:
    """What a run begins with, for servers to hand out: `plan_of` reads it. ``teams``: if groups have several workers."""
    era = plan.eras[0]
    members: list[Value] = [team.to_value() for team in teams or [Team.alone(*life) for life in era.members]]
    left: list[Value] = [slot.number for slot in era.left]
    return [era.since, members, era.first, left]


def plan_of(history: Value, progress: Mapping[Life, Progress]) -> SlotPlan:
    """The plan that follows from what a server knows: the beginning, and all changes since. Raises `ProtocolError`."""
    try:
        (since, members, first, left), changes = cast(Any, history)
        before = teams_of(members)
        units = [team.unit for team in before]
        plan = SlotPlan(units, since=int(since), first=int(first), left=[Slot(int(n)) for n in left])
        for change in map(Change.of, changes):
            changed(plan, change, before, progress)
            before = change.teams
    except (TypeError, ValueError):
        raise _unreadable(history) from None
    return plan


def last_teams(history: Value) -> tuple[Team, ...]:
    """Those since the last change that a server knows. Raises `ProtocolError`."""
    try:
        (_, members, _, _), changes = cast(Any, history)
        return Change.of(changes[-1]).teams if changes else teams_of(members)
    except (TypeError, ValueError):
        raise _unreadable(history) from None


def last_change(history: Value) -> Change | None:
    """The last change that a server knows. Raises `ProtocolError`."""
    try:
        _, changes = cast(Any, history)
        return Change.of(changes[-1]) if changes else None
    except (TypeError, ValueError):
        raise _unreadable(history) from None


def changed(plan: SlotPlan, change: Change, before: Sequence[Team], progress: Mapping[Life, Progress]) -> None:
    """Make the change in the plan. ``before``: the teams until then."""
    of_name = {team.name: team for team in before}
    for team in change.teams:
        if team.name in change.follow:
            plan.follow(of_name[team.name].unit, team.unit)
    plan.change(change.since, [team.unit for team in change.teams], progress)


def _following(
    plan: SlotPlan,
    before: Sequence[Team],
    teams: Sequence[Team],
    since: int,
    kept: Collection[Life],
    progress: Mapping[Life, Progress],
) -> dict[PeerId, int]:
    """The teams, by name, that go on in the place of the one before, with the step from which on this one's gradients do not count
    everywhere. They are those whose place all servers have ``kept``, and which have something to train before the change."""
    found = {}
    of_name = {team.name: team for team in before}
    for team in teams:
        was = of_name.get(team.name)
        if was is None or not team.follows(was) or was.unit not in kept or was.unit not in progress:
            continue
        first = progress[was.unit][0]
        if any(plan.slot(step, was.unit) is not None for step in range(first, since)):
            found[team.name] = first
    return found


def _unreadable(history: Value) -> ProtocolError:
    return ProtocolError(f"a model server told of earlier changes of the members with {history!r:.60}")
