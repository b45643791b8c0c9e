"""All-reduce training against one process on the whole batch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.collectives.world import endpoints, group_of
from tests.exchange.world import Array, Data, NumpyReplica, train_alone, train_worker
from tests.pairwise import pairwise
from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.sums import NetworkSums

pytestmark = pytest.mark.virtual_time

SIZES = (5, 1, 17, 300)


async def train(
    groups: int,
    group_size: int,
    data: Data,
    *,
    overlap: bool = True,
    clip_norm: float = 0.0,
    every: int = 1,
    by_bucket: bool = False,
) -> list[list[Array]]:
    async with endpoints(groups * group_size) as nodes:
        world = group_of(nodes, "workers")
        return await asyncio.gather(
            *(
                train_worker(
                    AllReduceExchange(
                        NetworkSums(world[rank], 1 / (groups * every)), every=every, by_bucket=by_bucket, overlap=overlap
                    ),
                    NumpyReplica(SIZES, rank, clip_norm=clip_norm),
                    data,
                    rank=rank,
                    groups=groups,
                    group_size=group_size,
                    steps=range(data.inputs.shape[0]),
                )
                for rank in range(groups * group_size)
            )
        )


@pairwise(
    {
        "groups, group_size": [(1, 1), (1, 2), (2, 1), (3, 2), (2, 4), (1, 7)],
        "clip_norm": [0.0, 1.0],
        "overlap": [True, False],
    }
)
def test_equals_one_process_on_the_whole_batch(groups: int, group_size: int, overlap: bool, clip_norm: float) -> None:
    data = Data(sum(SIZES), 12 * groups * group_size, 5)
    alone = train_alone(SIZES, 0, data, range(5), clip_norm=clip_norm)
    workers = asyncio.run(train(groups, group_size, data, overlap=overlap, clip_norm=clip_norm))
    for history in workers:
        for mine, first, whole in zip(history, workers[0], alone, strict=True):
            assert mine.tobytes() == first.tobytes(), "replicas drift apart"
            np.testing.assert_allclose(mine, whole, rtol=1e-12, atol=1e-12)


@pairwise({"groups, group_size": [(1, 1), (2, 1), (3, 2)], "every": [1, 2, 3], "by_bucket": [True, False]})
def test_updates_by_bucket_and_of_several_steps_equal_one_process(
    groups: int, group_size: int, by_bucket: bool, every: int
) -> None:
    data = Data(sum(SIZES), 12 * groups * group_size, 7)
    alone = train_alone(SIZES, 0, data, range(7), every=every)
    for history in asyncio.run(train(groups, group_size, data, every=every, by_bucket=by_bucket)):
        np.testing.assert_allclose(history, alone, rtol=1e-12, atol=1e-12)


async def test_by_bucket_the_step_ends_before_the_gradients_are_there() -> None:
    async with endpoints(2) as nodes:
        world = group_of(nodes, "workers")
        exchange, other = (AllReduceExchange(NetworkSums(group, 1 / 2), by_bucket=True) for group in world)
        replica, others = NumpyReplica(SIZES, 0), NumpyReplica(SIZES, 1)
        await asyncio.gather(exchange.start(replica), other.start(others))
        exchange.begin_step(0)
        replica.ready.clear()
        for bucket in replica.buckets:
            replica.hand_over(exchange, bucket.index)
        await exchange.end_step()
        assert replica.ready == []
        other.begin_step(0)
        for bucket in others.buckets:
            others.hand_over(other, bucket.index)
        await exchange.settle()
        assert sorted(replica.ready) == [0, 1, 2, 3]
        await asyncio.gather(exchange.stop(), other.stop())


def test_nobody_exchanges_less_often_than_never() -> None:
    with pytest.raises(ValueError, match="every 0 steps"):
        AllReduceExchange.__init__(object.__new__(AllReduceExchange), None, every=0)  # type: ignore[arg-type]


async def test_a_lost_worker_reaches_end_step_and_stop_leaves_nothing_behind() -> None:
    async with endpoints(3) as nodes:
        world = group_of(nodes, "workers", loss_grace_s=0.02)
        exchanges = [AllReduceExchange(NetworkSums(world[rank], 1 / 3)) for rank in range(3)]
        replicas = [NumpyReplica(SIZES, rank) for rank in range(3)]
        await asyncio.gather(*(exchange.start(replica) for exchange, replica in zip(exchanges, replicas, strict=True)))
        for exchange, replica in zip(exchanges[:2], replicas[:2], strict=True):
            exchange.begin_step(0)
            for bucket in replica.buckets:
                exchange.bucket_ready(bucket)
        await asyncio.sleep(0.01)
        for node in nodes[:2]:
            node.forget("worker/2", "killed")
        for exchange in exchanges[:2]:
            with pytest.raises(PeerLostError, match="worker/2"):
                await exchange.end_step()
        await asyncio.gather(*(exchange.stop() for exchange in exchanges))
        assert len(asyncio.all_tasks()) == 1


async def test_stop_in_the_middle_of_a_step_ends_what_is_under_way() -> None:
    async with endpoints(2) as nodes:
        exchange = AllReduceExchange(NetworkSums(group_of(nodes, "workers")[0], 1 / 2))
        exchange._replica = replica = NumpyReplica(SIZES, 0)
        exchange.begin_step(0)
        exchange.bucket_ready(replica.buckets[0])
        await asyncio.sleep(0)
        await exchange.stop()
        assert len(asyncio.all_tasks()) == 1
