"""One peer's end of the simulated network: its connections, and what happens to them."""

from __future__ import annotations

import asyncio
import contextvars
import random
from typing import TYPE_CHECKING

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.transport import Frames, Receiver
from zmqtrain.simulate.connection import NO_PROCESS, Channel, Connection, Message
from zmqtrain.wire.message import Header

if TYPE_CHECKING:
    from zmqtrain.simulate.network import SimulatedNetwork

#: ZeroMQ drops a connection after this many heartbeats without an answer (`zmqtrain.net.zeromq` configures it so).
HEARTBEATS = 3
_SCHEME = "simulated://"
_IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes})


class SimulatedTransport:
    """One peer's place on a `SimulatedNetwork` (`zmqtrain.net.transport.Transport`)."""

    def __init__(self, network: SimulatedNetwork, peer: PeerId, host: str, settings: NetSettings) -> None:
        self.peer, self.host = peer, host
        self.context = contextvars.copy_context()
        """The process in which messages are delivered."""
        self._network = network
        self._settings = settings
        self._farewell_s = settings.farewell_s
        self._connections: dict[PeerId, Connection] = {}
        self._ending: dict[Connection, None] = {}  # no longer in use, but not everything has been sent
        self._all_left: asyncio.Future[None] | None = None
        self._last_word_at = 0.0
        self._receiver: Receiver | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        return _SCHEME + self.peer

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._network.join(self)

    def find(self, peer: PeerId) -> str:
        return _SCHEME + peer

    def connect(self, peer: PeerId, address: str, route: bytes) -> None:
        self.disconnect(peer)
        destination = _peer_at(address)
        self._connections[peer] = Connection(self, destination, route)
        self._network.connects(self, destination)
        self.look_for(destination)

    def disconnect(self, peer: PeerId) -> None:
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._last_word_at = max([self._last_word_at, *(channel.arrives_at for channel in connection.channels)])
        if connection.busy and not connection.stalled:
            self._ending[connection] = None  # for what was just handed over, such as a farewell
        else:
            self._unwatch(connection)

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int, header: Header | None = None) -> bool:
        connection = self._connections.get(peer)
        if connection is None or not connection.up:
            return True  # lost, as on a wire that has just been cut
        # The receiver need not decode what this process has just encoded, which saves a tenth of a message's time. It must have its
        # own copy of a meta with members, though.
        known = header if header is not None and type(header.meta) in _IMMUTABLE else None
        if len(frames) == 1 and isinstance(frames[0], bytes):
            copies = frames
        else:
            copies = [frame if isinstance(frame, bytes) else memoryview(bytes(frame)) for frame in frames]
        if self._network.flips(self.peer, connection.destination):
            copies, known = _flip(copies, self._network.chance), None
        connection.channels[lane].put(Message(copies, nbytes or sum(map(len, copies)), known))
        return True

    def post(self, address: str, frames: Frames) -> None:
        try:
            target = self._network.find(_peer_at(address))
        except ValueError:
            return  # a process that gives such an address gets no answer, as with real ones
        if target is None or not self._network.passes(self.host, target.host):
            return
        connection = Connection(self, target.peer, b"")
        connection.up = True
        delay = self._network.way(self.host, target.host)[0].latency
        copies = [bytes(frame) for frame in frames]
        self._loop.call_later(delay, target.arrive, connection, 0, Message(copies, 0), context=target.context)

    async def close(self) -> None:
        loop = self._loop
        leaving = [*self._ending, *(connection for connection in self._connections.values() if connection.busy)]
        channels = [channel for connection in leaving for channel in connection.channels]
        if leaving:
            self._ending.update(dict.fromkeys(leaving))
            self._all_left = loop.create_future()
            await asyncio.wait([self._all_left], timeout=self._farewell_s)
        # The others see this end go after the last message has arrived.
        last = max([self._last_word_at, *(channel.arrives_at for channel in channels)])
        await asyncio.sleep(max(0.0, last - loop.time()))
        self.vanish()

    def sent(self, connection: Connection) -> None:
        """A channel of the connection is empty."""
        if connection in self._ending and not connection.busy:
            del self._ending[connection]
            self._unwatch(connection)
            if self._all_left is not None and not self._ending and not self._all_left.done():
                self._all_left.set_result(None)

    def vanish(self, *, silent: bool = False) -> None:
        """Send and receive nothing from now on."""
        self._receiver = None
        for connection in [*self._connections.values(), *self._ending]:
            self._close(connection)
        self._connections.clear()
        self._ending.clear()
        self._network.leave(self, silent=silent)

    def look_for(self, destination: PeerId) -> None:
        """The destination, and a path to it, may exist now."""
        network = self._network
        target = network.find(destination)
        if target is None:
            return
        for peer, connection in self._to(destination):
            if not connection.up and self._reaches(target):
                way, path = network.way(self.host, target.host)
                connection.up = True
                connection.channels = (
                    Channel(network, connection, 0, way, path),
                    Channel(network, connection, 1, way, path),
                )
                self._loop.call_soon(self._link_up, peer, connection, context=self.context)

    def cut(self, destination: PeerId) -> None:
        """The connection to the destination breaks."""
        for peer, connection in self._to(destination):
            if connection.up:
                self._close(connection)
                self._connections[peer] = Connection(self, destination, connection.route)
                self._loop.call_soon(self._link_down, peer, context=self.context)

    def review(self) -> None:
        """Try again what could not be sent: faults may have begun or ended."""
        for connection in list(self._connections.values()):
            target = self._network.find(connection.destination)
            if not connection.up:
                if target is not None:
                    self.look_for(connection.destination)
                continue
            sound = target is not None and self._reaches(target)
            if sound and connection.stalled:
                connection.stalled = False
                self._unwatch(connection)
                for channel in connection.channels:
                    channel.resume()
            elif not sound and not connection.stalled:
                connection.stalled = True
                for channel in connection.channels:
                    channel.hold()
                patience_s = HEARTBEATS * self._settings.heartbeat_to(connection.destination)
                connection.watch = self._loop.call_later(patience_s, self.cut, connection.destination, context=NO_PROCESS)

    def _to(self, destination: PeerId) -> list[tuple[PeerId, Connection]]:
        """The connections to a destination: nearly always one, under the peer's own name."""
        connection = self._connections.get(destination)
        if connection is not None and connection.destination == destination:
            return [(destination, connection)]
        return [(peer, other) for peer, other in self._connections.items() if other.destination == destination]

    def _reaches(self, target: SimulatedTransport) -> bool:
        network = self._network
        there = network.passes(self.host, target.host) and network.passes(target.host, self.host)
        return there and network.answers(target.peer) and network.answers(self.peer)

    def _close(self, connection: Connection) -> None:
        connection.up = False
        self._unwatch(connection)
        for channel in connection.channels:
            channel.clear()

    def _unwatch(self, connection: Connection) -> None:
        if connection.watch is not None:
            connection.watch.cancel()
            connection.watch = None

    def _link_up(self, peer: PeerId, connection: Connection) -> None:
        if self._receiver is not None and self._connections.get(peer) is connection and connection.up:
            self._receiver.on_link_up(peer)

    def _link_down(self, peer: PeerId) -> None:
        if self._receiver is not None:
            self._receiver.on_link_down(peer)

    def arrive(self, connection: Connection, lane: int, message: Message) -> None:
        """A message has arrived."""
        if connection.up and self._receiver is not None:
            self._receiver.on_message(lane, connection.route, message.frames, message.header)


def _flip(frames: Frames, chance: random.Random) -> Frames:
    """Flip one bit of one frame."""
    full = [number for number, frame in enumerate(frames) if len(frame)]
    if not full:
        return frames
    number = chance.choice(full)
    content = bytearray(frames[number])
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << (bit % 8)
    return [*frames[:number], bytes(content), *frames[number + 1 :]]


def _peer_at(address: str) -> PeerId:
    if not address.startswith(_SCHEME) or len(address) == len(_SCHEME):
        raise ValueError(f"{address!r} is not an address of a simulated network, which has the form '{_SCHEME}PEER'")
    return address[len(_SCHEME) :]
