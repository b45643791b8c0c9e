"""Workers learn that another worker's loop has ended, before, while and after they wait for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from zmqtrain.embed.other_loops import ALONE_S, OtherLoops
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


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("where", ["steps", "sums", "another call"])
@pytest.mark.parametrize("comes", ["before", "during"])
async def test_a_worker_that_waits_elsewhere_for_this_one_is_an_error(where: str, comes: str) -> None:
    """Two loops that wait for each other in different places would do so until the time-out."""
    async with loops() as (one, other):
        alone = asyncio.create_task(other.call("all_reduce", 3, 4, forever()))
        if comes == "before":
            await asyncio.sleep(2 * ALONE_S)
        here = {
            "steps": lambda: one.wait("steps", 3, forever()),
            "sums": lambda: one.wait("sums", 4, forever()),
            "another call": lambda: one.call("session-barrier", 3, 4, forever()),
        }
        with pytest.raises(TaskError, match=r"worker/1 waits in session.all_reduce\(\) after 3 steps, but this worker waits in"):
            await here[where]()
        alone.cancel()


async def test_a_worker_that_comes_late_to_a_call_is_none() -> None:
    """It has evaluated, or saved its model, while the others waited for it; their messages are old then."""
    async with loops() as (one, other):
        came = asyncio.Event()
        early = asyncio.create_task(other.call("session-barrier", 3, 4, came.wait()))
        await asyncio.sleep(10 * ALONE_S)
        await one.wait("steps", 2, nothing())  # that the other has made before
        await one.call("session-barrier", 3, 4, asyncio.sleep(1.0))
        came.set()
        assert await early
        await one.wait("steps", 3, asyncio.sleep(1.0))


async def test_a_call_whose_result_is_still_on_its_way_is_no_call_elsewhere() -> None:
    """The other worker has it already, and waits in the next one."""
    async with loops() as (one, other):
        await other.call("all_reduce", 3, 4, nothing())
        next_one = asyncio.create_task(other.call("session-barrier", 3, 4, forever()))
        await one.call("all_reduce", 3, 4, asyncio.sleep(10 * ALONE_S))
        next_one.cancel()


async def test_a_call_that_a_loop_which_has_ended_has_not_made_is_an_error() -> None:
    async with loops() as (one, other):
        await other.call("all_reduce", 3, 4, nothing())
        await other.tell(3, 4, PEERS)
        await one.call("all_reduce", 3, 4, asyncio.sleep(1.0))
        with pytest.raises(TaskError, match=r"worker/1 ended its session after 3 steps, but this worker's loop waits in session"):
            await one.call("all_reduce", 3, 4, forever())
