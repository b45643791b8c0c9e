"""Arithmetic away from the event loop: in the order asked for, to its end, and at once where there is little or no memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.collectives.world import endpoints, group_of
from tests.exchange.gossip.test_exchange import exchanges as gossip_exchanges
from tests.exchange.world import Data, NumpyReplica, train_worker
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.arithmetic import INLINE_BYTES, Arithmetic
from zmqtrain.exchange.averaging.exchange import AveragingExchange, AveragingGroups
from zmqtrain.exchange.averaging.fragments import Fragments
from zmqtrain.exchange.averaging.methods import Elastic, Outer
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.gossip.exchange import GossipSettings
from zmqtrain.exchange.sums import NetworkSums
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

LARGE = TensorPayload.of(torch.ones(INLINE_BYTES // 4))
SMALL = TensorPayload.of(torch.ones(INLINE_BYTES // 4 - 1))


@pytest.fixture
async def arithmetic() -> AsyncIterator[Arithmetic]:
    arithmetic = Arithmetic("arithmetic")
    yield arithmetic
    arithmetic.close()


async def test_the_loop_goes_on_while_a_large_payload_is_worked_on(arithmetic: Arithmetic) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(5)
        return "done"

    task = asyncio.create_task(arithmetic.do(work, LARGE))
    await asyncio.to_thread(begun.wait, 5)
    assert not task.done()
    go_on.set()
    assert await task == "done"


async def test_one_after_another_in_the_order_asked_for(arithmetic: Arithmetic) -> None:
    order: list[int] = []
    await asyncio.gather(*(arithmetic.do(lambda number=number: order.append(number), LARGE) for number in range(20)))
    assert order == list(range(20))


@pytest.mark.parametrize("payloads", [(), (SMALL,), (PhantomPayload(1 << 30, "float32"),)])
async def test_little_is_done_at_once(arithmetic: Arithmetic, payloads: tuple[TensorPayload, ...]) -> None:
    threads: list[int] = []
    await arithmetic.do(lambda: threads.append(threading.get_ident()), *payloads)
    await arithmetic.do(lambda: threads.append(threading.get_ident()), LARGE)
    assert threads[0] == threading.get_ident() != threads[1]


async def test_errors_are_raised_where_it_is_waited_for(arithmetic: Arithmetic) -> None:
    for payload in (SMALL, LARGE):
        with pytest.raises(ZeroDivisionError):
            await arithmetic.do(lambda: 1 / 0, payload)


async def test_a_caller_that_is_cancelled_leaves_nothing_half_done(arithmetic: Arithmetic) -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[bool] = []

    def work() -> None:
        begun.set()
        done.append(go_on.wait(5))

    task = asyncio.create_task(arithmetic.do(work, LARGE))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done(), "the memory is in use"
    go_on.set()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert done == [True]


def test_on_virtual_time_it_is_done_at_once_in_the_only_thread() -> None:
    async def main() -> None:
        arithmetic, threads = Arithmetic("arithmetic"), list[int]()
        start = asyncio.get_running_loop().time()
        await arithmetic.do(lambda: threads.append(threading.get_ident()), LARGE)
        assert threads == [threading.get_ident()]
        assert asyncio.get_running_loop().time() == start

    run_virtual(main())


def averaging(nodes: list[Endpoint], **more: Any) -> list[Exchange]:
    alone = [group_of([node], f"group/{rank}")[0] for rank, node in enumerate(nodes)]
    world, column = group_of(nodes, "workers"), group_of(nodes, "column")
    return [
        AveragingExchange(AveragingGroups(world[rank], alone[rank], column[rank]), Fragments(1), **more)
        for rank in range(len(nodes))
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda nodes: [AllReduceExchange(NetworkSums(group, 1 / 2), by_bucket=True) for group in group_of(nodes, "workers")],
        averaging,
        lambda nodes: averaging(nodes, method=Elastic(2)),
        lambda nodes: averaging(nodes, method=Outer(0.7, 0.9)),
        lambda nodes: averaging(nodes, deltas="fp16"),
        lambda nodes: gossip_exchanges(nodes, 1, GossipSettings(seed=1)),
    ],
    ids=["allreduce", "average", "elastic", "outer", "rounded", "gossip"],
)
async def test_no_exchange_multiplies_whole_buckets_on_the_loop(
    make: Callable[[list[Endpoint]], list[Exchange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where: set[int] = set()
    scale = TensorPayload.scale_

    def watched(payload: TensorPayload, factor: float) -> None:
        if payload.nbytes >= INLINE_BYTES:
            where.add(threading.get_ident())
        scale(payload, factor)

    monkeypatch.setattr(TensorPayload, "scale_", watched)
    sizes = (INLINE_BYTES // 4, 3)  # in float64: half of the first, of which a rank of two rounds the mean, is still large
    data = Data(sum(sizes), 4, 2)
    async with endpoints(2) as nodes:
        await asyncio.gather(
            *(
                train_worker(exchange, NumpyReplica(sizes, rank), data, rank=rank, groups=2, group_size=1, steps=range(2))
                for rank, exchange in enumerate(make(nodes))
            )
        )
    assert where
    assert threading.get_ident() not in where
