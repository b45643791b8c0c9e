"""The endpoint: links, mailbox and requests, connected to a transport and an event loop.

The state machines that it holds (`Link`, `Mailbox`, `Outbox`) make all decisions; here these meet futures, timers and frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from zmqtrain.errors import ZmqTrainError
from zmqtrain.net import ending as endings
from zmqtrain.net.delivery import Delivery, TopicSubscription
from zmqtrain.net.ending import Ending
from zmqtrain.net.endpoint import Handler, PeerId, Returned, Tag
from zmqtrain.net.greeting import MAX_PEER_BYTES
from zmqtrain.net.incoming import Incoming
from zmqtrain.net.link import Link
from zmqtrain.net.mailbox import Mailbox, Ticket
from zmqtrain.net.outbox import Outgoing
from zmqtrain.net.requests import Requests
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.switchboard import Switchboard
from zmqtrain.net.transport import Transport
from zmqtrain.wire.message import describe, pack_label, packed_value
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.value import ValuePayload


class Node:
    """One process's place on the network (`zmqtrain.net.endpoint.Endpoint`), over any transport.

    Make it inside a running event loop, and `close` it.
    """

    def __init__(self, peer: PeerId, settings: NetSettings, transport: Transport) -> None:
        if not 0 < len(peer.encode()) <= MAX_PEER_BYTES:
            raise ValueError(f"a peer's name has 1 to {MAX_PEER_BYTES} bytes, not {peer!r:.60}")
        self.peer = peer
        self.settings = settings
        self._transport = transport
        self._mailbox = Mailbox()
        self._board = Switchboard(peer, settings, transport, self._mailbox, self._lost)
        self._requests = Requests(
            self._mailbox, self._post, settings.control_window_bytes, self._board.unreached, self._board.on_wrong_request
        )
        self._waits: dict[Ticket, asyncio.Future[Incoming]] = {}
        self._sends: dict[Outgoing, asyncio.Future[None]] = {}
        self._subscriptions: list[TopicSubscription] = []
        self._callbacks: list[Callable[[PeerId, str], None]] = []
        self._expected: dict[PeerId, Callable[[], Awaitable[Returned]]] = {}
        self._closing: Ending | None = None
        self._closed: asyncio.Future[None] | None = None
        transport.start(self._board)

    @property
    def address(self) -> str:
        return self._transport.address

    def add_peer(self, peer: PeerId, address: str) -> None:
        if peer != self.peer:
            self._board.add_peer(peer, address)

    async def send(
        self, to: PeerId, tag: Tag, payload: Payload, *, priority: int = 0, lasting: bool = False, control: bool = False
    ) -> Delivery:
        tag = tuple(tag)
        if not tag or (isinstance(tag[0], str) and tag[0].startswith("@")):
            raise ValueError(f"invalid tag {tag!r}: tags must not be empty, and those that begin with '@' are reserved")
        link, message = self._enqueue(to, tag, payload, priority, lasting=lasting, control=control)
        if not message.admitted:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            message.on_admitted = lambda: None if turn.done() else turn.set_result(None)
            self._sends[message] = turn
            try:
                await turn
            except (asyncio.CancelledError, ZmqTrainError):
                link.outbox.cancel(message)
                raise
            finally:
                del self._sends[message]
        return Delivery(message, link)

    async def receive(self, source: PeerId, tag: Tag, *, into: Payload | None = None) -> Payload:
        self._check_open(f"message {tag} of {source}")
        future: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        ticket = Ticket(source, tuple(tag), into, lambda incoming: self._received(future, incoming))
        self._mailbox.post(ticket)
        if not future.done():
            try:
                link = self._board.demand(source, f"message {tag}")
            except ZmqTrainError:
                self._mailbox.cancel(ticket)
                raise
            link.wants.want(ticket)
            link.owes_credit()  # for the part of it that had arrived
            self._board.touch(link)
            self._waits[ticket] = future
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._mailbox.put_back(future.result())
                else:
                    link.wants.unwant(ticket)
                    self._mailbox.cancel(ticket)
                self._board.touch(link)
                raise
            finally:
                del self._waits[ticket]
        else:
            self._board.consumed(source)
        return future.result().finish()

    def subscribe(self, topic: str) -> TopicSubscription:
        self._check_open(f"messages of topic {topic!r}")
        subscription = TopicSubscription(self._mailbox, topic, waits=self._want_topic, took=self._board.consumed)
        self._subscriptions = [*(other for other in self._subscriptions if not other.ended), subscription]
        return subscription

    async def request(self, to: PeerId, method: str, *args: Value, timeout: float) -> Payload:
        return await self._requests.call(to, method, args, timeout)

    def serve(self, method: str, handler: Handler) -> None:
        self._requests.serve(method, handler)

    def on_lost(self, callback: Callable[[PeerId, str], None]) -> Callable[[], None]:
        self._callbacks.append(callback)

        def end() -> None:
            with suppress(ValueError):
                self._callbacks.remove(callback)

        return end

    def on_superseded(self, callback: Callable[[], None]) -> None:
        self._board.on_superseded = callback

    def expect_back(self, peer: PeerId, wait: Callable[[], Awaitable[Returned]]) -> None:
        self._expected[peer] = wait

    async def returned(self, peer: PeerId) -> Returned:
        wait = self._expected.get(peer)
        return "no" if wait is None else await wait()

    def pardon(self, count: int) -> None:
        self._board.pardon(count)

    @property
    def process(self) -> int:
        return self._board.process

    def forget(self, peer: PeerId, reason: str, *, process: int | None = None) -> None:
        ending = endings.lost(peer, reason)
        link = self._board.replaced(peer, process)
        if link is None:
            self._board.forget(peer, ending)
            return
        # What waits here is for the process that is gone: these waits began before its loss was known.
        for ticket in [ticket for ticket, future in self._waits.items() if ticket.key[0] == peer and not future.done()]:
            link.wants.unwant(ticket)
            self._mailbox.cancel(ticket)
            self._waits[ticket].set_exception(ending.error(f"message {ticket.key[1]}"))
        self._board.touch(link)
        self._requests.lose_calls(peer, ending.error)
        self._tell_lost(peer, ending)

    def let_go(self, peer: PeerId) -> None:
        self._board.let_go(peer)

    def undelivered(self) -> list[PeerId]:
        return self._board.undelivered()

    def show(self, peer: PeerId) -> None:
        self._board.show(peer)

    def heard_at(self, peer: PeerId) -> float | None:
        return self._board.heard_at(peer)

    def traffic(self) -> dict[PeerId, tuple[int, int]]:
        return self._board.traffic()

    def speeds(self) -> dict[PeerId, tuple[int, float]]:
        return self._board.speeds()

    def statistics(self) -> dict[str, int]:
        return {**self._board.statistics(), **self._mailbox.statistics()}

    def waits(self) -> list[str]:
        received = [f"message {ticket.key[1]} of {ticket.key[0]}" for ticket in self._waits]
        topics = [
            f"messages of topic {subscription.shelf.topic!r}" for subscription in self._subscriptions if subscription.shelf.waiting
        ]
        return [*received, *topics, *(f"room for {message.tag}" for message in self._sends), *self._requests.waits()]

    async def finish(self, *, timeout: float) -> None:
        await self._board.finish(timeout)

    async def close(self) -> None:
        if self._closed is not None:
            await asyncio.shield(self._closed)
            return
        self._closed = asyncio.get_running_loop().create_future()
        self._closing = ending = endings.closed(self.peer)
        try:
            self._fail_waits(ending)
            await self._requests.close()
            await self._board.close(ending)
        finally:
            self._closed.set_result(None)

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _enqueue(
        self,
        to: PeerId,
        tag: Tag,
        payload: Payload,
        priority: int,
        *,
        exempt: bool = False,
        lasting: bool = False,
        control: bool = False,
    ) -> tuple[Link, Outgoing]:
        self._check_open(f"room for {tag} to {to}")
        if to == self.peer:
            raise ValueError(f"{to} cannot send to itself")
        limits = self.settings.limits
        header, frames = describe(payload, tag, limits=limits)
        # The rest of the header is packed when its turn comes. What cannot be sent raises here, and later changes to the caller's
        # `meta` have no effect.
        packed = packed_value(payload, limits) if type(payload) is ValuePayload and not header.nbytes else None
        label = pack_label(header, limits, packed)
        link = self._board.demand(to, f"room for {tag}")
        message = Outgoing(header, frames, priority, exempt=exempt, lasting=lasting, control=control, label=label)
        link.outbox.put(message)
        self._board.touch(link)
        return link, message

    def _post(self, to: PeerId, tag: Tag, payload: Payload) -> Withdrawal:
        link, message = self._enqueue(to, tag, payload, 0, exempt=True)
        return Withdrawal(link, message)

    def _received(self, future: asyncio.Future[Incoming], incoming: Incoming) -> None:
        if future.done():
            self._mailbox.put_back(incoming)  # its receiver was cancelled, and has not run since
        else:
            future.set_result(incoming)

    def _want_topic(self, subscription: TopicSubscription) -> None:
        for link in self._board.links():
            link.wants.want_topic(subscription.shelf)
            self._board.touch(link)

    def _check_open(self, what: str) -> None:
        if self._closing is not None:
            raise self._closing.error(what)

    def _lost(self, peer: PeerId, ending: Ending, messages: Sequence[Outgoing], tickets: Sequence[Ticket]) -> None:
        """A peer is lost, or has left: tell everything that waits for it."""
        for ticket in tickets:
            future = self._waits.get(ticket)
            if future is not None and not future.done():
                future.set_exception(ending.error(f"message {ticket.key[1]}"))
        for message in messages:
            turn = self._sends.get(message)
            if turn is not None and not turn.done():
                turn.set_exception(ending.error(f"room for {message.tag}"))
            if message.on_released is not None:
                message.on_released()
        self._requests.lose(peer, ending.error)
        self._tell_lost(peer, ending)

    def _tell_lost(self, peer: PeerId, ending: Ending) -> None:
        if ending.loss and self._closing is None:
            for callback in list(self._callbacks):
                try:
                    callback(peer, ending.reason)
                except Exception as error:  # noqa: BLE001 - the other callbacks must run, too; the loop's handler reports it
                    message_text = f"a callback for the loss of {peer} raised"
                    asyncio.get_running_loop().call_exception_handler({"message": message_text, "exception": error})

    def _fail_waits(self, ending: Ending) -> None:
        for ticket, future in self._waits.items():
            if not future.done():
                future.set_exception(ending.error(f"message {ticket.key[1]} of {ticket.key[0]}"))
        for message, turn in self._sends.items():
            if not turn.done():
                turn.set_exception(ending.error(f"room for {message.tag}"))
        for subscription in self._subscriptions:
            subscription.end(ending)


class Withdrawal:
    """A message of a request, which may be taken back (`zmqtrain.net.requests.Withdrawable`)."""

    def __init__(self, link: Link, message: Outgoing) -> None:
        self._link = link
        self._message = message

    def withdraw(self) -> None:
        if self._link.ending is None:
            self._link.outbox.cancel(self._message)
