"""A named barrier over some members, as a small sans-IO machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError
from zmqtrain.membership.actions import Action, Answer, Refuse, Ticket
from zmqtrain.net.endpoint import PeerId

#: How many missing members an error names; the rest is counted.
NAMED_AT_MOST = 8


def name_some(peers: list[PeerId]) -> str:
    """``worker/1, worker/3 and 5 more``."""
    more = len(peers) - NAMED_AT_MOST
    return ", ".join(peers[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


@dataclass(slots=True)
class Barrier:
    """Opens when all members are there, and is then gone: the same name may be used again."""

    name: str
    members: tuple[PeerId, ...]
    deadline: float
    timeout_s: float
    waiting: dict[PeerId, Ticket] = field(default_factory=dict)

    @property
    def missing(self) -> list[PeerId]:
        """Who has not come."""
        return [peer for peer in self.members if peer not in self.waiting]

    def arrive(self, peer: PeerId, members: tuple[PeerId, ...], ticket: Ticket) -> list[Action]:
        """A member is there."""
        if members != self.members:
            message = f"{peer} calls the barrier {self.name!r} with other members than those who wait there already"
            return [Refuse(ticket, ProtocolError(message))]
        if peer in self.waiting:
            return [Refuse(ticket, ProtocolError(f"{peer} waits at the barrier {self.name!r} already"))]
        self.waiting[peer] = ticket
        if self.missing:
            return []
        return [Answer(waiting, None, f"all {len(self.members)} members are at {self.name!r}") for waiting in self.waiting.values()]

    def give_up(self, peer: PeerId, reason: str) -> list[Action]:
        """A member will never come."""
        error = PeerLostError(peer, reason, waiting_for=f"the barrier {self.name!r}")
        return [Refuse(ticket, error) for ticket in self.waiting.values()]

    def time_out(self) -> list[Action]:
        """The deadline has passed."""
        error = PeerTimeoutError(name_some(self.missing), f"the barrier {self.name!r}", self.timeout_s)
        return [Refuse(ticket, error) for ticket in self.waiting.values()]
