"""Demand: awaited messages must not be blocked by messages without a posted receive. Sans-IO.

While a window is crowded, each end tells the other which messages it waits for; these then need no credit.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.errors import WireError
from zmqtrain.net.credit import Window
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.incoming import Incoming
from zmqtrain.net.lane import SendLane
from zmqtrain.net.mailbox import Mailbox, Shelf, Ticket
from zmqtrain.net.outbox import Outbox, Outgoing
from zmqtrain.wire.message import Header, encode_header

WANT = "want"
UNWANT = "unwant"


class Demand:
    """The demands between this process and one peer, in both directions."""

    __slots__ = ("_control", "_mailbox", "_outbox", "_peer", "_windows")

    def __init__(
        self, peer: PeerId, mailbox: Mailbox, windows: Sequence[Window], outbox: Outbox, control: SendLane[Outgoing | None]
    ) -> None:
        self._peer, self._mailbox, self._windows = peer, mailbox, windows
        self._outbox, self._control = outbox, control

    # What this process waits for.

    def crowd(self) -> None:
        """A window fills up with messages without a posted receive: demand every message for which a receive waits."""
        for ticket in self._mailbox.pending(self._peer):
            self.want(ticket)
        for shelf in self._mailbox.shelves.values():
            self.want_topic(shelf)

    def want(self, ticket: Ticket) -> None:
        """A receive waits for a message."""
        if not ticket.wanted and self._crowded:
            ticket.wanted = True
            self._tell(WANT, ticket.key[1])

    def want_topic(self, shelf: Shelf) -> None:
        """A subscriber may wait for any message of a topic."""
        if shelf.waiting and not shelf.ready and self._peer not in shelf.wanted and self._crowded:
            shelf.wanted.add(self._peer)
            self._tell(WANT, (shelf.topic,), topic=True)

    def unwant(self, ticket: Ticket) -> None:
        """The receive was cancelled."""
        if ticket.wanted and not (ticket.incoming is not None and ticket.incoming.wanted):
            self._tell(UNWANT, ticket.key[1])

    def completed(self, incoming: Incoming) -> None:
        """A message is complete: pass it to its receive, and withdraw a demand that was not needed."""
        owner = self._mailbox.complete(incoming)
        if isinstance(owner, Ticket):
            if owner.wanted and not incoming.wanted:
                self._tell(UNWANT, incoming.tag)
        elif isinstance(owner, Shelf) and self._peer in owner.wanted:
            owner.wanted.discard(self._peer)
            if not incoming.wanted:
                self._tell(UNWANT, (owner.topic,), topic=True)

    # What the peer waits for.

    def heard(self, header: Header) -> None:
        """The peer demands a message, or withdraws a demand."""
        if not header.tag:
            raise WireError("a demand without a tag")
        key = str(header.tag[0]) if header.meta else header.tag
        if header.kind == WANT:
            self._outbox.want(key)
        else:
            self._outbox.unwant(key)

    @property
    def _crowded(self) -> bool:
        control, bulk = self._windows
        return control.crowded or bulk.crowded

    def _tell(self, kind: str, tag: tuple[str | int, ...], *, topic: bool = False) -> None:
        """Numbered, since it is a change and not a total, but it needs no credit."""
        encoded = encode_header(Header(kind, tag, self._control.next_sequence, meta=topic))
        self._control.add((encoded,), len(encoded), None)
