"""``python -m benchmarks net``: what an endpoint moves between two processes over loopback TCP, beside bare ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zmq
import zmq.asyncio

from benchmarks.case import Case, case_of
from benchmarks.processes import run_processes, together
from zmqtrain.net.node import Node
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

TENSOR_BYTES = 25_000_000
#: Tensors a round and way of moving them; enough that starting and stopping do not count.
TENSORS = 16
ROUNDS = 9
#: Frames of the harder comparison: bare sockets do better with these than with frames of a whole tensor.
CHUNK_BYTES = 1 << 20
TRIPS = 500
SMALL = 5_000
LEFT, RIGHT = "worker/0", "worker/1"
WAIT_S = 60.0
#: What bare sockets send as a small message: as many bytes as a header of ours.
SMALL_BODY = bytes(60)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the two processes do; the same for both."""

    tensor_bytes: int
    tensors: int
    rounds: int
    trips: int
    small: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What it took to move a round's tensors."""

    seconds: float
    processor_s: float
    """Of all threads of this process, until the other was done as well."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one process, each a list over the rounds."""

    ours: list[Moved]
    bare: list[Moved]
    chunked: list[Moved]
    trips: list[float]
    small: list[float]
    bare_trips: list[float]
    bare_small: list[float]


def bench_net(
    *, tensor_bytes: int = TENSOR_BYTES, tensors: int = TENSORS, rounds: int = ROUNDS, trips: int = TRIPS, small: int = SMALL
) -> Iterator[Case]:
    """Goodput of large tensors (medians; all ways take turns in each round), round trips, and small messages."""
    plan = Plan(tensor_bytes, tensors, rounds, trips, small)
    left, right = run_processes([(LEFT, plan), (RIGHT, plan)], _measure)
    volume = tensor_bytes * tensors / 1e9
    size = f"{tensor_bytes / 1e6:g} MB"
    for name, frames in (("bare", size), ("chunked", "1 MiB")):
        peer = f"bare pyzmq, frames of {frames}"
        ours, bare = (volume / statistics.median(one.seconds for one in getattr(right, way)) for way in ("ours", name))
        yield case_of("net", f"goodput, tensors of {size}", ours, "GB/s", peer, bare, "value/peer")
        used, bare_used = (
            sum(statistics.median(one.processor_s for one in getattr(side, way)) for side in (left, right)) / volume
            for way in ("ours", name)
        )
        yield case_of("net", f"processor time of both sides, tensors of {size}", used, "s/GB", peer, bare_used)
    floor = "zmq.asyncio on the same loop"
    trip, bare_trip = (1e6 * statistics.median(times) for times in (left.trips, left.bare_trips))
    yield case_of("net", "request and answer", trip, "us", floor, bare_trip)
    rate, bare_rate = (small / statistics.median(times) for times in (right.small, right.bare_small))
    yield case_of("net", "small messages one way", rate, "1/s", floor, bare_rate, "value/peer")


async def _measure(node: Node, plan: Plan) -> Measured:
    other = RIGHT if node.peer == LEFT else LEFT
    measured = Measured([], [], [], [], [], [], [])
    moves = await _Moves.meet(node, plan)
    try:
        for turn in range(-1, plan.rounds):  # the first is to warm up
            for name in ("ours", "bare", "chunked") if turn % 2 else ("chunked", "bare", "ours"):
                await together(node, other, f"{name} {turn}")
                before = time.process_time()
                seconds = await getattr(moves, name)(turn)
                await together(node, other, f"{name} {turn} is over")
                if turn >= 0:
                    getattr(measured, name).append(Moved(seconds, time.process_time() - before))
    finally:
        moves.close()
    floor = await _Floor.meet(node)
    try:
        for turn in range(plan.rounds):
            await together(node, other, f"trips {turn}")
            if node.peer == LEFT:
                for _ in range(plan.trips):
                    start = time.perf_counter()
                    await node.request(RIGHT, "together", "trip", timeout=WAIT_S)
                    measured.trips.append(time.perf_counter() - start)
            await together(node, other, f"bare trips {turn}")
            measured.bare_trips.extend(await floor.trips(plan.trips))
            await together(node, other, f"small {turn}")
            measured.small.append(await _small(node, plan.small))
            await together(node, other, f"bare small {turn}")
            measured.bare_small.append(await floor.small(plan.small))
        await together(node, other, "end")
    finally:
        floor.close()
    return measured


