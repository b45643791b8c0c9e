"""The networks that every endpoint test runs on, with the same few handles."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zmqtrain.net.address import key_in, split_address, with_key
from zmqtrain.net.curve import Identity
from zmqtrain.net.memory import MemoryNetwork, MemoryTransport
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shaping import LinkShape, Shaping, ShapingPlan
from zmqtrain.net.transport import Frames, Transport
from zmqtrain.net.zeromq import ZeroMQTransport, open_zeromq
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.transport import SimulatedTransport
from zmqtrain.topology.links import NetworkModel, Way
from zmqtrain.wire.message import Header

FAST = NetSettings(
    token="secret",
    greet_s=10.0,
    hello_s=0.02,
    lost_s=0.4,
    probe_s=0.05,
    heartbeat_s=0.1,
    flush_s=2.0,
    farewell_s=0.05,
)


#: Bytes a second in the paced world: slow enough that much is held back, fast enough for tests.
WIRE = 250e6
T = TypeVar("T")


class Recorder:
    """A transport's receiver that only writes down: a peer that speaks by hand."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[int, bytes, list[bytes]]] = asyncio.Queue()
        self.up = asyncio.Event()

    def on_message(self, lane: int, route: bytes, frames: Frames, header: Header | None = None) -> None:
        self.messages.put_nowait((lane, route, [bytes(frame) for frame in frames]))

    def on_link_up(self, peer: str) -> None:
        self.up.set()

    def on_link_down(self, peer: str) -> None:
        self.up.clear()


class World:
    """Endpoints on one network."""

    name = ""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.transports: list[Transport] = []

    async def open(self, peer: str, **changes: Any) -> Node:
        node = await self._open(peer, replace(FAST, **changes))
        self.nodes.append(node)
        return node

    async def pair(self, **changes: Any) -> tuple[Node, Node]:
        a, b = await self.open("a", **changes), await self.open("b", **changes)
        self.introduce(a, b)
        return a, b

    def introduce(self, *nodes: Node) -> None:
        for node in nodes:
            for other in nodes:
                node.add_peer(other.peer, other.address)

    async def stranger(self, peer: str) -> tuple[Transport, Recorder]:
        transport = await self._transport(peer)
        self.transports.append(transport)
        recorder = Recorder()
        transport.start(recorder)
        return transport, recorder

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()
        await asyncio.gather(*(node.close() for node in self.nodes))

    async def kill(self, node: Node) -> None:
        """The node's process ends without a word."""
        self.nodes.remove(node)
        await node._transport.close()
        node._board._shut = True
        await node.close()

    async def _open(self, peer: str, settings: NetSettings) -> Node:
        raise NotImplementedError

    async def _transport(self, peer: str) -> Transport:
        raise NotImplementedError

    async def fragile_pair(self, **changes: Any) -> tuple[Node, Node]:
        """Two nodes whose connections `cut` breaks."""
        raise NotImplementedError

    def cut(self) -> None:
        raise NotImplementedError


class MemoryWorld(World):
    name = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork()

    async def _open(self, peer: str, settings: NetSettings) -> Node:
        return self.network.endpoint(peer, settings)

    async def _transport(self, peer: str) -> Transport:
        return MemoryTransport(self.network, peer)

    async def fragile_pair(self, **changes: Any) -> tuple[Node, Node]:
        return await self.pair(**changes)

    def cut(self) -> None:
        self.network.drop_link("a", "b", down_s=0.002)


class SimulatedWorld(World):
    """The simulated network, here on a real loop: what it models takes real time."""

    name = "simulated"

    def __init__(self) -> None:
        super().__init__()
        self.network = SimulatedNetwork(NetworkModel(bandwidth=10e9, way=Way(50e-6), reconnect=0.002), random.Random(1))

    async def _open(self, peer: str, settings: NetSettings) -> Node:
        return self.network.endpoint(peer, f"host of {peer}", settings)

    async def _transport(self, peer: str) -> Transport:
        return SimulatedTransport(self.network, peer, f"host of {peer}", FAST)

    async def fragile_pair(self, **changes: Any) -> tuple[Node, Node]:
        return await self.pair(**changes)

    def cut(self) -> None:
        self.network.drop_link("a", "b")


