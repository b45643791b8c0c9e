"""Exchanges without servers move phantoms as they move tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.collectives.world import endpoints, group_of
from tests.exchange.counted import CountedEndpoint
from tests.exchange.world import NumpyReplica
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.averaging.exchange import AveragingExchange, AveragingGroups
from zmqtrain.exchange.averaging.fragments import Fragments
from zmqtrain.exchange.base import Bucket, Exchange
from zmqtrain.exchange.sums import NetworkSums
from zmqtrain.net.endpoint import Endpoint, Tag
from zmqtrain.wire.phantom import PhantomPayload

pytestmark = pytest.mark.virtual_time

SIZES = (5, 1, 17, 30_000)


class PhantomReplica(NumpyReplica):
    """A replica that has only sizes."""

    def __init__(self, rank: int) -> None:
        super().__init__(SIZES, rank)
        self._buckets = [
            Bucket(index, PhantomPayload(size, "float64"), PhantomPayload(size, "float64"), 0, (f"w{index}",))
            for index, size in enumerate(SIZES)
        ]


def allreduce(nodes: list[Endpoint], groups: int) -> list[Exchange]:
    return [AllReduceExchange(NetworkSums(group, 1 / groups)) for group in group_of(nodes, "workers")]


def averaging(nodes: list[Endpoint], groups: int) -> list[Exchange]:
    size = len(nodes) // groups
    exchanges: list[Exchange] = []
    for rank, world in enumerate(group_of(nodes, "workers")):
        group, position = divmod(rank, size)
        own = group_of(nodes[group * size : (group + 1) * size], f"group/{group}")[position]
        column = group_of(nodes[position::size], f"column/{position}")[group]
        exchanges.append(AveragingExchange(AveragingGroups(world, own, column), Fragments(2)))
    return exchanges


async def traffic(
    make: Callable[[list[Endpoint], int], list[Exchange]], replica_of: Any, groups: int, size: int
) -> list[dict[tuple[str, Tag], list[int]]]:
    async def worker(exchange: Exchange, replica: NumpyReplica) -> None:
        await exchange.start(replica)
        for step in range(4):
            exchange.begin_step(step)
            for bucket in replica.buckets:
                exchange.bucket_ready(bucket)
            await exchange.end_step()
        await exchange.settle()
        await exchange.stop()

    async with endpoints(groups * size) as nodes:
        counted = [CountedEndpoint(node) for node in nodes]
        exchanges = make(counted, groups)  # type: ignore[arg-type]
        await asyncio.gather(*(worker(exchange, replica_of(rank)) for rank, exchange in enumerate(exchanges)))
        return [endpoint.sizes for endpoint in counted]


@pytest.mark.parametrize("make", [allreduce, averaging])
@pytest.mark.parametrize(("groups", "size"), [(1, 1), (2, 1), (3, 2), (1, 4), (2, 3)])
async def test_phantoms_take_the_bytes_of_tensors(
    make: Callable[[list[Endpoint], int], list[Exchange]], groups: int, size: int
) -> None:
    real = await traffic(make, lambda rank: NumpyReplica(SIZES, rank), groups, size)
    assert await traffic(make, PhantomReplica, groups, size) == real
