"""What each process of `test_zeromq.py` runs. A module of its own, without torch, so that processes start quickly."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import numpy as np

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from zmqtrain.wire.tensor import TensorPayload


def run(rank: int, size: int, numel: int, pipe: Connection) -> None:
    """Tell the address, hear all addresses, run every collective, tell what came out wrong."""
    asyncio.run(_run(rank, size, numel, pipe))


async def _run(rank: int, size: int, numel: int, pipe: Connection) -> None:
    from zmqtrain.net.settings import NetSettings
    from zmqtrain.net.zeromq import open_zeromq

    members = tuple(f"worker/{other}" for other in range(size))
    node = await open_zeromq(members[rank], token="test", settings=NetSettings())
    try:
        pipe.send(node.address)
        for other, address in enumerate(await asyncio.to_thread(pipe.recv)):
            if other != rank:
                node.add_peer(members[other], address)
        group = Group(node, members, rank, "test", timeout_s=30)
        wrong = await _check(group, numel)
        await barrier(group, ("end",))
        pipe.send(wrong)
    finally:
        await node.close()


async def _check(group: Group, numel: int) -> list[str]:
    inputs = [np.random.default_rng(rank).integers(-1000, 1000, numel) for rank in range(group.size)]
    total = np.sum(inputs, axis=0)
    start, stop = bounds(numel, group.size)[group.rank]
    wrong: list[str] = []

    def expect(what: str, got: object, wanted: object) -> None:
        if not np.array_equal(got, wanted):  # type: ignore[arg-type]
            wrong.append(f"{what} at rank {group.rank}")

    for algorithm in ("ring", "halving", "doubling"):
        mine = inputs[group.rank].copy()
        await all_reduce(group, TensorPayload.of(mine), ("sum", algorithm), algorithm=algorithm)  # type: ignore[arg-type]
        expect(f"all_reduce {algorithm}", mine, total)
        mine[:] = -1  # the memory is ours again
    for algorithm in ("ring", "halving"):
        mine = inputs[group.rank].copy()
        await reduce_scatter(group, TensorPayload.of(mine), ("scatter", algorithm), algorithm=algorithm)  # type: ignore[arg-type]
        expect(f"reduce_scatter {algorithm}", mine[start:stop], total[start:stop])
        mine[:] = -1
    for algorithm in ("ring", "bruck"):
        mine = np.zeros_like(total)
        mine[start:stop] = total[start:stop]
        await all_gather(group, TensorPayload.of(mine), ("gather", algorithm), algorithm=algorithm)  # type: ignore[arg-type]
        expect(f"all_gather {algorithm}", mine, total)
        mine[:] = -1
    mine = inputs[group.rank].copy()
    await broadcast(group, TensorPayload.of(mine), ("spread",), root=group.size - 1)
    expect("broadcast", mine, inputs[-1])
    many = [inputs[group.rank] * index for index in range(8)]
    async with asyncio.TaskGroup() as tasks:
        for index in range(8):
            tasks.create_task(all_reduce(group, TensorPayload.of(many[index]), ("many", index), priority=index))
    for index in range(8):
        expect(f"all_reduce {index} of many", many[index], total * index)
    return wrong
