"""The states of a run and of its members, and the possible transitions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from zmqtrain.membership.view import Member, MemberKind, View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.words import counted, joined


class State(Enum):
    """The state of the run."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHING = "finishing"
    FAILED = "failed"
    ENDED = "ended"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.JOINING: frozenset({State.RUNNING, State.FINISHING, State.FAILED}),
    State.RUNNING: frozenset({State.FINISHING, State.FAILED}),
    State.FINISHING: frozenset({State.FAILED, State.ENDED}),
    State.FAILED: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class Presence(Enum):
    """The state of a member."""

    EXPECTED = "expected"
    HERE = "here"
    LEFT = "left"
    LOST = "lost"
    ABSENT = "absent"
    """A place for one that may come, and is not waited for."""


@dataclass(slots=True)
class Entry:
    """A member's entry in the coordinator's table: its state, its process and its links."""

    member: Member
    counts: Counter[Presence]
    """Of all members of its kind in a table. Entries keep it up to date, since asking each of a thousand would be too slow."""
    _presence: Presence = Presence.EXPECTED
    incarnation: int = 0
    exited: bool = False
    returns: bool = False
    """Whether its agent is starting another process in the place of the one that has ended."""
    reason: str = ""
    unseen: bool = False
    """Whether the newest heartbeat of its agent, since it has joined, did not name it."""
    cut: tuple[float, str] | None = None
    """When and why its link was lost, although its agent sees its process."""

    def __post_init__(self) -> None:
        self.counts[self._presence] += 1

    @property
    def presence(self) -> Presence:
        """Whether it has joined, and is still there."""
        return self._presence

    @presence.setter
    def presence(self, presence: Presence) -> None:
        self.counts[self._presence] -= 1
        self.counts[presence] += 1
        self._presence = presence

    def welcome(self, incarnation: int, address: str, *, ready: bool = True) -> None:
        """The member has joined."""
        self.presence, self.incarnation, self.reason, self.unseen, self.cut = Presence.HERE, incarnation, "", False, None
        self.returns = False
        self.member = replace(self.member, address=address, incarnation=incarnation, ready=ready)

    @property
    def here(self) -> bool:
        """Whether it has joined and is still in the run."""
        return self.presence is Presence.HERE

    @property
    def is_observer(self) -> bool:
        """Whether it only looks on."""
        return self.member.kind == "observer"

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it to join (again)."""
        return self.presence in (Presence.LEFT, Presence.LOST, Presence.ABSENT)


#: The kinds of members as people read them.
_WORDS: dict[MemberKind, str] = {
    "worker": "worker",
    "server": "model server",
    "fc": "FC server",
    "agent": "agent",
    "observer": "observer",
}


class MemberTable:
    """All peers that are expected or have joined, including observers, with what is known about each."""

    def __init__(self, expected: Iterable[Member], spare: Iterable[Member] = ()) -> None:
        """``spare``: those that may come once the run has begun."""
        self._counts: defaultdict[MemberKind, Counter[Presence]] = defaultdict(Counter)
        self._kinds: defaultdict[MemberKind, dict[PeerId, Entry]] = defaultdict(dict)
        self._entries: dict[PeerId, Entry] = {}
        for member in expected:
            self.add(member)
        for member in spare:
            self.add(member, Presence.ABSENT, exited=True)
        self.spare_hosts = frozenset(entry.member.host for entry in self if entry.presence is Presence.ABSENT)
        """Hosts that may come once the run has begun."""
        self.agents = {entry.member.host: entry for entry in self if entry.member.kind == "agent"}
        """Agents by host."""
        self._roles: dict[str, list[Entry]] = {}
        for entry in self:
            if entry.member.is_role:
                self._roles.setdefault(entry.member.host, []).append(entry)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        """How many have come, or are waited for."""
        return len(self._entries) - self._count(Presence.ABSENT)

    def get(self, peer: PeerId) -> Entry | None:
        """The entry of a peer, if it is known."""
        return self._entries.get(peer)

    def add(self, member: Member, presence: Presence = Presence.EXPECTED, *, exited: bool = False) -> Entry:
        """Add a member to the table. Returns its entry."""
        entry = Entry(member, self._counts[member.kind], presence, exited=exited)
        self._entries[member.peer] = self._kinds[member.kind][member.peer] = entry
        return entry

    def remove(self, peer: PeerId) -> None:
        """Forget the member, as if it had never existed."""
        entry = self._entries.pop(peer)
        del self._kinds[entry.member.kind][peer]
        entry.counts[entry.presence] -= 1

    def of_kind(self, *kinds: MemberKind) -> list[Entry]:
        """All members of these kinds, one kind after the other."""
        return [entry for kind in kinds for entry in self._kinds[kind].values()]

    def all_gone(self, kind: MemberKind) -> bool:
        """Whether nobody waits for any member of this kind to join (again)."""
        counts = self._counts[kind]
        return not counts[Presence.EXPECTED] and not counts[Presence.HERE]

    def _count(self, presence: Presence) -> int:
        return sum(counts[presence] for counts in self._counts.values())

    def count_here(self) -> int:
        """How many have joined and are still in the run."""
        return self._count(Presence.HERE)

    def here_in_words(self) -> str:
        """Who has joined and is still in the run, like ``2 workers, 1 model server and 1 agent``."""
        counts = {word: self._counts[kind][Presence.HERE] for kind, word in _WORDS.items()}
        return joined([counted(count, word) for word, count in counts.items() if count])

    def one_gone(self) -> Entry | None:
        """One that will never join (again), if there is any."""
        none = not self._count(Presence.LEFT) + self._count(Presence.LOST)
        return None if none else next((entry for entry in self if entry.gone), None)

    def here(self) -> list[Entry]:
        """All members that have joined and are still in the run."""
        return [entry for entry in self if entry.here]

    def roles_of(self, host: str) -> list[Entry]:
        """The workers and servers of one host."""
        return list(self._roles.get(host, ()))

    def is_watched(self, entry: Entry) -> bool:
        """Whether there is, or will be, an agent that says how this role's process ends."""
        agent = self.agents.get(entry.member.host)
        return agent is not None and not agent.gone

    def ended(self, entry: Entry) -> bool:
        """Whether a role's process has ended, as far as its agent can tell."""
        return entry.gone and (entry.exited or not self.is_watched(entry))

    def some_return(self) -> bool:
        """Whether a worker that is lost may come back: its agent is starting it again, or has not said yet whether it will."""
        return any(map(self.may_return, self.of_kind("worker")))

    def may_return(self, entry: Entry) -> bool:
        """Whether a role that is lost may come back."""
        agent = self.agents.get(entry.member.host)
        there = agent is not None and agent.here
        return there and entry.presence is Presence.LOST and (entry.returns or not entry.exited)

    def view(self, version: int, *, complete: bool) -> View:
        """The members as they are now."""
        here = {entry.member.peer: entry.member for entry in self.here()}
        lost = {entry.member.peer: entry.reason for entry in self if entry.presence is Presence.LOST}
        return View(version, complete, here, lost)
