"""The members of a run, and versioned views of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.placement import Placement, RolePlacement
from zmqtrain.wire.payload import Value

MemberKind = Literal["agent", "worker", "server", "fc", "observer"]


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the run."""

    peer: PeerId
    address: str
    """The address to connect to, with its public key in an encrypted run; empty as long as the member has not joined."""
    host: str
    kind: MemberKind
    index: int
    """Rank of a worker, number of a server or FC server, -1 for others."""
    group: int = -1
    position: int = -1
    incarnation: int = 0
    """Distinguishes successive processes of the same name."""
    ready: bool = True
    """False: it has joined a run in progress, and is still preparing to take part."""

    @property
    def is_role(self) -> bool:
        """Whether it takes part in training (an agent and an observer do not)."""
        return self.kind in ("worker", "server", "fc")


@dataclass(frozen=True, slots=True)
class View:
    """The members at one moment. Each change gives a view with a higher version."""

    version: int
    complete: bool
    """Whether all expected members have joined at some time."""
    members: Mapping[PeerId, Member]
    """The members that have joined and have not left or been lost."""
    lost: Mapping[PeerId, str]
    """The members that were lost, with the reasons."""
    chains: tuple[tuple[PeerId, ...], ...] = ()
    """If shards of the model are kept more than once: the servers that have each of them. The first one serves it."""
    leaving: tuple[PeerId, ...] = ()
    """Model servers that are to have no shard any more."""
    goals: Mapping[int, tuple[PeerId, ...]] = field(default_factory=dict)
    """Shards that are to move, with the chains that they are to become."""
    changes: int = 0
    """How often others could take part, since all had joined: a worker was lost or has left, or one that came late was ready. Also
    if it was another one in the end that came and was lost again, so that the same can take part as before."""

    def workers(self) -> list[Member]:
        """All workers, in order of rank."""
        return sorted((member for member in self.members.values() if member.kind == "worker"), key=lambda member: member.index)

    def servers(self) -> list[Member]:
        """All model servers, in order of their numbers."""
        return sorted((member for member in self.members.values() if member.kind == "server"), key=lambda member: member.index)

    def to_value(self) -> Value:
        """Return plain values for the wire."""
        members: list[Value] = [{name: getattr(member, name) for name in _FIELDS} for member in self.members.values()]
        value: dict[str, Value] = {
            "version": self.version,
            "complete": self.complete,
            "members": members,
            "lost": dict(self.lost),
        }
        if self.chains:
            value["chains"] = [list(chain) for chain in self.chains]
        if self.leaving:
            value["leaving"] = list(self.leaving)
        if self.goals:
            value["goals"] = [[shard, *goal] for shard, goal in self.goals.items()]
        if self.changes:
            value["changes"] = self.changes
        return value

    @classmethod
    def from_value(cls, value: Any) -> View:
        """The view that `to_value` wrote. Raises ``KeyError`` or ``TypeError`` for anything else."""
        members = [Member(**member) for member in value["members"]]
        chains = tuple(tuple(map(str, chain)) for chain in value.get("chains", ()))
        here, changes = {member.peer: member for member in members}, int(value.get("changes", 0))
        leaving = tuple(map(str, value.get("leaving", ())))
        goals = {int(shard): tuple(map(str, goal)) for shard, *goal in value.get("goals", ())}
        return cls(value["version"], value["complete"], here, dict(value["lost"]), chains, leaving, goals, changes)


#: `dataclasses.asdict` takes ten times as long, and a view may have thousands of members.
_FIELDS = tuple(field.name for field in fields(Member))


def expected_members(placement: Placement, *, agents: bool = True) -> tuple[Member, ...]:
    """The members that a run waits for: its roles and, with ``agents``, the agent of each host that has a role."""
    hosts = [name for name in placement.hosts if placement.of_host(name)] if agents else []
    found = [Member(f"agent/{name}", "", name, "agent", -1) for name in hosts]
    found += [_member_of(role) for role in placement.roles]
    return tuple(found)


def spare_members(placement: Placement) -> tuple[Member, ...]:
    """Those that may come later: workers or model servers, and the agents of their hosts."""
    agents = [Member(f"agent/{role.host}", "", role.host, "agent", -1) for role in placement.spares]
    return (*agents, *map(_member_of, placement.spares))


def _member_of(role: RolePlacement) -> Member:
    return Member(role.peer, "", role.host, role.kind, role.index, role.group, role.position)
