"""Exchanges that are given up, because who exchanges has changed."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.under_way import UnderWay
from zmqtrain.wire.phantom import PhantomPayload

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("overlap", [True, False])
async def test_buckets_of_a_step_that_is_given_up_are_free_also_those_to_come(overlap: bool) -> None:
    begun, freed = list[int](), list[int]()

    async def exchange(bucket: Bucket, step: int) -> None:
        begun.append(bucket.index)
        await asyncio.Event().wait()

    def free(bucket: Bucket) -> None:
        freed.append(bucket.index)

    buckets = [Bucket(index, PhantomPayload(1, "float32"), PhantomPayload(1, "float32"), 0, ()) for index in range(3)]
    under_way = UnderWay(exchange, lambda error: None, overlap=overlap)
    under_way.begin(4, 3)
    under_way.add(buckets[0])
    await asyncio.sleep(0)
    given_up = under_way.give_up(free)
    under_way.add(buckets[1])  # at once, also before that has ended
    await given_up
    under_way.add(buckets[2])
    await under_way.all_added()
    await under_way.settle()
    assert begun == ([0] if overlap else [])
    assert sorted(freed) == [0, 1, 2]
    under_way.begin(5, 1)
    under_way.add(buckets[0])
    await asyncio.sleep(0)
    assert begun[-1:] == [0], "the next step is exchanged"
    assert len(freed) == 3
    await under_way.cancel()