class ZeroMQWorld(World):
    name = "zeromq"

    def __init__(self) -> None:
        super().__init__()
        self.proxies: list[Proxy] = []

    async def _open(self, peer: str, settings: NetSettings) -> Node:
        return await open_zeromq(peer, settings=settings)

    async def _transport(self, peer: str) -> Transport:
        return ZeroMQTransport(FAST)

    async def fragile_pair(self, **changes: Any) -> tuple[Node, Node]:
        a, b = await self.open("a", **changes), await self.open("b", **changes)
        for node, other in ((a, b), (b, a)):
            ports = []
            for address in split_address(other.address):
                proxy = Proxy(int(address.rpartition(":")[2]))
                self.proxies.append(proxy)
                ports.append(await proxy.start())
            key = key_in(other.address)
            address = f"tcp://127.0.0.1:{ports[0]},{ports[1]}"
            node.add_peer(other.peer, address if key is None else with_key(address, key))
        return a, b

    def cut(self) -> None:
        for proxy in self.proxies:
            if random.random() < 0.7:
                proxy.cut()

    async def close(self) -> None:
        await super().close()
        for proxy in self.proxies:
            await proxy.close()


class CurveWorld(ZeroMQWorld):
    """ZeroMQ, encrypted: everybody has heard of everybody's key, as after joining."""

    name = "curve"

    async def _open(self, peer: str, settings: NetSettings) -> Node:
        node = await open_zeromq(peer, settings=replace(settings, identity=Identity()))
        self._list(peer, node.address, node.settings.identity)
        return node

    async def _transport(self, peer: str) -> Transport:
        identity = Identity()
        transport = ZeroMQTransport(replace(FAST, identity=identity))
        self._list(peer, transport.address, identity)
        return transport

    def _list(self, peer: str, address: str, identity: Identity | None) -> None:
        assert identity is not None
        for node in self.nodes:
            assert node.settings.identity is not None
            node.settings.identity.admit(peer, address)
            identity.admit(node.peer, node.address)


class _Same(dict[str, T]):
    """One value for every key."""

    def __init__(self, value: Callable[[str], T]) -> None:
        self._value = value

    def get(self, key: str, default: object = None) -> T:  # type: ignore[override]
        return self._value(key)


class PacedWorld(ZeroMQWorld):
    """ZeroMQ, where every peer is on a host of its own, and all share one slow wire."""

    name = "paced"

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = ShapingPlan({}, {}, [WIRE]).write(Path(self.folder.name))
        nics_file = Shaping.load(str(path), "a").nics_file
        way = LinkShape((0,), 0.0003)
        self.shaping = Shaping("", _Same(lambda peer: peer), _Same(lambda _: way), [WIRE], nics_file)

    async def _open(self, peer: str, settings: NetSettings) -> Node:
        return await open_zeromq(peer, settings=replace(settings, shaping=replace(self.shaping, host=peer)))

    async def close(self) -> None:
        await super().close()
        self.folder.cleanup()


class Proxy:
    """Passes bytes on to a port, until it is told to break all its connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        for writer in list(self.writers):
            writer.transport.abort()

    async def close(self) -> None:
        self.server.close()
        self.cut()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection("127.0.0.1", self.port)
            self.writers.add(there)
            await asyncio.gather(self._pass(reader, there), self._pass(back, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    self.writers.discard(end)
                    end.transport.abort()
            self.tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@contextlib.asynccontextmanager
async def opened(kind: type[World]) -> AsyncIterator[World]:
    world = kind()
    try:
        yield world
    finally:
        await world.close()
