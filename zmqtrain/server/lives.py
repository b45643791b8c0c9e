"""Which processes train, at a server whose workers may be lost, and what follows for its shard when that changes.

Nothing here sends a message or waits for one, but for what `Seats` (such as a model server's `zmqtrain.server.serving.Serving`) do
under their lock, which every caller of a method that is a coroutine holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast

from zmqtrain.data.slots import Life
from zmqtrain.data.teams import Change, Team, teams_of
from zmqtrain.errors import ProtocolError
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


class Seats(Protocol):
    """What serves groups, of which each has at most one team at a time. A team is known by its life."""

    lives: dict[int, int]
    """group -> which of its teams trains."""
    teams: dict[int, tuple[PeerId, ...]]
    """group -> the workers of that team."""

    async def drop(self, group: int) -> None:
        """Go on without the present team of the group, if it has one. What it has done before still counts; nothing else will."""

    def hold(self, group: int) -> None:
        """As `drop`, but others wait for the team that follows the present one, and has its place."""

    async def follow(self, group: int, life: int, first: int) -> None:
        """This team has the place that was kept for it, and goes on at step ``first``."""

    async def enter(self, step: int, lives: Mapping[int, int]) -> None:
        """From ``step`` on these teams of the groups train, and no others, but for those whose places are kept."""

    async def rest(self, group: int) -> None:
        """The group has nothing to train for now, so the others do not wait for it."""

    def progress(self, life: int) -> tuple[int, int] | None:
        """How far a dropped life has got: the fewest and the most steps that count. ``None``: it never took part."""
        ...


class Lives:
    """The processes (a worker's name and its incarnation) that train with one shard, and the teams that they form.

    A team trains as long as all its members are there. When one is lost, the others form another team (`change`). In synchronous
    training the groups that wait for each other wait for that team, too: the first one's place is *kept*, unless none of them is
    left. Once told (`progress`), it stays so until the next change, whoever is lost: all workers must be told the same.
    """

    def __init__(self, serving: Seats, groups: Sequence[Sequence[PeerId]], base: Value, *, keeps_places: bool = False) -> None:
        """``groups``: all workers that the run can have. ``base``: what the run begins with
        (`zmqtrain.exchange.server_changes.base_value`)."""
        self._serving, self._base, self._keeps_places = serving, base, keeps_places
        self._held: dict[PeerId, Team] = {}  # teams whose place is kept, by name
        self._kept: set[Life] = set()  # all that ever were held when this was told
        self._groups = {peer: number for number, group in enumerate(groups) for peer in group}
        self._names = [group[0] for group in groups]  # of their teams
        since, teams, _, _ = cast(Any, base)
        self.training: dict[PeerId, int] = {}
        """The workers that are there."""
        self._teams: dict[PeerId, Team] = {}  # those that train, by name
        self._gone: set[Life] = set()  # processes
        self._take(_teams_of(teams))
        self.finished: set[PeerId] = set()
        """Those that need no server any more."""
        self._first = int(since)
        self._changes: list[Change] = []
        self._dropped: dict[PeerId, dict[int, int]] = {}  # teams that are no more, by name and life: the step at which each began
        self._rest: dict[PeerId, set[PeerId]] = {}  # of teams of several, those that have said so, since the last change
        self._tell()

    @property
    def since(self) -> int:
        """The first step of those that train now."""
        return self._changes[-1].since if self._changes else self._first

    @property
    def ended(self) -> bool:
        """Whether all workers that train have finished, and at least one has."""
        return bool(self.finished) and self.finished >= self.training.keys()

    @property
    def all_gone(self) -> bool:
        """Whether nobody trains who has not finished."""
        return self.finished >= self.training.keys()

    def group_of(self, peer: PeerId) -> int:
        """The group of the worker."""
        return self._groups[peer]

    async def drop(self, peer: PeerId, life: int) -> None:
        """Go on without this process, if it trains, and without its team."""
        if self.training.get(peer) != life:
            return
        del self.training[peer]
        self._gone.add((peer, life))
        for team in [team for team in self._teams.values() if (peer, life) in team.members]:
            await self._end_or_hold(team)
        for team in [team for team in self._held.values() if team.unit not in self._kept and self._gone.issuperset(team.members)]:
            await self._end(team)

    async def keep_only(self, teams: Sequence[Team]) -> None:
        """Other teams are no more: workers have been lost, or have come."""
        present = {life for team in teams for life in team.members}
        for peer, life in [life for life in self.training.items() if life not in present]:
            await self.drop(peer, life)
        units = {team.unit for team in teams}
        for team in [team for team in self._teams.values() if team.unit not in units]:
            if self._keeps_places and any(other.follows(team) for other in teams):
                self._hold(team)
            else:
                await self._end(team)
        for team in [team for team in self._held.values() if team.unit not in self._kept]:
            if team.unit not in units and not any(other.follows(team) for other in teams):
                await self._end(team)

    def others(self, lives: Mapping[PeerId, int]) -> list[Life]:
        """The processes that train, but are not among ``lives``."""
        return [(peer, life) for peer, life in self.training.items() if lives.get(peer) != life]

    def progress(self, present: Collection[Life]) -> Value:
        """How far those have got that are no more, the step before which no change may take effect, and whose places are kept.
        ``present``: those with whom a change is prepared. If one of these is lost meanwhile, that is for the next change: whoever
        asks late must be told the same."""
        self._kept.update(team.unit for team in self._held.values() if team.unit not in present)
        lost = [(name, life) for name, dropped in self._dropped.items() for life in dropped if (name, life) not in present]
        found = [(name, life, self._serving.progress(life)) for name, life in lost]
        rows = [(name, life, *progress) for name, life, progress in found if progress is not None]
        told: list[Value] = [[*row] for row in rows]
        kept: list[Value] = [[name, life] for name, life in lost if (name, life) in self._kept]
        return [max([self.since, *(most for *_, most in rows)]), told, kept]

    async def change(self, change: Change) -> None:
        """From its step on these teams train. It is said by all of them, and counts once."""
        if change.since < self.since or (self._changes and change.version <= self._changes[-1].version):
            return
        if not change.follow.keys() <= self._held.keys():
            raise ProtocolError(f"a change of the members goes on with {', '.join(change.follow)}, whose place was not kept")
        self._changes.append(change)
        self._rest.clear()
        for team in list(self._held.values()):
            if team not in change.teams and team.name not in change.follow:
                await self._end(team)
        self._held = {team.name: team for team in self._held.values() if team in change.teams}
        before = self.training
        self._take([team for team in change.teams if team not in self._held.values()])
        # Whoever has finished has trained all there was, also if others say later that somebody came then.
        self.finished -= {peer for peer in self.finished if self.training.get(peer) != before.get(peer)}
        self._serving.teams = self._by_group({team.name: team.peers for team in self._teams.values()})
        for name, first in change.follow.items():
            await self._serving.follow(self.group_of(name), self._teams[name].life, first)
        lives = self._by_group({team.name: team.life for team in self._teams.values()})
        await self._serving.enter(change.since, lives)
        for team in [team for team in self._teams.values() if not self._gone.isdisjoint(team.members)]:
            await self._end_or_hold(team)

    async def rest(self, peer: PeerId, since: int) -> None:
        """The worker has trained all that there was for it when those began who train ``since`` then. Its group rests once all of
        its team say so: a worker of another row may still have to push its pieces of the last step."""
        if since != self.since:  # it has more to train by now
            return
        group = self.group_of(peer)
        team = self._teams.get(self._names[group])
        if team is not None and len(team.peers) > 1:
            said = self._rest.setdefault(team.name, set())
            said.add(peer)
            if said != set(team.peers):
                return
        await self._serving.rest(group)

    def finish(self, peer: PeerId, life: int | None) -> None:
        """The process needs this server no more."""
        if self.training.get(peer) == life:
            self.finished.add(peer)

    def finish_all(self) -> None:
        """All workers have left. Whoever has not said before that it needs this server no more came too late to train."""
        self.finished.update(self.training)

    def history(self) -> Value:
        """The beginning, and all changes since."""
        changes: list[Value] = [change.to_value() for change in self._changes]
        return [self._base, changes]

    def _take(self, teams: Sequence[Team]) -> None:
        """These are there, but for those of whom it is known already that they are lost."""
        gone = self._gone
        there = (*teams, *self._held.values())
        self.training = {peer: life for team in there for peer, life in team.members if (peer, life) not in gone}
        self._teams = {team.name: team for team in teams if self._keeps_places or not gone.intersection(team.members)}

    async def _end_or_hold(self, team: Team) -> None:
        """Somebody of the team is lost."""
        if self._keeps_places and not self._gone.issuperset(team.members):
            self._hold(team)
        else:
            await self._end(team)

    def _hold(self, team: Team) -> None:
        del self._teams[team.name]
        self._held[team.name] = team
        self._dropped.setdefault(team.name, {})[team.life] = self.since
        self._serving.hold(self.group_of(team.name))

    async def _end(self, team: Team) -> None:
        for of_name in (self._teams, self._held):
            of_name.pop(team.name, None)
        self._dropped.setdefault(team.name, {})[team.life] = self.since
        await self._serving.drop(self.group_of(team.name))

    def _tell(self) -> None:
        self._serving.lives = self._by_group({team.name: team.life for team in self._teams.values()})
        self._serving.teams = self._by_group({team.name: team.peers for team in self._teams.values()})

    def _by_group(self, of_teams: Mapping[PeerId, Any]) -> dict[int, Any]:
        return {self.group_of(name): value for name, value in of_teams.items()}

    # A copy on another server.

    def state(self) -> Value:
        """The state as plain values, for `load` on another server."""
        training: list[Value] = [[peer, life] for peer, life in self.training.items()]
        teams: list[Value] = [team.to_value() for team in self._teams.values()]
        dropped: list[Value] = [[peer, life, since] for peer, lives in self._dropped.items() for life, since in lives.items()]
        gone: list[Value] = [[peer, life] for peer, life in sorted(self._gone)]
        return [self.history(), training, dropped, sorted(self.finished), teams, gone]

    def load(self, state: Value) -> None:
        """Become what `state` has told of, which had the same ``base``."""
        (_, changes), training, dropped, finished, teams, gone = cast(Any, state)
        self._changes = [Change.of(change) for change in changes]
        self.training = dict(training)
        self._teams = {team.name: team for team in _teams_of(teams)}
        self._gone = {(peer, life) for peer, life in gone}
        self._dropped = {}
        for peer, life, since in dropped:
            self._dropped.setdefault(peer, {})[life] = since
        self.finished.clear()
        self.finished.update(finished)
        self._tell()


class Seen:
    """The processes of workers that views of the members have shown to this server."""

    def __init__(self, workers: Sequence[PeerId]) -> None:
        self._workers = workers
        self._seen: set[tuple[PeerId, int]] = set()

    def add(self, lives: Mapping[PeerId, int]) -> None:
        """These processes were there when the run began."""
        self._seen.update(lives.items())

    def note(self, view: View) -> None:
        """There is a new view."""
        for peer in self._workers:
            member = view.members.get(peer)
            if member is not None:
                self._seen.add((peer, member.incarnation))

    def gone(self, view: View, training: Mapping[PeerId, int]) -> list[tuple[PeerId, int]]:
        """Those of ``training`` that are lost. (A process that no view has shown yet is one that has come since.)"""
        found = []
        for peer, life in training.items():
            member = view.members.get(peer)
            gone = peer in view.lost if member is None else member.incarnation != life
            if gone and (peer, life) in self._seen:
                found.append((peer, life))
        return found


def told_teams(told: Value) -> tuple[Team, ...]:
    """The teams that a worker's request names. Raises `ProtocolError`."""
    if not isinstance(told, list):
        raise ProtocolError(f"the members of a step are {told!r:.60}; each must be a name and an incarnation")
    return _teams_of(told)


def told_change(told: Sequence[Value]) -> Change:
    """The change of the members that a worker's request tells of. Raises `ProtocolError`."""
    try:
        return Change.of(told)
    except (TypeError, ValueError):
        raise ProtocolError(
            f"a change of the members is {told!r:.100}; it must be a step, teams, and what each goes on with"
        ) from None


def _teams_of(rows: Any) -> tuple[Team, ...]:
    try:
        return teams_of(rows)
    except (TypeError, ValueError):
        raise ProtocolError(f"the members of a step are {rows!r:.60}; each must be a name and an incarnation") from None
