"""Matches messages to receives, by (source, tag), and to subscriptions, by topic. Sans-IO.

A message is matched when its first piece arrives, so that the rest needs no credit and no second copy. A message without a match is
stored until a receive asks for it; the senders' credit limits how much that can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.net.incoming import Incoming
from zmqtrain.wire.payload import Payload

Key = tuple[PeerId, Tag]


class Ticket:
    """A receive that waits for its message."""

    __slots__ = ("done", "incoming", "into", "key", "wanted")

    def __init__(self, source: PeerId, tag: Tag, into: Payload | None, done: Callable[[Incoming], None]) -> None:
        self.key: Key = (source, tag)
        self.into = into
        self.done = done
        self.incoming: Incoming | None = None
        self.wanted = False
        """Whether the sender was asked to send it beyond the window."""


class Shelf:
    """A subscription's messages. ``waiting`` is set while a receive waits for one."""

    __slots__ = ("notify", "ready", "topic", "waiting", "wanted")

    def __init__(self, topic: str, notify: Callable[[], None]) -> None:
        self.topic = topic
        self.notify = notify
        self.ready: deque[Incoming] = deque()
        self.waiting = False
        self.wanted: set[PeerId] = set()
        """Peers that were asked to send one message of the topic beyond their window."""


class Mailbox:
    """All receives, subscriptions and stored messages of an endpoint."""

    def __init__(self) -> None:
        self._posted: dict[Key, deque[Ticket]] = {}
        self._pending: dict[PeerId, dict[Ticket, None]] = {}
        self._stored: dict[Key, deque[Incoming]] = {}
        self._routes: dict[str | int, Callable[[Incoming], None]] = {}
        self.shelves: dict[str | int, Shelf] = {}
        self._tickets: dict[Incoming, Ticket] = {}
        self._arrivals = count(1)

    # Calls by the endpoint's user.

    def post(self, ticket: Ticket) -> None:
        """Wait for a message; ``ticket.done`` is called at once if it has arrived."""
        source = ticket.key[0]
        stored = self._stored.get(ticket.key)
        if stored:
            incoming = stored.popleft()
            if not stored:
                del self._stored[ticket.key]
            if incoming.complete:
                incoming.claim(ticket.into)
                ticket.done(incoming)
                return
            self._assign(incoming, ticket)
        else:
            self._posted.setdefault(ticket.key, deque()).append(ticket)
        self._pending.setdefault(source, {})[ticket] = None

    def cancel(self, ticket: Ticket) -> None:
        """The ticket is no longer waited for. What arrived for it goes to the next in line, or is stored."""
        self._forget(ticket)
        if ticket.incoming is None:
            posted = self._posted.get(ticket.key)
            if posted and ticket in posted:
                posted.remove(ticket)
                if not posted:
                    del self._posted[ticket.key]
            return
        incoming, ticket.incoming = ticket.incoming, None
        self._tickets.pop(incoming, None)
        self.put_back(incoming)

    def put_back(self, incoming: Incoming) -> None:
        """Return a claimed message that did not reach its receiver, before all others of its tag."""
        incoming.unclaim()
        key = (incoming.source, incoming.tag)
        posted = self._posted.get(key)
        if posted:
            ticket = self._next_ticket(key, posted)
            if incoming.complete:
                self._forget(ticket)
                incoming.claim(ticket.into)
                ticket.done(incoming)
            else:
                self._assign(incoming, ticket)
        else:
            self._stored.setdefault(key, deque()).appendleft(incoming)

    def route(self, topic: str, done: Callable[[Incoming], None]) -> None:
        """Claim messages of this topic as they arrive; ``done`` is called with each complete message."""
        self._routes[topic] = done

    def subscribe(self, topic: str, notify: Callable[[], None]) -> Shelf:
        """From now on messages of the topic go to the shelf, beginning with those that have already arrived."""
        if topic in self.shelves:
            raise ValueError(f"topic {topic!r} already has a subscription")
        shelf = self.shelves[topic] = Shelf(topic, notify)
        here = [incoming for key, stored in self._stored.items() if key[1][0] == topic for incoming in stored if incoming.complete]
        shelf.ready.extend(sorted(here, key=lambda incoming: incoming.arrival))
        for key in [key for key in self._stored if key[1][0] == topic]:
            del self._stored[key]  # incomplete messages are added to the shelf when they are complete
        return shelf

    def unsubscribe(self, shelf: Shelf) -> None:
        """Messages that were not taken are stored as if there had been no subscription."""
        if self.shelves.get(shelf.topic) is shelf:
            del self.shelves[shelf.topic]
            for incoming in shelf.ready:
                self._store(incoming)
            shelf.ready.clear()

    # Calls by the links.

    def begin(self, incoming: Incoming) -> None:
        """The first piece has arrived (and is not added yet)."""
        incoming.arrival = next(self._arrivals)
        topic = incoming.tag[0]
        if topic in self._routes:
            incoming.claim()
            return
        key = (incoming.source, incoming.tag)
        posted = self._posted.get(key)
        if posted:
            self._assign(incoming, self._next_ticket(key, posted))
        elif topic not in self.shelves:
            self._store(incoming)

    def complete(self, incoming: Incoming) -> Ticket | Shelf | None:
        """The last piece was added. Returns the ticket or shelf that has the message; None if it is stored or was routed."""
        ticket = self._tickets.pop(incoming, None)
        if ticket is not None:
            self._forget(ticket)
            ticket.incoming = None
            ticket.done(incoming)
            return ticket
        topic = incoming.tag[0]
        if incoming.claimed:
            self._routes[topic](incoming)
            return None
        shelf = self.shelves.get(topic)
        stored = self._stored.get((incoming.source, incoming.tag))
        if shelf is not None and not (stored and incoming in stored):
            shelf.ready.append(incoming)
            shelf.notify()
            return shelf
        if not stored or incoming not in stored:  # its subscription was closed in the meantime
            self._store(incoming)
        return None

    def pending(self, source: PeerId) -> Iterator[Ticket]:
        """Receives from this peer that are not satisfied."""
        return iter(self._pending.get(source, ()))

    def lose(self, source: PeerId) -> list[Ticket]:
        """The peer is gone, and with it its incomplete messages. Returns the receives that waited for it, which are no longer
        posted."""
        tickets = list(self._pending.pop(source, ()))
        for ticket in tickets:
            if ticket.incoming is not None:
                self._tickets.pop(ticket.incoming, None)
        for key in [key for key in self._posted if key[0] == source]:
            del self._posted[key]
        self._keep(source, lambda incoming: incoming.complete)
        for shelf in self.shelves.values():
            shelf.wanted.discard(source)
        return tickets

    def purge(self, source: PeerId) -> None:
        """The peer was restarted: remove untaken messages of its predecessor, so that they are not mixed with new ones."""
        self._keep(source, lambda incoming: False)
        for shelf in self.shelves.values():
            shelf.ready = deque(incoming for incoming in shelf.ready if incoming.source != source)

    def _keep(self, source: PeerId, keep: Callable[[Incoming], bool]) -> None:
        for key in [key for key in self._stored if key[0] == source]:
            kept = deque(incoming for incoming in self._stored[key] if keep(incoming))
            if kept:
                self._stored[key] = kept
            else:
                del self._stored[key]

    def statistics(self) -> dict[str, int]:
        stored = [incoming for queue in self._stored.values() for incoming in queue]
        stored += [incoming for shelf in self.shelves.values() for incoming in shelf.ready]
        return {"stored_messages": len(stored), "stored_bytes": sum(incoming.received for incoming in stored)}

    def _store(self, incoming: Incoming) -> None:
        self._stored.setdefault((incoming.source, incoming.tag), deque()).append(incoming)

    def _assign(self, incoming: Incoming, ticket: Ticket) -> None:
        ticket.incoming = incoming
        self._tickets[incoming] = ticket
        incoming.claim(ticket.into)

    def _next_ticket(self, key: Key, posted: deque[Ticket]) -> Ticket:
        ticket = posted.popleft()
        if not posted:
            del self._posted[key]
        return ticket

    def _forget(self, ticket: Ticket) -> None:
        pending = self._pending.get(ticket.key[0])
        if pending is not None:
            pending.pop(ticket, None)
            if not pending:
                del self._pending[ticket.key[0]]
