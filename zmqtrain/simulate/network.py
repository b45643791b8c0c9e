"""The simulated network: endpoints whose messages take the time that cards, links and racks of the model need.

The whole endpoint above the transport is the real one. A message waits in the queue of its connection's lane, takes its fair share
of every resource on its way (`zmqtrain.simulate.flows`), then travels for the latency. What is modelled of TCP and ZeroMQ:

- A connection that breaks loses what is on it; both ends see it, and it comes back after ``reconnect``.
- What cannot get through for a while is repeated, and only late. After three heartbeats without an answer the connection breaks.
- A process that dies breaks its connections at once; a machine that dies is silent, which is found out by heartbeats.
- A connection needs both directions: if one is cut, both fall silent, though what goes the other way still arrives at first.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import deque
from collections.abc import Callable, Iterable

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.transport import Frames, Receiver
from zmqtrain.simulate.flows import Flow, FlowTable, Resource, slip_through
from zmqtrain.topology.links import NetworkModel, Way

#: ZeroMQ gives a connection up after so many heartbeats without an answer (`zmqtrain.net.zeromq` sets it so).
HEARTBEATS = 3
#: Payload of an Ethernet frame: a message within it is one packet, and shares nothing.
PACKET_BYTES = 1500
_SCHEME = "simulated://"


class SimulatedNetwork:
    """Connects the endpoints that are made on it, inside one virtual loop."""

    def __init__(self, model: NetworkModel, chance: random.Random) -> None:
        """``chance`` decides about jitter, loss and which bits flip."""
        self.model = model
        self.chance = chance
        self.flows = FlowTable()
        self._loop = asyncio.get_running_loop()
        self._transports: dict[PeerId, SimulatedTransport] = {}
        self._resources: dict[tuple[str, ...], Resource] = {}
        self._ways: dict[tuple[str, str], tuple[Way, tuple[Resource, ...]]] = {}
        self._cut: dict[tuple[str, str], int] = {}  # (from host, to host) -> how many partitions lie between
        self._absent: dict[PeerId, float] = {}  # peers that answer nothing now (paused): since when
        self._interest: dict[PeerId, dict[SimulatedTransport, None]] = {}  # who has connected to a peer, ever
        self._corrupt: list[tuple[PeerId, PeerId | None]] = []
        self._balancing = False

    def endpoint(self, peer: PeerId, host: str, settings: NetSettings | None = None) -> Node:
        """A new endpoint on a host. Peers on one network find each other without `Node.add_peer`.

        Make it in the process that it belongs to: messages are delivered there.
        """
        if peer in self._transports:
            raise ValueError(f"there is an endpoint {peer} on this network already")
        settings = settings or NetSettings()
        return Node(peer, settings, SimulatedTransport(self, peer, host, settings))

    # What may happen to it

    def drop_link(self, a: PeerId, b: PeerId) -> None:
        """Break the connections between two peers; they come back after ``reconnect``."""
        self._drop(a, b, self.model.reconnect)

    def partition(self, one: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> Callable[[], None]:
        """Nothing gets from the hosts ``one`` to the hosts ``other``, nor (unless ``one_way``) back, until the function that is
        returned is called."""
        one, other = list(one), list(other)
        ways = [(a, b) for a in one for b in other if a != b]
        if not one_way:
            ways += [(b, a) for a, b in ways]
        for way in ways:
            self._cut[way] = self._cut.get(way, 0) + 1
        self._review()

        def heal() -> None:
            for way in ways:
                self._cut[way] -= 1
                if not self._cut[way]:
                    del self._cut[way]
            self._review()

        return heal

    def pause(self, peer: PeerId) -> None:
        """The peer's process stands still, and answers no heartbeats."""
        self._absent[peer] = self._loop.time()
        self._review()

    def resume(self, peer: PeerId) -> None:
        """It goes on."""
        if self._absent.pop(peer, None) is not None:
            self._review()

    def kill(self, peer: PeerId, *, silent: bool = False) -> None:
        """The peer's process vanishes: nothing goes in or out any more. ``silent``: with its machine, so that nobody's connection
        breaks before heartbeats do. Its name is free again."""
        transport = self._transports.get(peer)
        if transport is not None:
            transport.vanish(silent=silent)
        self._absent.pop(peer, None)

    def corrupt(self, source: PeerId, target: PeerId | None = None) -> None:
        """A bit flips in the next message from ``source`` to ``target`` (to anybody)."""
        self._corrupt.append((source, target))

    def set_bandwidth(self, host: str, factor: float) -> None:
        """The host's card carries so many times what the model says."""
        bandwidth = self.model.host(host).bandwidth
        if bandwidth is not None:
            for direction in ("out", "in"):
                self.flows.resize(self._resource(direction, host, bandwidth), bandwidth * factor / 8)
            self.rebalance()

    # For transports

    def join(self, transport: SimulatedTransport) -> None:
        self._transports[transport.peer] = transport
        for other in list(self._interest.get(transport.peer, ())):
            other.look_for(transport.peer)

    def connects(self, transport: SimulatedTransport, destination: PeerId) -> None:
        """The transport wants to hear of this peer."""
        self._interest.setdefault(destination, {})[transport] = None

    def leave(self, transport: SimulatedTransport, *, silent: bool) -> None:
        if self._transports.get(transport.peer) is transport:
            del self._transports[transport.peer]
            for other in list(self._interest.get(transport.peer, ())):
                if silent:
                    other.review()
                else:
                    other.cut(transport.peer)

    def find(self, peer: PeerId) -> SimulatedTransport | None:
        return self._transports.get(peer)

    def passes(self, source: str, target: str) -> bool:
        """Whether anything gets from one host to the other."""
        return (source, target) not in self._cut and not self.way(source, target)[0].down

    def answers(self, peer: PeerId) -> bool:
        """Whether the peer's process is there and running."""
        return peer in self._transports and peer not in self._absent

    def way(self, source: str, target: str) -> tuple[Way, tuple[Resource, ...]]:
        """The way between two hosts, and what is shared on it."""
        known = self._ways.get((source, target))
        if known is None:
            way = self.model.between(source, target)
            known = self._ways[source, target] = way, tuple(self._path(source, target, way))
        return known

    def rebalance(self) -> None:
        """Rates have to be computed anew, once all that happens at this moment has happened."""
        if not self._balancing:
            self._balancing = True
            self._loop.call_soon(self._balance, context=_NOBODY)

    def flips(self, source: PeerId, target: PeerId) -> bool:
        """Whether a bit of this message is to flip."""
        for planned in self._corrupt:
            if planned[0] == source and planned[1] in (None, target):
                self._corrupt.remove(planned)
                return True
        return False

    def lose(self, a: PeerId, b: PeerId) -> None:
        """A message between them was lost, and its connection with it."""
        self._drop(a, b, self.model.reconnect)

    def _drop(self, a: PeerId, b: PeerId, down_s: float) -> None:
        for here, there in ((a, b), (b, a)):
            transport = self._transports.get(here)
            if transport is not None:
                transport.cut(there)
                self._loop.call_later(down_s, transport.look_for, there, context=_NOBODY)

    def _review(self) -> None:
        for transport in list(self._transports.values()):
            transport.review()

    def _balance(self) -> None:
        self._balancing = False
        for flow in self.flows.balance(self._loop.time()):
            if isinstance(flow, Channel):
                flow.reschedule()

    def _path(self, source: str, target: str, way: Way) -> Iterable[Resource]:
        model = self.model
        if source == target:
            if model.local_bandwidth is not None:
                yield self._resource("local", source, model.local_bandwidth)
            return
        one, other = model.host(source), model.host(target)
        if one.bandwidth is not None:
            yield self._resource("out", source, one.bandwidth)
        if way.bandwidth is not None:
            yield self._resource("link", f"{source} to {target}", way.bandwidth)
        if one.rack != other.rack:
            if one.rack is not None:
                yield self._resource("up", one.rack, model.racks[one.rack].uplink)
            if other.rack is not None:
                yield self._resource("down", other.rack, model.racks[other.rack].uplink)
        if other.bandwidth is not None:
            yield self._resource("in", target, other.bandwidth)

    def _resource(self, kind: str, name: str, bits_per_s: float) -> Resource:
        key = (kind, name)
        if key not in self._resources:
            self._resources[key] = Resource(f"{kind} {name}", bits_per_s / 8)
        return self._resources[key]


