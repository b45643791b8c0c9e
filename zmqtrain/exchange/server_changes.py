"""Changes of the members, with model servers: all workers tell all servers who takes part from a step on, and learn how far those
have got that were lost.

::

    all members agree on a step -> "members": servers go on without the others, and say how far these have got
                                -> "change": from this step on (not before any of them) servers expect the members

Both requests come from every member, and count once. So whichever of them is lost in between, the others finish the change; and no
step of the new members begins before all servers know them. What a lost worker has got done is final with the answer to "members":
what arrives later is dropped. A worker that comes late learns of all changes before it from the servers, too.

What servers know are teams (`zmqtrain.data.teams`); a worker that is a group of its own is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from zmqtrain.data.slots import Life, Progress, Slot, SlotPlan
from zmqtrain.data.teams import Team, next_teams, teams_of
from zmqtrain.errors import ProtocolError
from zmqtrain.events import Recorder
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.server_heads import Heads
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value

MEMBERS, CHANGE, HISTORY = "members", "change", "history"


class ServerChanges:
    """One worker's side. Make it before the first step."""

    def __init__(
        self, heads: Heads, members: Members, groups: Sequence[Sequence[PeerId]], *, timeout_s: float, recorder: Recorder
    ) -> None:
        """``groups``: those that form teams, if groups have several workers."""
        self._heads, self._members, self._groups = heads, members, groups
        self._timeout_s, self._recorder = timeout_s, recorder
        self._late = members.late
        if not members.late:
            members.begin_slots()
        members.before_change(self._prepare)

    async def _prepare(self, step: int, living: Mapping[PeerId, int], version: int) -> int:
        teams = await self._teams(living, version)
        lives = [team.unit for team in teams]
        told: list[Value] = [team.to_value() for team in teams]
        # Servers answer once they have begun, and when what they are computing is done.
        answers = [_Members.of(answer) for answer in await self._heads.request_all(MEMBERS, told, timeout=self._timeout_s)]
        progress = merged(each.progress for each in answers)
        since = max(step, *(each.floor for each in answers))
        await self._heads.request_all(CHANGE, since, told, timeout=self._timeout_s)
        if self._late:
            self._late = False
            self._members.slots = plan_of(await self._heads.request(0, HISTORY, timeout=self._timeout_s), progress)
        elif (plan := self._members.slots) is not None:
            plan.change(since, lives, progress)
        if self._groups:
            self._members.form(since, teams)
        plan = self._members.slots
        assert plan is not None
        self._recorder.audit("era", since=since, members=lives, left=[slot.number for slot in plan.eras[-1].left])
        return since

    async def _teams(self, living: Mapping[PeerId, int], version: int) -> tuple[Team, ...]:
        if not self._groups:
            return tuple(Team.alone(peer, incarnation) for peer, incarnation in living.items())
        before = self._members.teams
        if self._late:  # others may have told servers already of the change with which it comes
            before = last_teams(await self._heads.request(0, HISTORY, timeout=self._timeout_s))
        return next_teams(self._groups, living, before, version)


class _Members:
    """A server's answer to "members"."""

    __slots__ = ("floor", "progress")

    def __init__(self, floor: int, progress: Mapping[Life, Progress]) -> None:
        self.floor, self.progress = floor, progress

    @classmethod
    def of(cls, value: Value) -> _Members:
        try:
            floor, rows = cast(Any, value)
            return cls(int(floor), {(str(peer), int(life)): (int(low), int(high)) for peer, life, low, high in rows})
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
        plan = SlotPlan(_units(members), since=int(since), first=int(first), left=[Slot(int(n)) for n in left])
        for step, teams in changes:
            plan.change(int(step), _units(teams), progress)
    except (TypeError, ValueError):
        raise _unreadable(history) from None
    return plan


def last_teams(history: Value) -> tuple[Team, ...]:
    """Those since the last change that a server knows. Raises `ProtocolError`."""
    try:
        (_, members, _, _), changes = cast(Any, history)
        return teams_of(changes[-1][1] if changes else members)
    except (TypeError, ValueError):
        raise _unreadable(history) from None


def _units(teams: Any) -> list[Life]:
    return [team.unit for team in teams_of(teams)]


def _unreadable(history: Value) -> ProtocolError:
    return ProtocolError(f"a model server told of earlier changes of the members with {history!r:.60}")
