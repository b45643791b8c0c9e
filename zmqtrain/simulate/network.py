"""The simulated network: endpoints whose messages take the time that the model's NICs, links and racks need.

The whole endpoint above the transport is the real one. A message waits in the queue of its connection's lane, takes its fair share
of every resource on its path (`zmqtrain.simulate.flows`), and then takes the latency. The following is modelled of TCP and ZeroMQ:

- A connection that breaks loses what is on it; both ends see it, and it comes back after ``reconnect``.
- What cannot get through for a while is sent again, and arrives late. After three unanswered heartbeats the connection breaks.
- The connections of a process that dies break at once; a machine that dies is silent, which heartbeats detect.
- A connection needs both directions: if one is cut, both fall silent, although messages in the other still arrive at first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.simulate.connection import NO_PROCESS
from zmqtrain.simulate.flows import FlowTable, Resource
from zmqtrain.simulate.transport import SimulatedTransport
from zmqtrain.topology.links import NetworkModel, Way


class SimulatedNetwork:
    """Connects the endpoints that are made on it, in one virtual loop."""

    def __init__(self, model: NetworkModel, chance: random.Random) -> None:
        """``chance`` decides on jitter, loss and flipped bits."""
        self.model = model
        self.chance = chance
        self.delays: dict[PeerId, float] = {}
        """The factor on the latency of what a peer sends, if it is not 1."""
        self.flows = FlowTable()
        self.loop = asyncio.get_running_loop()
        self._transports: dict[PeerId, SimulatedTransport] = {}
        self._resources: dict[tuple[str, ...], Resource] = {}
        self._ways: dict[tuple[str, str], tuple[Way, tuple[Resource, ...]]] = {}
        self._cut: dict[tuple[str, str], int] = {}  # (from host, to host) -> the number of partitions between them
        self._absent: dict[PeerId, float] = {}  # peers that answer nothing now (paused), and since when
        self._interest: dict[PeerId, dict[SimulatedTransport, None]] = {}  # peer -> all that have connected to it, and are there
        self._sought: dict[SimulatedTransport, set[PeerId]] = {}  # the same by who has connected
        self._corrupt: list[tuple[PeerId, PeerId | None]] = []
        self._balancing = False

    def endpoint(self, peer: PeerId, host: str, settings: NetSettings | None = None) -> Node:
        """A new endpoint on a host. Peers on one network find each other without `Node.add_peer`.

        Make it in the process to which it belongs: messages are delivered there.
        """
        if peer in self._transports:
            raise ValueError(f"this network already has an endpoint {peer}")
        settings = settings or NetSettings()
        return Node(peer, settings, SimulatedTransport(self, peer, host, settings))

    # What may happen to the network.

    def drop_link(self, a: PeerId, b: PeerId) -> None:
        """Break the connections between two peers; they come back after ``reconnect``."""
        self._drop(a, b, self.model.reconnect)

    def partition(self, one: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> Callable[[], None]:
        """Let nothing through from the hosts ``one`` to the hosts ``other``, nor (unless ``one_way``) back, until the returned
        function is called."""
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
        """The peer's process is stopped, and answers no heartbeats."""
        self._absent[peer] = self.loop.time()
        self._review()

    def resume(self, peer: PeerId) -> None:
        """The peer's process continues."""
        if self._absent.pop(peer, None) is not None:
            self._review()

    def kill(self, peer: PeerId, *, silent: bool = False) -> None:
        """The peer's process vanishes: nothing is sent or received any more. ``silent``: its machine vanishes with it, so that
        connections break only after heartbeats fail. Its name can be used again."""
        transport = self._transports.get(peer)
        if transport is not None:
            transport.vanish(silent=silent)
        self._absent.pop(peer, None)

    def corrupt(self, source: PeerId, target: PeerId | None = None) -> None:
        """Flip a bit in the next message from ``source`` to ``target`` (None: to any peer)."""
        self._corrupt.append((source, target))

    # Called by transports.

    def join(self, transport: SimulatedTransport) -> None:
        self._transports[transport.peer] = transport
        for other in list(self._interest.get(transport.peer, ())):
            other.look_for(transport.peer)

    def connects(self, transport: SimulatedTransport, destination: PeerId) -> None:
        """The transport wants to be told about this peer, until it leaves."""
        self._interest.setdefault(destination, {})[transport] = None
        self._sought.setdefault(transport, set()).add(destination)

    def leave(self, transport: SimulatedTransport, *, silent: bool) -> None:
        if self._transports.get(transport.peer) is transport:
            del self._transports[transport.peer]
            for destination in self._sought.pop(transport, ()):
                del self._interest[destination][transport]
            for other in list(self._interest.get(transport.peer, ())):
                if silent:
                    other.review()
                else:
                    other.cut(transport.peer)

    def find(self, peer: PeerId) -> SimulatedTransport | None:
        return self._transports.get(peer)

    def passes(self, source: str, target: str) -> bool:
        """Whether messages get from one host to the other."""
        return (source, target) not in self._cut and not self.way(source, target)[0].down

    def answers(self, peer: PeerId) -> bool:
        """Whether the peer's process exists and is running."""
        return peer in self._transports and peer not in self._absent

    def way(self, source: str, target: str) -> tuple[Way, tuple[Resource, ...]]:
        """The way between two hosts, and the shared resources on it."""
        known = self._ways.get((source, target))
        if known is None:
            way = self.model.between(source, target)
            known = self._ways[source, target] = way, tuple(self._path(source, target, way))
        return known

    def rebalance(self) -> None:
        """Have rates recomputed once everything that happens at this moment has happened."""
        if not self._balancing:
            self._balancing = True
            self.loop.call_soon(self._balance, context=NO_PROCESS)

    def flips(self, source: PeerId, target: PeerId) -> bool:
        """Whether a bit of this message is to be flipped."""
        for planned in self._corrupt:
            if planned[0] == source and planned[1] in (None, target):
                self._corrupt.remove(planned)
                return True
        return False

    def lose(self, a: PeerId, b: PeerId) -> None:
        """A message between them was lost, and with it the connection."""
        self._drop(a, b, self.model.reconnect)

    def _drop(self, a: PeerId, b: PeerId, down_s: float) -> None:
        for here, there in ((a, b), (b, a)):
            transport = self._transports.get(here)
            if transport is not None:
                transport.cut(there)
                self.loop.call_later(down_s, transport.look_for, there, context=NO_PROCESS)

    def _review(self) -> None:
        for transport in list(self._transports.values()):
            transport.review()

    def _balance(self) -> None:
        self._balancing = False
        for flow in self.flows.balance(self.loop.time()):
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
