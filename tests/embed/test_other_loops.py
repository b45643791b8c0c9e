"""Workers learn that another worker's loop has ended, before, while and after they wait for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from zmqtrain.embed.other_loops import OtherLoops
from zmqtrain.errors import PeerLostError, TaskError
from zmqtrain.net.memory import MemoryNetwork

pytestmark = pytest.mark.virtual_time

PEERS = ("worker/0", "worker/1")


@asynccontextmanager
async def loops() -> AsyncIterator[tuple[OtherLoops, OtherLoops]]:
    network = MemoryNetwork()
    first, second = (network.endpoint(peer) for peer in PEERS)
    yield OtherLoops(first, ["worker/1"], 20.0), OtherLoops(second, ["worker/0"], 20.0)
    await first.close()
    await second.close()


async def nothing() -> None:
    """A step that has all it needs."""


async def test_a_wait_for_a_loop_that_has_ended_raises_at_once() -> None:
    async with loops() as (one, other):
        await other.tell(3, 0, PEERS)
        await one.wait("steps", 2, nothing())
        with pytest.raises(TaskError, match="worker/1 ended its session after 3 steps"):
            await one.wait("steps", 3, asyncio.Event().wait())


async def test_a_loop_that_ends_during_a_wait_ends_it() -> None:
    async with loops() as (one, other):
        waiting = asyncio.create_task(one.wait("steps", 3, asyncio.Event().wait()))
        await other.tell(3, 0, PEERS)
        with pytest.raises(TaskError, match="after 3 steps"):
            await waiting


@pytest.mark.parametrize(("steps", "late"), [(3, True), (4, False)])
async def test_a_loop_that_ended_before_a_step_that_was_over_comes_late(steps: int, late: bool) -> None:
    """An average of models, for example, is still under way when its step is over."""
    came: list[TaskError] = []
    async with loops() as (one, other):
        one.came_late = came.append
        await one.wait("steps", 3, nothing())
        await other.tell(steps, 0, PEERS)
    assert ["worker/1 ended its session after 3 steps" in str(each) for each in came] == [True] * late


@pytest.mark.parametrize("ends", ["ended", "cancelled"])
async def test_errors_of_what_nobody_waits_for_any_more_are_not_reported(ends: str) -> None:
    """A sum that is abandoned may fail before it is cancelled, or because it is."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    fail = asyncio.Event()

    async def sums() -> None:
        try:
            await fail.wait()
        finally:
            raise PeerLostError("worker/1", "it has ended")

    async with loops() as (one, other):
        waiting = asyncio.create_task(one.wait("steps", 3, sums()))
        await asyncio.sleep(1.0)
        if ends == "ended":
            await other.tell(3, 0, PEERS)
        else:
            fail.set()
            waiting.cancel()
        await asyncio.wait({waiting})
        if not waiting.cancelled():
            waiting.exception()
        del waiting  # its traceback holds the sum
        gc.collect()
        await asyncio.sleep(0)
    assert reported == []
