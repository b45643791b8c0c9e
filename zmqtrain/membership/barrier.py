"""Named barriers over any set of members, and agreements: barriers at which all members get the largest value. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError, UsageError, ViewChangedError
from zmqtrain.membership.actions import Action, Answer, Discard, Refuse, Ticket
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value

#: The most open barriers. A training run needs a handful; more means a program that never completes its barriers.
MOST_BARRIERS = 1024
#: The longest name of a barrier.
LONGEST_NAME = 256
#: The most barriers of which it is remembered that they have opened: a member that asks again, since its answer was lost with the
#: coordinator, has seen none of them open since.
MOST_REMEMBERED = 256
#: An error names at most this many missing members, and counts the rest.
NAMED_AT_MOST = 8


def name_some(peers: list[PeerId]) -> str:
    """``worker/1, worker/3 and 5 more``."""
    more = len(peers) - NAMED_AT_MOST
    return ", ".join(peers[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


@dataclass(slots=True)
class Barrier:
    """Opens when all members have arrived, and is then removed: the same name may be used again."""

    name: str
    members: tuple[PeerId, ...]
    deadline: float
    timeout_s: float
    version: int | None = None
    """The version of the view that it is about; a newer view ends it."""
    of_all: bool = False
    """Whether it is for all members: those that are lost no longer count."""
    waiting: dict[PeerId, Ticket] = field(default_factory=dict)
    calls: dict[PeerId, int] = field(default_factory=dict)
    """The members' numbers of their calls, where they are known."""
    largest: int | None = None
    """The largest value that members have given."""

    @property
    def complete(self) -> bool:
        """Whether all members have arrived."""
        return len(self.waiting) >= len(self.members) and not self.missing

    @property
    def missing(self) -> list[PeerId]:
        """The members that have not arrived."""
        return [peer for peer in self.members if peer not in self.waiting]

    def arrive(
        self, peer: PeerId, members: tuple[PeerId, ...], ticket: Ticket, value: int | None, call: int | None = None
    ) -> list[Action]:
        """A member has arrived."""
        if self.of_all:
            self.members = members
        if members is not self.members and members != self.members:
            message = f"{peer} calls the barrier {self.name!r} with a different set of members than those that already wait there"
            return [Refuse(ticket, ProtocolError(message))]
        if peer in self.waiting:
            return [Refuse(ticket, ProtocolError(f"{peer} already waits at the barrier {self.name!r}"))]
        self.waiting[peer] = ticket
        if call is not None:
            self.calls[peer] = call
        if value is not None:
            self.largest = value if self.largest is None else max(self.largest, value)
        return self._maybe_open()

    def _maybe_open(self) -> list[Action]:
        if not self.complete:
            return []
        reason = f"all {len(self.members)} members have reached {self.name!r}"
        return [Answer(waiting, self.largest, reason) for waiting in self.waiting.values()]

    def go_on_without(self, peer: PeerId) -> list[Action]:
        """Continue without a member that is lost."""
        self.members = tuple(member for member in self.members if member != peer)
        self.waiting.pop(peer, None)
        return self._maybe_open()

    def give_up(self, peer: PeerId, reason: str) -> list[Action]:
        """A member will never arrive."""
        error = PeerLostError(peer, reason, waiting_for=f"the barrier {self.name!r}")
        return [Refuse(ticket, error) for ticket in self.waiting.values()]

    def time_out(self) -> list[Action]:
        """The deadline has passed."""
        error = PeerTimeoutError(name_some(self.missing), f"the barrier {self.name!r}", self.timeout_s)
        return [Refuse(ticket, error) for ticket in self.waiting.values()]


