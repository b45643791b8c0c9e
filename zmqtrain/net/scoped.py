"""An endpoint for a while: what is sent, received and served through it has nothing to do with what was before, or comes after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from zmqtrain.errors import ConnectivityError, ZmqTrainError
from zmqtrain.net.endpoint import Endpoint, Handler, PeerId, Returned, Sent, Subscription, Tag
from zmqtrain.wire.payload import Payload, Value


class ScopedEndpoint:
    """Implements `zmqtrain.net.endpoint.Endpoint` over another one, which stays the caller's, between peers that all have given
    theirs the same name. `end` it, and then let `drain` run: what was sent to it and never received must not use up the senders'
    credit.

    Peers ``beyond`` it know nothing of the scope: what goes to them and comes from them passes unchanged. Their requests are not
    served here.
    """

    def __init__(self, endpoint: Endpoint, scope: str, *, beyond: Collection[PeerId] = ()) -> None:
        """``scope``: another one for each of these on an endpoint; the same on all peers."""
        self.peer = endpoint.peer
        self._endpoint, self._scope, self._beyond = endpoint, scope, frozenset(beyond)
        self._forget: list[Callable[[], None]] = []
        self._handlers: dict[str, Handler] = {}
        self._served: dict[str, asyncio.Future[Handler]] = {}
        self._ended = False

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def process(self) -> int:
        return self._endpoint.process

    def add_peer(self, peer: PeerId, address: str) -> None:
        self._endpoint.add_peer(peer, address)

    async def send(
        self, to: PeerId, tag: Tag, payload: Payload, *, priority: int = 0, lasting: bool = False, control: bool = False
    ) -> Sent:
        return await self._endpoint.send(to, self._tag(to, tag), payload, priority=priority, lasting=lasting, control=control)

    async def receive(self, source: PeerId, tag: Tag, *, into: Payload | None = None) -> Payload:
        return await self._endpoint.receive(source, self._tag(source, tag), into=into)

    def subscribe(self, topic: str) -> Subscription:
        raise AssertionError(f"topics such as {topic!r} are for servers, which do not change their places")

    async def request(self, to: PeerId, method: str, *args: Value, timeout: float) -> Payload:
        name = method if to in self._beyond else self._method(method)
        return await self._endpoint.request(to, name, *args, timeout=timeout)

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler
        self._endpoint.serve(self._method(method), handler)
        if (waiting := self._served.pop(method, None)) is not None and not waiting.done():
            waiting.set_result(handler)

    async def handler(self, method: str) -> Handler:
        """What is served as ``method``, once it is: for requests from ``beyond``. Raises `ConnectivityError` if the scope ends
        before."""
        if method in self._handlers:
            return self._handlers[method]
        if self._ended:
            raise ConnectivityError(f"{self._scope} has ended")
        waiting = self._served.setdefault(method, asyncio.get_running_loop().create_future())
        return await asyncio.shield(waiting)

    def on_lost(self, callback: Callable[[PeerId, str], None]) -> Callable[[], None]:
        forget = self._endpoint.on_lost(callback)
        self._forget.append(forget)
        return forget

    def on_superseded(self, callback: Callable[[], None]) -> None:
        self._endpoint.on_superseded(callback)

    def expect_back(self, peer: PeerId, wait: Callable[[], Awaitable[Returned]]) -> None:
        self._endpoint.expect_back(peer, wait)

    async def returned(self, peer: PeerId) -> Returned:
        return await self._endpoint.returned(peer)

    def forget(self, peer: PeerId, reason: str, *, process: int | None = None) -> None:
        self._endpoint.forget(peer, reason, process=process)

    def let_go(self, peer: PeerId) -> None:
        self._endpoint.let_go(peer)

    def undelivered(self) -> list[PeerId]:
        return self._endpoint.undelivered()

    def pardon(self, count: int) -> None:
        self._endpoint.pardon(count)

    def waits(self) -> list[str]:
        return self._endpoint.waits()

    def show(self, peer: PeerId) -> None:
        self._endpoint.show(peer)

    def heard_at(self, peer: PeerId) -> float | None:
        return self._endpoint.heard_at(peer)

    def traffic(self) -> dict[PeerId, tuple[int, int]]:
        return self._endpoint.traffic()

    def speeds(self) -> dict[PeerId, tuple[int, float]]:
        return self._endpoint.speeds()

    def statistics(self) -> dict[str, int]:
        return self._endpoint.statistics()

    async def finish(self, *, timeout: float) -> None:
        await self._endpoint.finish(timeout=timeout)

    async def close(self) -> None:
        raise AssertionError("the endpoint below is its maker's to close")

    def end(self) -> None:
        """It is not used any more: requests of peers that still do are refused, and losses are told to nobody."""
        self._ended = True
        for forget in self._forget:
            forget()
        self._forget.clear()

        async def refuse(caller: PeerId, *_args: Value) -> Value:
            raise ConnectivityError(f"{self.peer} has left {self._scope}, which {caller} still asks it of")

        for method in self._handlers:
            self._endpoint.serve(self._method(method), refuse)
        self._handlers.clear()
        for waiting in self._served.values():
            if not waiting.done():
                waiting.set_exception(ConnectivityError(f"{self._scope} has ended"))
                waiting.exception()  # it counts as retrieved
        self._served.clear()

    async def drain(self) -> None:
        """Throw away what still arrives for this scope. Run it as a task, after `end`, and cancel it at the end of all."""
        arriving = self._endpoint.subscribe(self._scope)
        try:
            with suppress(ZmqTrainError):  # the endpoint is closed
                while True:
                    await arriving.get()
                    await asyncio.sleep(0)  # with messages queued, getting them lets no other task run
        finally:
            arriving.close()

    def _tag(self, peer: PeerId, tag: Tag) -> Tag:
        return tag if peer in self._beyond else (self._scope, *tag)

    def _method(self, method: str) -> str:
        return f"{self._scope}/{method}"
