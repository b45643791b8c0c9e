"""Who trains the batches of a group of several workers, if some of them may be lost and others may take their places. Pure.

The workers of a group that are there are its *team*. They divide each of the group's batches evenly, and the parts of the model
that the group exchanges with servers. When a member is lost or comes, the group goes on with another team, which has a *life* of
its own: what the old team has not finished is left to others like that of a lost worker (`zmqtrain.data.slots`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from zmqtrain.data.slots import Life
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


@dataclass(frozen=True, slots=True)
class Team:
    """The workers of a group at a time."""

    name: PeerId
    """The first worker of the whole group, whether it is there or not."""
    life: int
    """Another number than that of any other team in the run."""
    members: tuple[Life, ...]
    """The processes, by position."""

    @classmethod
    def alone(cls, peer: PeerId, process: int) -> Team:
        """A worker that is a group of its own."""
        return cls(peer, process, ((peer, process),))

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The names of the members, in the order of their ranks in the team."""
        return tuple(peer for peer, _ in self.members)

    def follows(self, other: Team) -> bool:
        """Whether this is what ``other`` has become: another team of the same group, with at least one of the same processes."""
        return self.name == other.name and self.life != other.life and not set(self.members).isdisjoint(other.members)

    @property
    def unit(self) -> Life:
        """The team's name and life, by which a `zmqtrain.data.slots.SlotPlan` knows it."""
        return self.name, self.life

    def to_value(self) -> Value:
        """Plain values, from which `teams_of` makes it again."""
        if self.members == (self.unit,):
            return [self.name, self.life]
        members: list[Value] = [[peer, process] for peer, process in self.members]
        return [self.name, self.life, members]


@dataclass(frozen=True, slots=True)
class Change:
    """Other teams than before, from a step on."""

    since: int
    teams: tuple[Team, ...]
    follow: Mapping[PeerId, int]
    """Those of them, by name, that go on in the place of the one before, with what this one has left of its last step: the first
    step of each. It is not after ``since``."""
    version: int = 0
    """Of the view that says so; larger than those of all earlier changes, one of which may have been the same otherwise."""

    def first(self, team: Team) -> int:
        """The step with which the team begins, if it is another one than before."""
        return self.follow.get(team.name, self.since)

    def to_value(self) -> list[Value]:
        """Plain values, from which `of` makes it again."""
        follow: list[Value] = [[name, step] for name, step in self.follow.items()]
        return [self.since, [team.to_value() for team in self.teams], follow, self.version]

    @classmethod
    def of(cls, value: Any) -> Change:
        """Raises ``TypeError`` and ``ValueError``."""
        since, teams, follow, version = value
        return cls(int(since), teams_of(teams), {str(name): int(step) for name, step in follow}, int(version))


def owner_of(position: int, peers: Sequence[PeerId]) -> PeerId:
    """Who exchanges what belongs to a position of the whole group, if only ``peers`` of it are there."""
    return peers[position % len(peers)]


def first_teams(groups: Sequence[Sequence[PeerId]], processes: Mapping[PeerId, int]) -> tuple[Team, ...]:
    """The teams with which a run begins."""
    return tuple(
        Team(group[0], number, tuple((peer, processes[peer]) for peer in group if peer in processes))
        for number, group in enumerate(groups)
    )


def next_teams(
    groups: Sequence[Sequence[PeerId]], living: Mapping[PeerId, int], before: Sequence[Team], version: int
) -> tuple[Team, ...]:
    """The teams of those who are there. ``before``: the teams until now, which go on where nobody is lost or comes. ``version``: of
    the view that says so; larger than those of all earlier changes."""
    known = {team.name: team for team in before}
    found = []
    for number, group in enumerate(groups):
        members = tuple((peer, living[peer]) for peer in group if peer in living)
        was = known.get(group[0])
        if was is not None and was.members == members:
            found.append(was)
        elif members:
            found.append(Team(group[0], version * len(groups) + number, members))
    return tuple(found)


def teams_of(value: Iterable[Value]) -> tuple[Team, ...]:
    """Teams from what `Team.to_value` has returned for each. Raises ``TypeError`` and ``ValueError``."""
    found = []
    for row in value:
        name, life, *rest = cast(Any, row)
        if not isinstance(name, str) or not isinstance(life, int) or len(rest) > 1:
            raise ValueError(f"{row!r:.60} is no team")
        members = tuple((str(peer), int(process)) for peer, process in rest[0]) if rest else ((name, life),)
        found.append(Team(name, life, members))
    return tuple(found)