async def _small(node: Node, count: int) -> float:
    start = time.perf_counter()
    for number in range(count):
        if node.peer == LEFT:
            await node.send(RIGHT, ("small",), ValuePayload(number))
        else:
            await node.receive(LEFT, ("small",))
    return time.perf_counter() - start


class _Floor:
    """The least that small messages take with ZeroMQ's own asyncio sockets: one frame each, to a ROUTER, as ours."""

    def __init__(self, left: bool, router: zmq.asyncio.Socket, dealer: zmq.asyncio.Socket) -> None:
        self._left, self._router, self._dealer = left, router, dealer

    @classmethod
    async def meet(cls, node: Node) -> _Floor:
        other = RIGHT if node.peer == LEFT else LEFT
        context = zmq.asyncio.Context.instance()
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, f"{0:016x}/{node.peer}".encode())
        await node.send(other, ("floor",), ValuePayload(router.bind_to_random_port("tcp://127.0.0.1")))
        async with asyncio.timeout(WAIT_S):
            port = await node.receive(other, ("floor",))
        dealer.connect(f"tcp://127.0.0.1:{port.meta!r}")
        return cls(node.peer == LEFT, router, dealer)

    def close(self) -> None:
        self._router.close()
        self._dealer.close()

    async def trips(self, count: int) -> list[float]:
        took = []
        async with asyncio.timeout(WAIT_S):
            for _ in range(count):
                start = time.perf_counter()
                if self._left:
                    await self._dealer.send(SMALL_BODY)
                await self._router.recv_multipart()
                if not self._left:
                    await self._dealer.send(SMALL_BODY)
                took.append(time.perf_counter() - start)
        return took

    async def small(self, count: int) -> float:
        start = time.perf_counter()
        async with asyncio.timeout(WAIT_S):
            for _ in range(count):
                if self._left:
                    await self._dealer.send(SMALL_BODY)
                else:
                    await self._router.recv_multipart()
        return time.perf_counter() - start


class _Moves:
    """The ways to move ``plan.tensors`` tensors from left to right. Each returns the seconds until this side is done."""

    def __init__(self, node: Node, plan: Plan, socket: zmq.Socket[bytes]) -> None:
        self._node, self._plan, self._socket = node, plan, socket
        self._sends = node.peer == LEFT
        self._array = np.ones(plan.tensor_bytes // 4, np.float32)
        self._bytes = memoryview(self._array.data).cast("B")

    @classmethod
    async def meet(cls, node: Node, plan: Plan) -> _Moves:
        async def answer(_caller: str, _name: str) -> None:
            return None

        node.serve("together", answer)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        if node.peer == RIGHT:
            socket = context.socket(zmq.PULL)
            socket.setsockopt(zmq.RCVHWM, 8)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            await node.send(LEFT, ("port",), ValuePayload(port))
        else:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 8)
            socket.setsockopt(zmq.LINGER, 0)
            async with asyncio.timeout(WAIT_S):
                port_message = await node.receive(RIGHT, ("port",))
            socket.connect(f"tcp://127.0.0.1:{port_message.meta!r}")
        return cls(node, plan, socket)

    def close(self) -> None:
        self._socket.close()

    async def ours(self, turn: int) -> float:
        payload = TensorPayload.of(self._array)
        start = time.perf_counter()
        for number in range(self._plan.tensors):
            tag = ("tensor", turn, number)
            if self._sends:
                sent = await self._node.send(RIGHT, tag, payload)
            else:
                await self._node.receive(LEFT, tag, into=payload)
        if self._sends:
            await sent.wait_released()
        return time.perf_counter() - start

    async def bare(self, _turn: int) -> float:
        return await asyncio.to_thread(self._move, self._plan.tensor_bytes)

    async def chunked(self, _turn: int) -> float:
        return await asyncio.to_thread(self._move, CHUNK_BYTES)

    def _move(self, size: int) -> float:
        """As fast as two sockets can: nothing is copied but what comes, to where it belongs."""
        start = time.perf_counter()
        for _ in range(self._plan.tensors):
            moved = 0
            while moved < self._plan.tensor_bytes:
                if self._sends:
                    self._socket.send(self._bytes[moved : moved + size], copy=False)
                    moved += size
                else:
                    frame = self._socket.recv(copy=False)
                    self._bytes[moved : moved + len(frame)] = frame.buffer
                    moved += len(frame)
        return time.perf_counter() - start
