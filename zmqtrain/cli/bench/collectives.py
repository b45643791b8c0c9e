"""``zmqtrain bench collectives``: our collectives over ZeroMQ beside gloo's, in the same processes, turn and turn about."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, barrier, broadcast
from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.tensor import TensorPayload

if TYPE_CHECKING:
    import torch

#: One result: bench, case, value, unit, peer, peer_value, ratio (above 1: better than the peer).
Case: TypeAlias = dict[str, str | float | None]

WORLDS = (2, 4)
SIZES = (4_000, 400_000, 4_000_000, 100_000_000)
ROUNDS = 7
#: The processes of one world must all be up, and each call of a peer done, in this time.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one process is to measure."""

    rank: int
    world: int
    rounds: int
    calls: tuple[tuple[str, int], ...]
    """Name and bytes of each call."""
    store: str
    """File by which gloo's processes find each other."""


def bench_collectives(*, worlds: Sequence[int] = WORLDS, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Iterator[Case]:
    """A case for each number of processes and size in bytes. The value is the median over the rounds of the slowest rank's time.

    A round runs ours and gloo's one after the other on the same memory; who goes first changes from round to round.
    """
    calls = (*(("all_reduce", size) for size in sizes), ("broadcast", max(sizes)), ("barrier", 0))
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            times = _run_world(world, rounds, calls, os.path.join(folder, "gloo"))
        for (name, size), ranks in zip(calls, zip(*times, strict=True), strict=True):
            ours, theirs = (
                statistics.median(max(rank[turn][side] for rank in ranks) for turn in range(rounds)) * 1e3 for side in (0, 1)
            )
            yield {
                "bench": "collectives",
                "case": f"{name} {_readable(size)}{world} processes",
                "value": round(ours, 3),
                "unit": "ms",
                "peer": "gloo",
                "peer_value": round(theirs, 3),
                "ratio": round(theirs / ours, 3),
            }


#: Of one rank: for each call, for each round, our seconds and gloo's.
Times: TypeAlias = list[list[tuple[float, float]]]


def _run_world(world: int, rounds: int, calls: tuple[tuple[str, int], ...], store: str) -> list[Times]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    processes = [
        context.Process(target=_process, args=(Work(rank, world, rounds, calls, store), pipes[rank][1]), daemon=True)
        for rank in range(world)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        addresses = [_hear(pipe) for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send(addresses)
        times: list[Times] = [_hear(pipe) for pipe, _ in pipes]
        for process in processes:
            process.join(PATIENCE_S)
        return times
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _hear(pipe: Connection) -> Any:
    """What a process says next. Raises where it ended instead, or says nothing."""
    try:
        if pipe.poll(PATIENCE_S):
            return pipe.recv()
    except EOFError:
        raise ZmqTrainError("a process of the benchmark ended early; its traceback stands above") from None
    raise ZmqTrainError(f"a process of the benchmark said nothing for {PATIENCE_S:g} s")


def _process(work: Work, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # more would take the processors that the other ranks need
    dist.init_process_group("gloo", init_method=f"file://{work.store}", rank=work.rank, world_size=work.world)
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_measure(work, pipe))
    dist.destroy_process_group()


async def _measure(work: Work, pipe: Connection) -> None:
    from zmqtrain.net.zeromq import open_zeromq

    node = await open_zeromq(f"worker/{work.rank}", token="bench", settings=NetSettings())
    pipe.send(node.address)
    addresses: list[str] = await asyncio.to_thread(pipe.recv)
    members = tuple(f"worker/{rank}" for rank in range(work.world))
    for rank, address in enumerate(addresses):
        if rank != work.rank:
            node.add_peer(members[rank], address)
    group = Group(node, members, work.rank, "bench")
    times = [await _measure_call(group, name, size, work.rounds) for name, size in work.calls]
    await barrier(group, ("end",))
    pipe.send(times)
    await node.close()


async def _measure_call(group: Group, name: str, size: int, rounds: int) -> list[tuple[float, float]]:
    import torch

    tensor = torch.zeros(size // 4)
    measured: list[tuple[float, float]] = []
    for turn in range(-1, rounds):  # the first is to warm up
        sides: list[Callable[[], Awaitable[float]]] = [
            lambda turn=turn: _ours(group, name, tensor, turn),  # type: ignore[misc]
            lambda: asyncio.to_thread(_gloo, name, tensor),
        ]
        order = (0, 1) if turn % 2 else (1, 0)
        taken = [0.0, 0.0]
        for side in order:
            tensor.fill_(group.rank + 1)
            await barrier(group, ("begin",))
            taken[side] = await sides[side]()
            total = group.size * (group.size + 1) / 2
            expected = total if name == "all_reduce" else 1.0 if name == "broadcast" else 0.0
            if size and not bool((tensor == expected).all()):
                raise ZmqTrainError(f"{name} of {size} bytes gave wrong values")
        if turn >= 0:
            measured.append((taken[0], taken[1]))
    return measured


async def _ours(group: Group, name: str, tensor: torch.Tensor, turn: int) -> float:
    payload = TensorPayload.of(tensor)
    start = time.perf_counter()  # uvloop's clock counts whole milliseconds
    if name == "all_reduce":
        await all_reduce(group, payload, ("measured", turn))
    elif name == "broadcast":
        await broadcast(group, payload, ("measured", turn))
    else:
        await barrier(group, ("measured", turn))
    return time.perf_counter() - start


def _gloo(name: str, tensor: torch.Tensor) -> float:
    """In a thread of its own, so that our loop goes on answering the others: a rank may be here already, and another not yet."""
    import torch.distributed as dist

    start = time.perf_counter()
    if name == "all_reduce":
        dist.all_reduce(tensor)
    elif name == "broadcast":
        dist.broadcast(tensor, src=0)
    else:
        dist.barrier()
    return time.perf_counter() - start


def _readable(size: int) -> str:
    if not size:
        return ""
    return f"{size / 1e6:g} MB, " if size >= 1_000_000 else f"{size / 1e3:g} KB, "
