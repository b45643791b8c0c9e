"""``python -m benchmarks collectives``: our collectives over ZeroMQ beside gloo's, in the same processes, turn and turn about."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.case import Case, case_of, size_text
from benchmarks.processes import run_processes
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, barrier, broadcast
from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.wire.tensor import TensorPayload

if TYPE_CHECKING:
    import torch


WORLDS = (2, 4)
SIZES = (4_000, 400_000, 4_000_000, 100_000_000)
ROUNDS = 7


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
            what = f"{size_text(size)}, " if size else ""
            yield case_of("collectives", f"{name} {what}{world} processes", ours, "ms", "gloo", theirs, digits=3)


#: Of one rank: for each call, for each round, our seconds and gloo's.
Times: TypeAlias = list[list[tuple[float, float]]]


def _run_world(world: int, rounds: int, calls: tuple[tuple[str, int], ...], store: str) -> list[Times]:
    return run_processes([(f"worker/{rank}", Work(rank, world, rounds, calls, store)) for rank in range(world)], _measure)


async def _measure(node: Endpoint, work: Work) -> Times:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # more would take the processors that the other ranks need
    dist.init_process_group("gloo", init_method=f"file://{work.store}", rank=work.rank, world_size=work.world)
    group = Group(node, tuple(f"worker/{rank}" for rank in range(work.world)), work.rank, "bench")
    times = [await _measure_call(group, name, size, work.rounds) for name, size in work.calls]
    await barrier(group, ("end",))
    dist.destroy_process_group()
    return times


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
