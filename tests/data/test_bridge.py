"""A thread and an event loop: what is begun, waited for, computed meanwhile, given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from zmqtrain.data.background import BackgroundThread
from zmqtrain.data.bridge import Bridge
from zmqtrain.errors import ConnectivityError, PeerLostError, PeerTimeoutError, UsageError
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.lockstep import LockstepThread

T = TypeVar("T")


@asynccontextmanager
async def bridge_and_thread(timeout_s: float = 20.0) -> AsyncIterator[tuple[Bridge, BackgroundThread]]:
    bridge = Bridge(threading.Condition(), asyncio.get_running_loop().time, timeout_s)
    thread = BackgroundThread("plain code")
    try:
        yield bridge, thread
    finally:
        await bridge.close()
        await thread.close(10.0)


async def result(value: T) -> T:
    await asyncio.sleep(0)
    return value


async def failure(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def test_several_may_be_under_way_and_are_waited_for_in_any_order() -> None:
    async with bridge_and_thread() as (bridge, thread):

        def program() -> list[int]:
            begun = [bridge.begin(result(number), f"number {number}") for number in range(5)]
            return [each.wait() for each in reversed(begun)] + [begun[0].wait()]

        assert await thread.submit(program) == [4, 3, 2, 1, 0, 0]


async def test_an_error_is_raised_where_it_is_waited_for() -> None:
    async with bridge_and_thread() as (bridge, thread):
        with pytest.raises(ZeroDivisionError, match="so it goes"):
            await thread.submit(lambda: bridge.call(failure(ZeroDivisionError("so it goes")), "a failure"))
        assert await thread.submit(lambda: bridge.call(result(3), "a number")) == 3, "the bridge stands"


async def test_the_waiting_thread_computes_and_may_wait_meanwhile() -> None:
    """Each number is computed in the thread, by a function that begins and waits for the next smaller one."""
    async with bridge_and_thread() as (bridge, thread):
        threads: set[str] = set()

        async def sum_up_to(number: int) -> int:
            def compute() -> int:
                threads.add(threading.current_thread().name)
                return number + bridge.call(sum_up_to(number - 1), f"the sum up to {number - 1}") if number else 0

            return await bridge.compute(compute)

        assert await thread.submit(lambda: bridge.call(sum_up_to(10), "the sum")) == 55
        assert threads == {"plain code"}


async def test_what_is_computed_may_fail() -> None:
    async with bridge_and_thread() as (bridge, thread):

        async def work() -> str:
            with pytest.raises(ZeroDivisionError):
                await bridge.compute(lambda: 1 // 0)
            return "mended"

        assert await thread.submit(lambda: bridge.call(work(), "a division")) == "mended"


async def test_an_interrupt_of_the_thread_cancels_what_it_waits_for() -> None:
    async with bridge_and_thread() as (bridge, thread):
        cancelled = asyncio.Event()

        def interrupted() -> None:
            raise KeyboardInterrupt

        async def work() -> None:
            try:
                await bridge.compute(interrupted)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        def program() -> str:
            try:
                bridge.call(work(), "something long")
            except KeyboardInterrupt:
                return "interrupted"
            return "not interrupted"

        assert await thread.submit(program) == "interrupted"
        await cancelled.wait()
        assert await thread.submit(lambda: bridge.call(result(3), "a number")) == 3


async def test_what_a_cancelled_coroutine_wanted_is_not_computed() -> None:
    async with bridge_and_thread() as (bridge, thread):
        wanted = asyncio.ensure_future(bridge.compute(lambda: 1 // 0))
        await asyncio.sleep(0)
        wanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wanted
        assert await thread.submit(lambda: bridge.call(result(3), "a number")) == 3


@pytest.mark.parametrize("waits", [False, True])
async def test_abort_ends_waits_now_and_later(waits: bool) -> None:
    async with bridge_and_thread() as (bridge, thread):
        begun = asyncio.Event()

        async def endless() -> None:
            begun.set()
            await asyncio.Event().wait()

        if waits:
            waiting = thread.submit(lambda: bridge.call(endless(), "nothing"))
            await begun.wait()
        bridge.abort(ConnectivityError("broken"))
        bridge.abort(ConnectivityError("the second error"))
        if waits:
            with pytest.raises(ConnectivityError, match="broken"):
                await waiting
        with pytest.raises(ConnectivityError, match="broken"):
            await thread.submit(lambda: bridge.call(endless(), "nothing"))


async def test_after_an_abort_nothing_waits_to_be_computed() -> None:
    """The thread, whose waits have ended, would never come to it."""
    bridge = Bridge(threading.Condition(), asyncio.get_running_loop().time, 20.0)
    bridge.abort(PeerLostError("worker/1", "it is gone"))
    with pytest.raises(PeerLostError, match="it is gone"):
        await bridge.compute(lambda: 1)


async def test_what_has_ended_before_an_abort_is_still_there() -> None:
    async with bridge_and_thread() as (bridge, thread):

        def program() -> int:
            early = bridge.begin(result(3), "a number")
            early.wait()
            bridge.abort(ConnectivityError("broken"))
            return early.wait()

        assert await thread.submit(program) == 3


@pytest.mark.parametrize("at", ["before its first step", "in its midst"])
async def test_close_cancels_what_is_under_way(at: str) -> None:
    bridge, thread = Bridge(threading.Condition(), asyncio.get_running_loop().time, 20.0), BackgroundThread("plain code")
    steps: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned up")

    waiting = bridge.begin(work(), "nothing")
    await (asyncio.sleep(0) if at == "before its first step" else started.wait())
    await bridge.close()
    assert steps == (["cleaned up"] if at == "in its midst" else [])
    for begun in (waiting, bridge.begin(work(), "nothing more")):
        await asyncio.sleep(0)
        with pytest.raises(ConnectivityError, match="this worker has ended"):
            await thread.submit(begun.wait)
    await thread.close(10.0)


class Unused:
    """Work that must be told that nobody awaits it."""

    closed = False

    def __await__(self) -> Generator[Any, Any, None]:
        raise AssertionError("awaited after all")

    def close(self) -> None:
        self.closed = True


async def test_what_is_given_up_before_its_first_step_is_closed() -> None:
    bridge = Bridge(threading.Condition(), asyncio.get_running_loop().time, 20.0)
    unused = [Unused(), Unused()]
    bridge.begin(unused[0], "nothing").cancel()
    await asyncio.sleep(0)
    bridge.begin(unused[1], "nothing more")
    await bridge.close()
    await asyncio.sleep(0)
    assert [each.closed for each in unused] == [True, True]


async def test_a_loop_that_hangs_is_noticed() -> None:
    async with bridge_and_thread(timeout_s=0.01) as (bridge, thread):
        with pytest.raises(PeerTimeoutError, match="the event loop"):
            await thread.submit(lambda: bridge.call(asyncio.Event().wait(), "what never comes"))


async def test_the_loop_does_not_wait_for_itself() -> None:
    async with bridge_and_thread() as (bridge, _):
        with pytest.raises(UsageError, match=r"the sum waits for the network.*await session\.run"):
            bridge.call(result(3), "the sum")


def test_after_the_loop_has_closed_a_wait_says_what_it_ended_by() -> None:
    async def make() -> Bridge:
        bridge = Bridge(threading.Condition(), asyncio.get_running_loop().time, 20.0)
        await bridge.close()
        return bridge

    bridge = asyncio.run(make())
    found: list[BaseException] = []

    def program() -> None:
        try:
            bridge.call(result(3), "a number")
        except ConnectivityError as error:
            found.append(error)

    thread = threading.Thread(target=program)
    thread.start()
    thread.join()
    assert [str(error) for error in found] == ["this worker has ended"]


def on_virtual_time(program: Callable[[Bridge, Callable[[float], None]], T]) -> T:
    async def run() -> T:
        thread = LockstepThread("compute")
        loop = asyncio.get_running_loop()
        bridge = Bridge(thread.condition(), loop.time, 20.0)
        try:
            return await thread.submit(lambda: program(bridge, thread.spend))
        finally:
            await bridge.close()
            await thread.close(1.0)

    return run_virtual(run())


def test_waiting_takes_the_time_that_is_left() -> None:
    """To the very second, on virtual time: 5 s of work, of which the thread computes 2 itself."""

    def program(bridge: Bridge, spend: Callable[[float], None]) -> tuple[float, float]:
        start = bridge.clock()
        begun = bridge.begin(asyncio.sleep(5.0), "work")
        spend(2.0)
        begun.wait()
        return bridge.clock() - start, begun.waited_s

    assert on_virtual_time(program) == (5.0, 3.0)


def test_what_is_computed_meanwhile_takes_virtual_time() -> None:
    def program(bridge: Bridge, spend: Callable[[float], None]) -> tuple[float, float]:
        async def work() -> float:
            await asyncio.sleep(1.0)
            await bridge.compute(lambda: spend(4.0))
            await asyncio.sleep(1.0)
            return bridge.clock()

        return bridge.call(work(), "work"), bridge.clock()

    assert on_virtual_time(program) == (6.0, 6.0)


async def test_a_computed_stop_iteration_is_raised_as_another_error() -> None:
    """A future takes no StopIteration, and its coroutine would wait for ever."""
    async with bridge_and_thread() as (bridge, thread):
        with pytest.raises(RuntimeError, match="StopIteration was raised"):
            await thread.submit(lambda: bridge.call(bridge.compute(lambda: next(iter(()))), "an iterator's next"))
