"""A network in one process: no sockets, delivery by the event loop.

The whole endpoint above the transport is the real one (greeting, sequence numbers, credits, chunks). Frames are copied when they
are passed on, as by a socket. Connections can be dropped, peers killed and groups separated, for tests and simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.transport import Frames, Receiver
from zmqtrain.wire.message import Header

#: The time that a message takes: ``delay(source, destination, lane, nbytes)`` in seconds. Messages of a lane keep their order.
Delay = Callable[[PeerId, PeerId, int, int], float]


class MemoryNetwork:
    """Connects the endpoints that are made on it."""

    def __init__(self, delay: Delay | None = None) -> None:
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._parted: set[frozenset[PeerId]] = set()
        self._delay = delay

    def endpoint(self, peer: PeerId, settings: NetSettings | None = None) -> Node:
        """A new endpoint, inside a running event loop. Peers on one network find each other without `Node.add_peer`."""
        if peer in self._transports:
            raise ValueError(f"this network already has an endpoint {peer}")
        settings = settings or NetSettings()
        transport = MemoryTransport(self, peer)
        return Node(peer, settings, transport)

    def drop_link(self, a: PeerId, b: PeerId, *, down_s: float = 0.0) -> None:
        """Break the connections between two peers: what is in flight is lost. They come back after ``down_s``."""
        pair = frozenset((a, b))
        self._parted.add(pair)
        self._cut(pair)
        asyncio.get_running_loop().call_later(down_s, self._heal, [pair])

    def partition(self, one: Iterable[PeerId], other: Iterable[PeerId]) -> Callable[[], None]:
        """Allow no connection between any of ``one`` and any of ``other`` until the returned function is called."""
        other = list(other)
        pairs = [frozenset((a, b)) for a in one for b in other]
        for pair in pairs:
            self._parted.add(pair)
            self._cut(pair)
        return lambda: self._heal(pairs)

    def kill(self, peer: PeerId) -> None:
        """The peer's process vanishes without a farewell: nothing is sent or received any more. Its name can be used again."""
        transport = self._transports.get(peer)
        if transport is not None:
            transport.vanish()

    def _join(self, transport: MemoryTransport) -> None:
        self._transports[transport.peer] = transport
        for other in list(self._transports.values()):
            other.look_for(transport.peer)

    def _leave(self, transport: MemoryTransport) -> None:
        if self._transports.get(transport.peer) is transport:
            del self._transports[transport.peer]
            for other in list(self._transports.values()):
                other.cut(transport.peer, gone=True)

    def _cut(self, pair: frozenset[PeerId]) -> None:
        for peer in pair:
            transport = self._transports.get(peer)
            if transport is not None:
                for other in pair - {peer}:
                    transport.cut(other)

    def _heal(self, pairs: Iterable[frozenset[PeerId]]) -> None:
        for pair in pairs:
            self._parted.discard(pair)
            for peer in pair:
                transport = self._transports.get(peer)
                if transport is not None:
                    for other in pair - {peer}:
                        transport.look_for(other)

    def _reach(self, source: PeerId, destination: PeerId) -> MemoryTransport | None:
        if frozenset((source, destination)) in self._parted:
            return None
        return self._transports.get(destination)

    def _delay_of(self, source: PeerId, destination: PeerId, lane: int, nbytes: int) -> float:
        return self._delay(source, destination, lane, nbytes) if self._delay is not None else 0.0


class _Connection:
    """A connection from one transport to another. It is replaced when it breaks, and what is in flight on it is lost."""

    __slots__ = ("arrives_at", "destination", "route", "up")

    def __init__(self, destination: PeerId, route: bytes) -> None:
        self.destination = destination
        self.route = route
        self.up = False
        self.arrives_at = [0.0, 0.0]


class MemoryTransport:
    """One peer's place on a `MemoryNetwork` (`zmqtrain.net.transport.Transport`)."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self.peer = peer
        self._network = network
        self._connections: dict[PeerId, _Connection] = {}
        self._receiver: Receiver | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        return f"memory://{self.peer}"

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._network._join(self)

    def find(self, peer: PeerId) -> str:
        return f"memory://{peer}"

    def connect(self, peer: PeerId, address: str, route: bytes) -> None:
        destination = _peer_at(address)
        self._connections[peer] = _Connection(destination, route)
        self.look_for(destination)

    def disconnect(self, peer: PeerId) -> None:
        self._connections.pop(peer, None)

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int, header: Header | None = None) -> bool:
        connection = self._connections.get(peer)
        if connection is None or not connection.up:
            return True  # lost, as on a wire that has just been cut
        copies = [frame if isinstance(frame, bytes) else memoryview(bytes(frame)) for frame in frames]
        delay = self._network._delay_of(self.peer, connection.destination, lane, nbytes)
        if delay <= 0.0:
            self._loop.call_soon(self._arrive, connection, lane, copies)
        else:
            at = max(self._loop.time() + delay, connection.arrives_at[lane])
            connection.arrives_at[lane] = at
            self._loop.call_at(at, self._arrive, connection, lane, copies)
        return True

    def post(self, address: str, frames: Frames) -> None:
        connection = _Connection(_peer_at(address), b"")
        connection.up = True
        self._loop.call_soon(self._arrive, connection, 0, [bytes(frame) for frame in frames])

    async def close(self) -> None:
        # Messages that were just passed on, such as a farewell, are sent first.
        await asyncio.sleep(0)
        self.vanish()

    def vanish(self) -> None:
        """Send and receive nothing from now on."""
        self._receiver = None
        self._connections.clear()
        self._network._leave(self)

    def look_for(self, destination: PeerId) -> None:
        """The destination may exist now."""
        for peer, connection in self._connections.items():
            reachable = self._network._reach(self.peer, destination) is not None
            if connection.destination == destination and not connection.up and reachable:
                connection.up = True
                self._loop.call_soon(self._link_up, peer, connection)

    def cut(self, destination: PeerId, *, gone: bool = False) -> None:
        """The destination has gone, or only the path to it."""
        for peer, connection in list(self._connections.items()):
            if connection.destination == destination and connection.up:
                connection.up = False
                self._connections[peer] = _Connection(destination, connection.route)
                self._loop.call_soon(self._link_down, peer, gone)

    def _link_up(self, peer: PeerId, connection: _Connection) -> None:
        if self._receiver is not None and self._connections.get(peer) is connection:
            self._receiver.on_link_up(peer)

    def _link_down(self, peer: PeerId, gone: bool) -> None:
        if self._receiver is not None:
            self._receiver.on_link_down(peer)
            if gone:
                self._receiver.on_gone(peer)

    def _arrive(self, connection: _Connection, lane: int, frames: Frames) -> None:
        destination = self._network._reach(self.peer, connection.destination)
        if connection.up and destination is not None and destination._receiver is not None:
            destination._receiver.on_message(lane, connection.route, frames)


def _peer_at(address: str) -> PeerId:
    scheme, _, peer = address.partition("://")
    if scheme != "memory" or not peer:
        raise ValueError(f"{address!r} is not an in-memory address, such as 'memory://PEER'")
    return peer
