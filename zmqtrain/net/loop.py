"""The event loop that our processes run: uvloop where it is installed, with a clock that is exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new loop, not running.

    uvloop's own clock counts whole milliseconds and stands still while a callback runs; traces and step times need more, and the
    compute thread reads the clock, too. `time.monotonic` is the same clock, read anew.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()

    class Loop(uvloop.Loop):
        def time(self) -> float:
            return time.monotonic()

    return Loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