class Channel(Flow):
    """One lane of a connection: what is queued goes one after the other."""

    __slots__ = ("_active", "_connection", "_lane", "_network", "_timer", "_way", "arrives_at", "queue")

    def __init__(self, network: SimulatedNetwork, connection: Connection, lane: int, way: Way, path: tuple[Resource, ...]) -> None:
        super().__init__(path)
        self._network, self._connection, self._lane, self._way = network, connection, lane, way
        self._active = False
        self._timer: asyncio.TimerHandle | None = None
        self.queue: deque[tuple[list[bytes | memoryview], int]] = deque()
        self.arrives_at = 0.0
        """When the last message that has left arrives."""

    def put(self, frames: list[bytes | memoryview], nbytes: int) -> None:
        """Queue a message."""
        if not self._active and not self._connection.stalled:
            if nbytes <= PACKET_BYTES:
                self._travel(frames, slip_through(self.path, nbytes, self._network._loop.time()))
                return
            self.queue.append((frames, nbytes))
            self._start()
        else:
            self.queue.append((frames, nbytes))

    def hold(self) -> None:
        """Nothing gets through for now; what is half sent will be sent again."""
        self._cancel()
        if self._active:
            self._active = False
            self._network.flows.stop(self)
            self._network.rebalance()

    def resume(self) -> None:
        """Go on after `hold`."""
        if self.queue:
            self._start()

    def clear(self) -> None:
        """The connection is gone, and what was to go over it."""
        self.queue.clear()
        self.hold()

    def reschedule(self) -> None:
        """The rate has changed."""
        self._cancel()
        at = self.finishes_at
        if at < math.inf:
            self._timer = self._network._loop.call_at(at, self._through, context=_NOBODY)

    def _start(self) -> None:
        self._active = True
        self._network.flows.start(self, self.queue[0][1], self._network._loop.time())
        self._network.rebalance()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _through(self) -> None:
        """The message in front has left."""
        network, connection = self._network, self._connection
        now = network._loop.time()
        self._timer = None
        frames, _ = self.queue.popleft()
        self._travel(frames, now)
        if not self._active:
            return  # it was lost, and the connection with it
        if self.queue:
            network.flows.follow(self, self.queue[0][1], now)
            self.reschedule()
        else:
            self.hold()
            connection.owner.sent(connection)

    def _travel(self, frames: list[bytes | memoryview], left_at: float) -> None:
        """A message that leaves at ``left_at`` arrives, or is lost."""
        network, connection, way = self._network, self._connection, self._way
        delay = way.latency
        if way.jitter:
            delay += network.chance.expovariate(1 / way.jitter)
        if way.loss and network.chance.random() < way.loss:
            network.lose(connection.source, connection.destination)  # which clears this channel
            return
        self.arrives_at = max(self.arrives_at, left_at + delay)
        target = network.find(connection.destination)
        if target is not None:
            network._loop.call_at(self.arrives_at, target.arrive, connection, self._lane, frames, context=target.context)


