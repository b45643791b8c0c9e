"""A connection of the simulated network: two lanes, each of which sends one message after another."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.transport import Frames
from zmqtrain.simulate.flows import Flow, Resource, slip_through
from zmqtrain.topology.links import Way
from zmqtrain.wire.message import Header

if TYPE_CHECKING:
    from zmqtrain.simulate.network import SimulatedNetwork
    from zmqtrain.simulate.transport import SimulatedTransport

#: Payload of an Ethernet frame, in bytes: a message of at most this size is one packet, and does not share bandwidth.
PACKET_BYTES = 1500
#: The network's own timers belong to no process, so they continue while a process is paused.
NO_PROCESS = contextvars.Context()


class Message(NamedTuple):
    """A message of the simulated network."""

    frames: Frames
    nbytes: int
    header: Header | None = None
    """What the first frame contains, if the receiver need not decode it."""


#: In place of an empty queue: see `zmqtrain.net.lane`. Nothing is ever added to it.
_EMPTY: Final[deque[Message]] = deque(maxlen=0)


class Channel(Flow):
    """One lane of a connection: queued messages are sent one after another."""

    __slots__ = ("_active", "_connection", "_lane", "_network", "_timer", "_way", "arrives_at", "queue")

    def __init__(self, network: SimulatedNetwork, connection: Connection, lane: int, way: Way, path: tuple[Resource, ...]) -> None:
        super().__init__(path)
        self._network, self._connection, self._lane, self._way = network, connection, lane, way
        self._active = False
        self._timer: asyncio.TimerHandle | None = None
        self.queue = _EMPTY
        self.arrives_at = 0.0
        """When the last message that has left arrives."""

    def put(self, message: Message) -> None:
        """Send a message, or queue it behind others that are on their way."""
        free = not self._active and not self._connection.stalled
        if free and message.nbytes <= PACKET_BYTES:
            self._travel(message, slip_through(self.path, message.nbytes, self._network.loop.time()))
            return
        if self.queue is _EMPTY:
            self.queue = deque()
        self.queue.append(message)
        if free:
            self._start()

    def hold(self) -> None:
        """Let nothing through for now; a half-sent message will be sent again."""
        self._cancel()
        if self._active:
            self._active = False
            self._network.flows.stop(self)
            self._network.rebalance()

    def resume(self) -> None:
        """Send what has been queued since `hold`."""
        if self.queue:
            self._start()

    def clear(self) -> None:
        """The connection is gone, and so are its queued messages."""
        self.queue = _EMPTY
        self.hold()

    def reschedule(self) -> None:
        """The rate has changed."""
        self._cancel()
        at = self.finishes_at
        if at < math.inf:
            self._timer = self._network.loop.call_at(at, self._through, context=NO_PROCESS)

    def _start(self) -> None:
        self._active = True
        self._network.flows.start(self, self.queue[0].nbytes, self._network.loop.time())
        self._network.rebalance()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _through(self) -> None:
        """The message in front has left."""
        network, connection = self._network, self._connection
        now = network.loop.time()
        self._timer = None
        self._travel(self.queue.popleft(), now)
        if not self._active:
            return  # it was lost, and the connection with it
        if self.queue:
            network.flows.follow(self, self.queue[0].nbytes, now)
            self.reschedule()
        else:
            self.clear()
            connection.owner.sent(connection)

    def _travel(self, message: Message, left_at: float) -> None:
        """A message that leaves at ``left_at`` arrives, or is lost."""
        network, connection, way = self._network, self._connection, self._way
        delay = way.latency * network.delays.get(connection.source, 1.0)
        if way.jitter:
            delay += network.chance.expovariate(1 / way.jitter)
        if way.loss and network.chance.random() < way.loss:
            network.lose(connection.source, connection.destination)  # which clears this channel
            return
        self.arrives_at = max(self.arrives_at, left_at + delay)
        target = network.find(connection.destination)
        if target is not None:
            network.loop.call_at(self.arrives_at, target.arrive, connection, self._lane, message, context=target.context)


class Connection:
    """A connection from one peer to another. It is replaced when it breaks, and what is in flight on it is lost."""

    __slots__ = ("channels", "destination", "owner", "route", "source", "stalled", "up", "watch")

    def __init__(self, owner: SimulatedTransport, destination: PeerId, route: bytes) -> None:
        self.owner, self.source, self.destination, self.route = owner, owner.peer, destination, route
        self.up = False
        self.stalled = False
        """Whether it exists but nothing gets through, or no answers come back."""
        self.watch: asyncio.TimerHandle | None = None
        self.channels: tuple[Channel, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether anything is still to be sent."""
        return any(channel.queue for channel in self.channels)
