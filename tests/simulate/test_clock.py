"""Virtual time: the clock jumps, everything repeats, and nothing waits for nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from zmqtrain.errors import DeadlockError, TimeLimitError
from zmqtrain.simulate.clock import MOST_CANCELLED, VirtualLoop, run_virtual
from zmqtrain.simulate.process import Process, current_process
from zmqtrain.world import random_bits, wall_s


def test_time_is_virtual_and_exact() -> None:
    async def main() -> list[float]:
        times = [asyncio.get_running_loop().time()]
        await asyncio.sleep(86_400)
        times.append(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.125):
                await asyncio.Event().wait()
        times.append(asyncio.get_running_loop().time())
        return times

    assert run_virtual(main()) == [0.0, 86_400.0, 86_400.125]  # a day: for real, no test's limit would allow it


def test_timers_of_one_moment_run_in_the_order_of_their_making() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, order.append, number)
        await asyncio.sleep(2)
        return order

    assert run_virtual(main()) == list(range(50))


def test_a_cancelled_timer_moves_no_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5, lambda: None).cancel()
        await asyncio.sleep(0.5)
        return loop.time()

    assert run_virtual(main()) == 0.5


def test_a_deadlock_is_found_at_once_and_says_who_waits_where() -> None:
    async def waits_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        process = Process("worker/0")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.processes.append(process)
        process.waits = lambda: ["message ('gradient', 3) of worker/1"]
        process.run(loop.create_task, waits_for_ever())
        await asyncio.sleep(2)
        await asyncio.create_task(waits_for_ever(), name="the other")

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main())
    assert caught.value.now_s == 2
    assert "worker/0 waits for: message ('gradient', 3) of worker/1" in str(caught.value)
    assert "the other: waits_for_ever at test_clock.py" in str(caught.value)


def test_the_limit_of_virtual_time() -> None:
    async def main() -> None:
        for _ in range(10):
            await asyncio.sleep(10)

    with pytest.raises(TimeLimitError, match="not done after 35 virtual seconds"):
        run_virtual(main(), limit_s=35)


def test_what_is_left_is_cancelled_and_cleans_up() -> None:
    cleaned: list[float] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(3)
            cleaned.append(asyncio.get_running_loop().time())

    async def main() -> None:
        keep.append(asyncio.create_task(left()))
        await asyncio.sleep(1)

    keep: list[asyncio.Task[None]] = []
    run_virtual(main(), limit_s=2)
    assert cleaned == [4.0]


def test_randomness_and_the_calendar_are_the_seeds() -> None:
    async def main() -> tuple[int, int, float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(1.5)
        return random_bits(63), random_bits(63), loop.world.random("jitter").random(), wall_s()

    first, again, other = (run_virtual(main(), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[3] == 1.5
    assert first[0] != first[1]
    assert not set(first[:3]) & set(other[:3])


def test_work_for_threads_is_done_at_once() -> None:
    async def main() -> tuple[int, float]:
        result = await asyncio.to_thread(sum, [1, 2, 3])
        with pytest.raises(ZeroDivisionError):
            await asyncio.get_running_loop().run_in_executor(None, lambda: 1 // 0)
        return result, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (6, 0.0)


@pytest.mark.parametrize("debug", [False, True])
def test_async_generators_are_closed(debug: bool) -> None:
    closed: list[str] = []

    async def numbers():  # type: ignore[no-untyped-def]
        try:
            yield 1
            yield 2
        finally:
            closed.append("closed")

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(1)

    run_virtual(main(), debug=debug)
    assert closed == ["closed"]


class TestProcess:
    """Tasks that stop and die together."""

    def test_a_paused_one_does_nothing_and_catches_up(self) -> None:
        async def ticks(times: list[float]) -> None:
            for _ in range(5):
                await asyncio.sleep(1)
                times.append(asyncio.get_running_loop().time())

        async def main() -> tuple[list[float], list[float]]:
            loop = asyncio.get_running_loop()
            paused, other = Process("paused"), Process("other")
            mine: list[float] = []
            its: list[float] = []
            tasks = [paused.run(loop.create_task, ticks(mine)), other.run(loop.create_task, ticks(its))]
            await asyncio.sleep(1.5)
            paused.pause()
            await asyncio.sleep(5)
            paused.resume()
            await asyncio.gather(*tasks)
            return mine, its

        mine, its = run_virtual(main())
        assert mine == [1, 6.5, 7.5, 8.5, 9.5]
        assert its == [1, 2, 3, 4, 5]

    def test_tasks_and_timers_inherit_it(self) -> None:
        seen: list[Process | None] = []

        async def child() -> None:
            seen.append(current_process())
            asyncio.get_running_loop().call_soon(lambda: seen.append(current_process()))

        async def parent() -> None:
            await asyncio.create_task(child())
            await asyncio.sleep(1)

        async def main() -> Process:
            process = Process("worker/0")
            await process.run(asyncio.get_running_loop().create_task, parent())
            assert not process.tasks
            seen.append(current_process())
            return process

        process = run_virtual(main())
        assert seen == [process, process, None]

    def test_a_killed_one_ends_even_if_it_clings(self) -> None:
        async def clings() -> None:
            for _ in range(20):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(100)

        async def main() -> float:
            process = Process("worker/0")
            task = process.run(asyncio.get_running_loop().create_task, clings())
            await asyncio.sleep(1)
            process.pause()
            await process.kill()
            assert task.done()
            return asyncio.get_running_loop().time()

        assert run_virtual(main()) == 1


def test_cancelled_timers_do_not_pile_up_and_the_others_keep_their_order() -> None:
    async def main() -> tuple[int, list[int]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        rang: list[int] = []
        for number in range(10):
            loop.call_later(100.0, rang.append, number)
        for _ in range(5 * MOST_CANCELLED):
            loop.call_later(60.0, rang.append, -1).cancel()
        kept = len(loop._timers)
        await asyncio.sleep(101.0)
        return kept, rang

    kept, rang = run_virtual(main())
    assert kept <= 2 * MOST_CANCELLED
    assert rang == list(range(10))
