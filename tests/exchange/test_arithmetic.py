"""Arithmetic away from the event loop: in the order asked for, to its end, and at once where there is little or no memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import torch

from zmqtrain.exchange.arithmetic import INLINE_BYTES, Arithmetic
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
