"""Endpoints in one process: no sockets, delivery by the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import msgpack

from zmqtrain.errors import PeerLostError, PeerTimeoutError, ZmqTrainError
from zmqtrain.net.endpoint import Handler, PeerId, Tag
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.payload import Payload, Value


class _Sent:
    released = True

    async def wait_released(self) -> None:
        return None


class _Subscription:
    def __init__(self, node: MemoryEndpoint, topic: str) -> None:
        self.node, self.topic = node, topic
        self.ready: deque[tuple[PeerId, Tag, Payload]] = deque()
        self.event = asyncio.Event()

    async def get(self) -> tuple[PeerId, Tag, Payload]:
        while not self.ready:
            self.event.clear()
            await self.event.wait()
        return self.ready.popleft()

    async def __aiter__(self) -> AsyncIterator[tuple[PeerId, Tag, Payload]]:
        while True:
            yield await self.get()

    def close(self) -> None:
        self.node.subscriptions.pop(self.topic, None)


class MemoryEndpoint:
    def __init__(self, network: MemoryNetwork, peer: PeerId, settings: NetSettings) -> None:
        self.network, self.peer, self.settings = network, peer, settings
        self.waiting: dict[tuple[PeerId, Tag], deque[asyncio.Future[Payload]]] = {}
        self.arrived: dict[tuple[PeerId, Tag], deque[Payload]] = {}
        self.subscriptions: dict[str, _Subscription] = {}
        self.handlers: dict[str, Handler] = {}
        self.lost: dict[PeerId, str] = {}
        self.callbacks: list[Callable[[PeerId, str], None]] = []
        self.counters: Counter[str] = Counter()
        self.closed = False

    @property
    def address(self) -> str:
        return f"memory://{self.peer}"

    def add_peer(self, peer: PeerId, address: str) -> None:
        self.lost.pop(peer, None)

    async def _peer(self, peer: PeerId) -> MemoryEndpoint:
        try:
            async with asyncio.timeout(self.settings.connect_s):
                while peer not in self.network.nodes:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise PeerTimeoutError(peer, "its first connection", self.settings.connect_s) from None
        return self.network.nodes[peer]

    async def send(self, to: PeerId, tag: Tag, payload: Payload, *, priority: int = 0) -> _Sent:
        if to in self.lost:
            raise PeerLostError(to, self.lost[to])
        copy = payload.empty_like()
        copy.copy_(payload)
        copy.meta = msgpack.unpackb(msgpack.packb(payload.meta), strict_map_key=False)
        other = await self._peer(to)
        self.counters["bytes_sent"] += payload.nbytes
        self.counters["messages_sent"] += 1
        asyncio.get_running_loop().call_soon(other._deliver, self.peer, tuple(tag), copy)
        return _Sent()

    def _deliver(self, source: PeerId, tag: Tag, payload: Payload) -> None:
        self.counters["bytes_received"] += payload.nbytes
        self.counters["messages_received"] += 1
        queue = self.waiting.get((source, tag))
        while queue:
            future = queue.popleft()
            if not future.done():
                future.set_result(payload)
                return
        if tag[0] in self.subscriptions:
            subscription = self.subscriptions[str(tag[0])]
            subscription.ready.append((source, tag, payload))
            subscription.event.set()
            return
        self.arrived.setdefault((source, tag), deque()).append(payload)

    async def receive(self, source: PeerId, tag: Tag, *, into: Payload | None = None) -> Payload:
        tag = tuple(tag)
        arrived = self.arrived.get((source, tag))
        if arrived:
            payload = arrived.popleft()
            if not arrived:
                del self.arrived[(source, tag)]
        else:
            if source in self.lost:
                raise PeerLostError(source, self.lost[source])
            future: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
            self.waiting.setdefault((source, tag), deque()).append(future)
            try:
                payload = await future
            finally:
                queue = self.waiting.get((source, tag))
                if queue is not None and future in queue:
                    queue.remove(future)
                if not queue:
                    self.waiting.pop((source, tag), None)
        if into is None:
            return payload
        into.copy_(payload)
        into.meta = payload.meta
        return into

    def subscribe(self, topic: str) -> _Subscription:
        subscription = self.subscriptions[topic] = _Subscription(self, topic)
        for key in [key for key in self.arrived if key[1][0] == topic]:
            for payload in self.arrived.pop(key):
                subscription.ready.append((*key, payload))
        return subscription

    async def request(self, to: PeerId, method: str, *args: Value, timeout: float) -> Payload:
        from zmqtrain.wire.value import ValuePayload

        if to in self.lost:
            raise PeerLostError(to, self.lost[to])
        try:
            async with asyncio.timeout(timeout):
                other = await self._peer(to)
                await asyncio.sleep(0)
                while method not in other.handlers:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                plain: Any = msgpack.unpackb(msgpack.packb(args), strict_map_key=False)
                answer: Any = await other.handlers[method](self.peer, *plain)
        except PeerTimeoutError:
            raise
        except TimeoutError:
            raise PeerTimeoutError(to, f"the answer to {method}", timeout) from None
        if isinstance(answer, Payload):
            return answer
        return ValuePayload(msgpack.unpackb(msgpack.packb(answer), strict_map_key=False))

    def serve(self, method: str, handler: Handler) -> None:
        self.handlers[method] = handler

    def on_lost(self, callback: Callable[[PeerId, str], None]) -> None:
        self.callbacks.append(callback)

    def forget(self, peer: PeerId, reason: str) -> None:
        self.lost[peer] = reason
        for (source, tag), queue in list(self.waiting.items()):
            if source == peer:
                for future in queue:
                    if not future.done():
                        future.set_exception(PeerLostError(peer, reason, waiting_for=f"message {tag}"))
        for callback in self.callbacks:
            callback(peer, reason)

    def statistics(self) -> dict[str, int]:
        return dict(self.counters)

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        await asyncio.sleep(0)
        self.network.nodes.pop(self.peer, None)
        for (source, tag), queue in list(self.waiting.items()):
            for future in queue:
                if not future.done():
                    future.set_exception(ZmqTrainError(f"{self.peer} was closed while waiting for message {tag} of {source}"))


class MemoryNetwork:
    """Connects endpoints of one process."""

    def __init__(self) -> None:
        self.nodes: dict[PeerId, MemoryEndpoint] = {}
        self._ids = count()

    def endpoint(self, peer: PeerId, settings: NetSettings | None = None) -> MemoryEndpoint:
        node = self.nodes[peer] = MemoryEndpoint(self, peer, settings or NetSettings())
        return node
