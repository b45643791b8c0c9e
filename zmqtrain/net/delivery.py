"""The handles that ``send`` and ``subscribe`` return, which connect a state machine to futures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.ending import Ending
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.net.link import Link
from zmqtrain.net.mailbox import Mailbox
from zmqtrain.net.outbox import Outgoing
from zmqtrain.wire.payload import Payload


class Delivery:
    """One sent message (`zmqtrain.net.endpoint.Sent`)."""

    __slots__ = ("_link", "_message", "_waiters")

    def __init__(self, message: Outgoing, link: Link) -> None:
        self._message = message
        self._link = link
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def released(self) -> bool:
        return self._message.released

    async def wait_released(self) -> None:
        message = self._message
        if not message.released:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            message.on_released = self._wake
            await future
        if message.lost:
            assert self._link.ending is not None
            raise self._link.ending.error(f"the arrival of {message.tag}")

    def _wake(self) -> None:
        self._message.on_released = None  # they refer to each other, and the message to memory that is free now
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
        self._waiters.clear()


class TopicSubscription:
    """Messages of one topic (`zmqtrain.net.endpoint.Subscription`)."""

    def __init__(
        self, mailbox: Mailbox, topic: str, *, waits: Callable[[TopicSubscription], None], took: Callable[[PeerId], None]
    ) -> None:
        """``waits`` is called when a wait begins, ``took`` with the peer whose message was taken."""
        self._mailbox = mailbox
        self._waits = waits
        self._took = took
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._ended: Ending | None = None
        self.shelf = mailbox.subscribe(topic, self._notify)

    @property
    def ready(self) -> int:
        return len(self.shelf.ready)

    async def get(self) -> tuple[PeerId, Tag, Payload]:
        shelf = self.shelf
        while not shelf.ready:
            if self._ended is not None:
                raise self._ended.error(f"messages of topic {shelf.topic!r}")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            shelf.waiting = True
            self._waits(self)
            try:
                await future
            except asyncio.CancelledError:
                if future in self._waiters:
                    self._waiters.remove(future)
                elif shelf.ready:
                    self._notify()  # this waiter was woken for a message that another one may take
                raise
            finally:
                shelf.waiting = bool(self._waiters)
        incoming = shelf.ready.popleft()
        incoming.claim()
        self._took(incoming.source)
        return incoming.source, incoming.tag, incoming.finish()

    async def __aiter__(self) -> AsyncIterator[tuple[PeerId, Tag, Payload]]:
        while True:
            yield await self.get()

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def close(self) -> None:
        """Messages that were not taken are kept for a later subscription. A pending `get` raises `ZmqTrainError`."""
        self.end(Ending("closed", lambda waiting_for: ZmqTrainError(f"closed while waiting for {waiting_for}")))

    def end(self, ending: Ending) -> None:
        if self._ended is None:
            self._ended = ending
            self._mailbox.unsubscribe(self.shelf)
            while self._waiters:
                self._notify()

    def _notify(self) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)
                return