class Barriers:
    """All open barriers of a run."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[str, Barrier] = {}
        self._opened: dict[str, tuple[dict[PeerId, int], int | None]] = {}  # the last time that each opened: calls, largest value

    def opened(self) -> dict[str, Value]:
        """What those are told that ask again, since they did not get their answer: by barrier."""
        return {name: [dict(calls), largest] for name, (calls, largest) in self._opened.items()}

    def remember(self, name: str, value: Any) -> None:
        """Take over an item of `opened`."""
        calls, largest = value
        self._opened[name] = dict(calls), largest

    def answered(self, name: str, peer: PeerId, call: int | None, ticket: Ticket) -> list[Action] | None:
        """The answer to a call that is repeated, since its first answer did not arrive; ``None``: it is no such call."""
        if call is None:
            return None
        calls, largest = self._opened.get(name, ({}, None))
        if calls.get(peer) == call:
            return [Answer(ticket, largest, f"{name!r} had opened when {peer} asked first")]
        barrier = self._open.get(name)
        if barrier is not None and barrier.calls.get(peer) == call and peer in barrier.waiting:
            before, barrier.waiting[peer] = barrier.waiting[peer], ticket
            return [Discard(before, f"{peer} has asked again")]
        return None

    def _note_opened(self, barrier: Barrier) -> None:
        if barrier.calls:
            self._opened.pop(barrier.name, None)
            self._opened[barrier.name] = dict(barrier.calls), barrier.largest
            if len(self._opened) > MOST_REMEMBERED:
                del self._opened[next(iter(self._opened))]

    def is_for(self, name: str, members: tuple[PeerId, ...]) -> bool:
        """Whether this barrier is open, and the first member has come with this very tuple (a copy would have to be compared)."""
        barrier = self._open.get(name)
        return barrier is not None and barrier.members is members

    def arrive(
        self,
        peer: PeerId,
        name: str,
        members: tuple[PeerId, ...],
        ticket: Ticket,
        now: float,
        *,
        value: int | None = None,
        version: int | None = None,
        of_all: bool = False,
        call: int | None = None,
    ) -> list[Action]:
        """A member has reached a barrier; the first one creates it. With a ``value``, all members get the largest value."""
        barrier = self._open.get(name)
        if barrier is None:
            if len(self._open) >= MOST_BARRIERS or len(name) > LONGEST_NAME:
                return [Refuse(ticket, UsageError(f"too many barriers are open ({len(self._open)}), or the name is too long"))]
            barrier = self._open[name] = Barrier(name, members, now + self._timeout_s, self._timeout_s, version, of_all)
        actions = barrier.arrive(peer, members, ticket, value, call)
        if barrier.complete:
            del self._open[name]
            self._note_opened(barrier)
        return actions

    def give_up(self, peer: PeerId, reason: str) -> list[Action]:
        """A peer will never arrive at any barrier."""
        actions: list[Action] = []
        for barrier in [barrier for barrier in self._open.values() if peer in barrier.members]:
            if barrier.of_all:
                actions += barrier.go_on_without(peer)
                if not barrier.complete:
                    continue
                self._note_opened(barrier)
            else:
                actions += barrier.give_up(peer, reason)
            del self._open[barrier.name]
        return actions

    def outdate(self, version: int, reason: str) -> list[Action]:
        """The view of this version is the newest now: end agreements about older ones."""
        actions: list[Action] = []
        for barrier in [each for each in self._open.values() if each.version is not None and each.version < version]:
            del self._open[barrier.name]
            actions += [
                Refuse(ticket, ViewChangedError(f"the members have changed: {reason}")) for ticket in barrier.waiting.values()
            ]
        return actions

    def deadlines(self) -> list[float]:
        """The deadlines of all open barriers."""
        return [barrier.deadline for barrier in self._open.values()]

    def tick(self, now: float) -> list[Action]:
        """End the barriers whose time is over at ``now``. Returns what follows for those that wait there."""
        actions: list[Action] = []
        for barrier in [barrier for barrier in self._open.values() if now >= barrier.deadline]:
            del self._open[barrier.name]
            actions += barrier.time_out()
        return actions

    def close(self) -> list[Ticket]:
        """Forget all barriers, and return the requests that waited at them."""
        waiting = [ticket for barrier in self._open.values() for ticket in barrier.waiting.values()]
        self._open.clear()
        return waiting
