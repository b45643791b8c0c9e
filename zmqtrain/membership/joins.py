"""The requests to join that are not answered yet: roles wait until all members are there. Sans-IO."""

from __future__ import annotations

from zmqtrain.errors import PeerLostError, ZmqTrainError
from zmqtrain.membership.actions import Action, Answer, Discard, Refuse, Ticket
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


class Joins:
    """At most one request of each role."""

    def __init__(self) -> None:
        self._tickets: dict[PeerId, Ticket] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def wait(self, peer: PeerId, ticket: Ticket) -> None:
        """The role waits. It must not be waiting already."""
        assert peer not in self._tickets
        self._tickets[peer] = ticket

    def discard(self, peer: PeerId, reason: str) -> list[Action]:
        """Nobody waits for the answer any more."""
        ticket = self._tickets.pop(peer, None)
        return [] if ticket is None else [Discard(ticket, reason)]

    def refuse(self, peer: PeerId, error: ZmqTrainError) -> list[Action]:
        """Refuse the role, if it waits."""
        ticket = self._tickets.pop(peer, None)
        return [] if ticket is None else [Refuse(ticket, error)]

    def refuse_all(self, error: ZmqTrainError) -> list[Action]:
        """Refuse all: the view will never be complete."""
        tickets = list(self._tickets.values())
        self._tickets.clear()
        return [Refuse(ticket, error) for ticket in tickets]

    def refuse_without(self, lost: PeerId, reason: str) -> list[Action]:
        """Refuse all, since they waited for a member that is lost, or that has stopped the run."""
        return self.refuse_all(PeerLostError(lost, reason, waiting_for="all members to join"))

    def answer_all(self, view: Value, reason: str) -> list[Action]:
        """All members have joined."""
        tickets = list(self._tickets.values())
        self._tickets.clear()
        return [Answer(ticket, view, reason) for ticket in tickets]
