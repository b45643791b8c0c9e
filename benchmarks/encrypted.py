"""``python -m benchmarks net --encrypted``: what encryption costs, and what strangers who hammer at a run's doors cost it.

Two processes have an endpoint of each kind and take turns with them, so that both meet the same machine.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.case import Case, case_of
from benchmarks.flood import bench_flood
from benchmarks.processes import Place, run_processes, together
from zmqtrain.launcher.namespaces import Namespaces, NoNamespacesError
from zmqtrain.membership.environment import ENCRYPTED_IO_THREADS
from zmqtrain.net.curve import Identity
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

LEFT, RIGHT = "worker/0", "worker/1"
#: Bytes a second, as `Namespaces` counts them: 1 Gbit/s.
LINK = 125e6
TENSOR_BYTES, TENSORS, ROUNDS, TRIPS = 25_000_000, 6, 7, 200
WAIT_S = 120.0
KINDS = ("plain", "encrypted")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the two processes do; the same for both."""

    tensor_bytes: int
    tensors: int
    rounds: int
    trips: int
    both_ways: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one process: for each kind, a list over the rounds."""

    moves: dict[str, list[float]]
    trips: dict[str, list[float]]


def bench_encrypted(
    *,
    tensor_bytes: int = TENSOR_BYTES,
    tensors: int = TENSORS,
    rounds: int = ROUNDS,
    trips: int = TRIPS,
    flood: Callable[[], Iterator[Case]] = bench_flood,
) -> Iterator[Case]:
    """Goodput and round trips, encrypted beside plain: through 1 Gbit/s between two network namespaces, where this machine has them
    (else a line says why not), and over loopback. Medians of ``rounds`` turns. Then what `bench_flood` measures."""
    for both in (False, True):
        plan = Plan(tensor_bytes, tensors, rounds, 0, both)
        try:
            results = asyncio.run(_in_namespaces(plan))
        except NoNamespacesError as error:
            print(f"left out: {error}", file=sys.stderr)
            break
        yield _goodput(f"goodput at 1 Gbit/s, {'both directions' if both else 'one direction'}", plan, results)
    plan = Plan(tensor_bytes, tensors, rounds, trips, False)
    results = run_processes([(LEFT, plan), (RIGHT, plan)], _measure)
    yield _goodput("goodput over loopback", plan, results)
    encrypted, plain = (1e6 * statistics.median(results[0].trips[kind]) for kind in reversed(KINDS))
    yield case_of("net", "request and answer, encrypted", encrypted, "us", "in plain text", plain)
    yield from flood()


async def _in_namespaces(plan: Plan) -> list[Measured]:
    namespaces = Namespaces({"left": LINK, "right": LINK})
    try:
        await namespaces.open()
        places = [
            Place(replace(NetSettings(), host=namespaces.address_of(host)), namespace=namespaces.namespace_of(host))
            for host in ("left", "right")
        ]
        return await asyncio.to_thread(run_processes, [(LEFT, plan), (RIGHT, plan)], _measure, places)
    finally:
        await namespaces.close()


def _goodput(case: str, plan: Plan, results: list[Measured]) -> Case:
    """By the receiver's time; where both receive, by the slower one's in each round."""
    mbit = 8e-6 * plan.tensor_bytes * plan.tensors
    times = {kind: [max(pair) for pair in zip(*(one.moves[kind] for one in results), strict=True)] for kind in KINDS}
    plain, encrypted = (mbit / statistics.median(times[kind]) for kind in KINDS)
    return case_of("net", f"{case}, encrypted", encrypted, "Mbit/s", "in plain text", plain, "value/peer")


async def _measure(node: Node, plan: Plan) -> Measured:
    other = RIGHT if node.peer == LEFT else LEFT
    settings = replace(node.settings, identity=Identity(), io_threads=ENCRYPTED_IO_THREADS)
    async with await open_zeromq(node.peer, settings=settings) as secret:
        await node.send(other, ("address",), ValuePayload(secret.address))
        secret.add_peer(other, str((await node.receive(other, ("address",))).meta))
        nodes = dict(zip(KINDS, (node, secret), strict=True))
        measured = Measured({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS})
        array = np.ones(plan.tensor_bytes // 4, np.float32)
        for turn in range(-1, plan.rounds):  # the first is to warm up
            for kind in KINDS if turn % 2 else reversed(KINDS):
                await together(node, other, f"{kind} {turn}")
                seconds = await _move(nodes[kind], other, plan, turn, array)
                if turn >= 0:
                    measured.moves[kind].append(seconds)
        for one in nodes.values():
            one.serve("trip", _answer)
        await together(node, other, "trips")
        if node.peer == LEFT:
            for _ in range(plan.trips):
                for kind, one in nodes.items():
                    start = time.perf_counter()
                    await one.request(other, "trip", timeout=WAIT_S)
                    measured.trips[kind].append(time.perf_counter() - start)
        await together(node, other, "end")
        return measured


async def _answer(_caller: str) -> None:
    return None


async def _move(node: Node, other: str, plan: Plan, turn: int, array: np.ndarray[Any, Any]) -> float:
    """Move the tensors from left to right, or both ways at once. Returns the seconds until this side has got all that it gets."""
    start = time.perf_counter()

    async def send() -> None:
        payload = TensorPayload.of(array)
        for number in range(plan.tensors):
            sent = await node.send(other, ("tensor", turn, number), payload)
        await sent.wait_released()

    async def receive() -> float:
        into = TensorPayload.of(np.empty_like(array))
        for number in range(plan.tensors):
            await node.receive(other, ("tensor", turn, number), into=into)
        return time.perf_counter() - start

    work: list[Awaitable[float | None]] = []
    if plan.both_ways or node.peer == LEFT:
        work.append(send())
    if plan.both_ways or node.peer == RIGHT:
        work.append(receive())
    async with asyncio.timeout(WAIT_S):
        return max(seconds or 0.0 for seconds in await asyncio.gather(*work))
