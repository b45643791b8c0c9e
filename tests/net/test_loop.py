"""Slow motion: every timer and every clock of a dilated loop, on both loops that we may run on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.net.loop import DilatedSelectorLoop, Dilation, dilation_of, new_event_loop, run
from zmqtrain.world import wall_s

FACTOR = 5.0
#: On the loop's clock.
WAIT_S = 0.004


async def sleep() -> None:
    await asyncio.sleep(WAIT_S)


async def timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            await asyncio.Event().wait()


async def wait_for() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), WAIT_S)


async def wait() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    done, _ = await asyncio.wait([task], timeout=WAIT_S)
    assert not done
    task.cancel()


async def call_at() -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_at(loop.time() + WAIT_S, future.set_result, None)
    await future


LOOPS: dict[str, Callable[[Dilation], asyncio.AbstractEventLoop]] = {"usual": new_event_loop, "asyncio's": DilatedSelectorLoop}


@pytest.mark.parametrize("make", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("way", [sleep, timeout, wait_for, wait, call_at])
def test_every_timer_is_slow(make: Callable[[Dilation], asyncio.AbstractEventLoop], way: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        real, slow, calendar = time.monotonic(), loop.time(), wall_s()
        await way()
        # uvloop's timers count whole milliseconds of real time, and may be one early.
        least = WAIT_S * FACTOR - 0.002
        assert time.monotonic() - real >= least
        assert least / FACTOR <= loop.time() - slow <= (time.monotonic() - real) / FACTOR
        assert wall_s() - calendar <= (time.monotonic() - real) / FACTOR + 0.001
        assert dilation_of(loop) == FACTOR

    with asyncio.Runner(loop_factory=lambda: make(Dilation.beginning_now(FACTOR))) as runner:
        runner.run(main())


def test_processes_of_a_run_have_one_clock_and_calendar() -> None:
    dilation = Dilation.beginning_now(FACTOR)

    async def now() -> tuple[float, float]:
        return asyncio.get_running_loop().time(), wall_s()

    (clock, calendar), (later_clock, later_calendar) = run(now(), dilation=dilation), run(now(), dilation=dilation)
    assert later_clock >= clock
    assert later_calendar - calendar == pytest.approx(later_clock - clock, abs=0.01)


def test_it_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Dilation(FACTOR, 1e9).to_environ().items():
        monkeypatch.setenv(name, value)
    assert Dilation.from_environ() == Dilation(FACTOR, 1e9)

    async def factor() -> float:
        return dilation_of(asyncio.get_running_loop())

    assert run(factor()) == FACTOR
    assert run(factor(), dilation=Dilation()) == 1.0


def test_none_needs_no_environment() -> None:
    assert Dilation().to_environ() == {}
    assert Dilation.from_environ({}) == Dilation()


@pytest.mark.parametrize("text", ["fast", "0.5", "nan", "0", "1e9"])
def test_other_factors_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="ZMQTRAIN_DILATION"):
        Dilation.from_environ({"ZMQTRAIN_DILATION": text})