class Connection:
    """From one peer to another. Replaced when it breaks, so that what is in flight on the old one is lost."""

    __slots__ = ("channels", "destination", "owner", "route", "source", "stalled", "up", "watch")

    def __init__(self, owner: SimulatedTransport, destination: PeerId, route: bytes) -> None:
        self.owner, self.source, self.destination, self.route = owner, owner.peer, destination, route
        self.up = False
        self.stalled = False
        """It stands, but nothing gets through, or no answers come back."""
        self.watch: asyncio.TimerHandle | None = None
        self.channels: tuple[Channel, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether anything is still to leave."""
        return any(channel.queue for channel in self.channels)


class SimulatedTransport:
    """One peer's place on a `SimulatedNetwork` (`zmqtrain.net.transport.Transport`)."""

    def __init__(self, network: SimulatedNetwork, peer: PeerId, host: str, settings: NetSettings) -> None:
        self.peer, self.host = peer, host
        self.context = contextvars.copy_context()
        """The process that messages are delivered in."""
        self._network = network
        self._patience_s = HEARTBEATS * settings.heartbeat_s
        self._farewell_s = settings.farewell_s
        self._connections: dict[PeerId, Connection] = {}
        self._ending: dict[Connection, None] = {}  # no longer in use, but something is still to leave
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
            self._ending[connection] = None  # what was just handed over, a farewell for instance
        else:
            self._unwatch(connection)

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int) -> bool:
        connection = self._connections.get(peer)
        if connection is None or not connection.up:
            return True  # lost, as on a wire that has just been cut
        copies = [frame if isinstance(frame, bytes) else memoryview(bytes(frame)) for frame in frames]
        if self._network._corrupt and self._network.flips(self.peer, connection.destination):
            copies = _flip(copies, self._network.chance)
        connection.channels[lane].put(copies, nbytes or sum(len(frame) for frame in copies))
        return True

    def post(self, address: str, frames: Frames) -> None:
        target = self._network.find(_peer_at(address))
        if target is None or not self._network.passes(self.host, target.host):
            return
        connection = Connection(self, target.peer, b"")
        connection.up = True
        delay = self._network.way(self.host, target.host)[0].latency
        copies = [bytes(frame) for frame in frames]
        self._loop.call_later(delay, target.arrive, connection, 0, copies, context=target.context)

    async def close(self) -> None:
        loop = self._loop
        leaving = [*self._ending, *(connection for connection in self._connections.values() if connection.busy)]
        channels = [channel for connection in leaving for channel in connection.channels]
        if leaving:
            self._ending.update(dict.fromkeys(leaving))
            self._all_left = loop.create_future()
            await asyncio.wait([self._all_left], timeout=self._farewell_s)
        # The others see this end go when the last message has come.
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
        """Nothing goes in or out any more."""
        self._receiver = None
        for connection in [*self._connections.values(), *self._ending]:
            self._close(connection)
        self._connections.clear()
        self._ending.clear()
        self._network.leave(self, silent=silent)

    def look_for(self, destination: PeerId) -> None:
        """The destination may be there now, and a way to it."""
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
        """What gets through may have changed."""
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
                connection.watch = self._loop.call_later(self._patience_s, self.cut, connection.destination, context=_NOBODY)

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

    def arrive(self, connection: Connection, lane: int, frames: Frames) -> None:
        """A message has come."""
        if connection.up and self._receiver is not None:
            self._receiver.on_message(lane, connection.route, frames)


_NOBODY = contextvars.Context()


def _flip(frames: list[bytes | memoryview], chance: random.Random) -> list[bytes | memoryview]:
    """One bit of one frame is another."""
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
        raise ValueError(f"{address!r} is no address of a simulated network: '{_SCHEME}PEER' is")
    return address[len(_SCHEME) :]
