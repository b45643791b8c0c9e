"""Waiting: several coroutines as one, and no longer than a limit. On virtual time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from zmqtrain.errors import PeerTimeoutError
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.waiting import first_error, in_time, settle, task_group, to_the_end, together


def test_together_waits_for_all() -> None:
    ended: list[float] = []

    async def one(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(seconds)

    async def main() -> float:
        await together()
        await together(one(3.0))
        await together(one(2.0), one(1.0))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 5.0
    assert ended == [3.0, 1.0, 2.0]


def test_the_first_error_ends_the_others_and_comes_without_a_group() -> None:
    ended: list[str] = []

    async def lasting() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cancelled")

    async def bad() -> None:
        await asyncio.sleep(1)
        raise ZeroDivisionError

    async def grouped() -> None:
        async with task_group() as tasks:
            tasks.create_task(lasting())
            tasks.create_task(bad())

    async def main() -> float:
        for wait in (lambda: together(lasting(), bad()), grouped):
            with pytest.raises(ZeroDivisionError):
                await wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 2.0
    assert ended == ["cancelled"] * 2


def test_the_first_error_of_groups_in_groups() -> None:
    error = KeyError("x")
    assert first_error(ExceptionGroup("", [ExceptionGroup("", [error, ValueError()]), TypeError()])) is error
    assert first_error(error) is error


async def _late() -> None:
    await asyncio.sleep(100)


async def _own() -> None:
    raise TimeoutError("its own")


async def _inner() -> None:
    async with in_time("b", "its word", 1.0):
        await asyncio.sleep(100)


@pytest.mark.parametrize(
    ("wait", "limit_s", "error", "after_s"),
    [
        (_late, 5.0, PeerTimeoutError("a", "an answer", 5.0, "patience="), 5.0),
        (_own, 5.0, TimeoutError("its own"), 0.0),
        (_inner, 5.0, PeerTimeoutError("b", "its word", 1.0), 1.0),
        (_late, 200.0, None, 100.0),
        (_late, None, None, 100.0),
    ],
)
def test_a_limit(wait: Callable[[], Awaitable[None]], limit_s: float | None, error: Exception | None, after_s: float) -> None:
    async def main() -> tuple[BaseException | None, float]:
        raised: BaseException | None = None
        try:
            async with in_time("a", "an answer", limit_s, "patience="):
                await wait()
        except TimeoutError as caught:
            raised = caught
        return raised, asyncio.get_running_loop().time()

    raised, now = run_virtual(main())
    assert (type(raised), str(raised), now) == (type(error), str(error), after_s)


def test_who_is_waited_for_may_be_asked_when_it_is_late() -> None:
    missing = ["a", "b"]

    async def main() -> None:
        async with in_time(lambda: ", ".join(missing), "their parts", 5.0):
            missing.remove("a")
            await asyncio.sleep(100)

    with pytest.raises(PeerTimeoutError, match=r"^b did not answer") as caught:
        run_virtual(main())
    assert caught.value.setting == "[job] timeout"


def test_a_wait_is_ended_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        well, badly = loop.create_future(), loop.create_future()
        settle(well, None)
        settle(well, ZeroDivisionError())
        assert await well is None
        settle(badly, ZeroDivisionError())
        settle(badly, None)
        with pytest.raises(ZeroDivisionError):
            await badly
        unheard = loop.create_future()
        settle(unheard, ZeroDivisionError())  # that nobody waits for it is no error
        messages: list[object] = []
        loop.set_exception_handler(lambda _, context: messages.append(context))
        del unheard
        gc.collect()
        assert not messages

    run_virtual(main())


def test_what_must_not_be_left_halfway_ends_before_its_cancellation_is_raised() -> None:
    ended: list[float] = []

    async def closing() -> str:
        await asyncio.sleep(5.0)
        ended.append(asyncio.get_running_loop().time())
        return "closed"

    async def main() -> str:
        task = asyncio.create_task(to_the_end(closing()))
        for _ in range(3):
            await asyncio.sleep(1.0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [5.0]
        return await to_the_end(closing())

    assert run_virtual(main()) == "closed"
    assert ended == [5.0, 10.0]


def test_the_error_of_what_is_not_left_halfway_is_raised_or_lost_to_a_cancellation() -> None:
    async def failing() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("broken")

    async def main() -> None:
        with pytest.raises(ValueError, match="broken"):
            await to_the_end(failing())
        task = asyncio.create_task(to_the_end(failing()))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()  # no complaint of an error that nobody has seen

    run_virtual(main())
