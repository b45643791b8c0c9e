"""A thread that calls functions one after another, for an event loop that must not block."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Background(Protocol):
    """Calls functions one after another, beside the event loop."""

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``function`` after everything submitted before it. Cancelling the future does not stop a call that has begun."""
        ...

    async def close(self, timeout_s: float) -> None:
        """End after everything submitted so far; wait for that at most ``timeout_s``."""


class Condition(Protocol):
    """A condition (`threading.Condition`) at which a thread waits for a change by another. Used as a context manager."""

    def __enter__(self) -> bool: ...

    def __exit__(self, *exc_info: Any) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` holds, at most ``timeout`` seconds. Returns whether it does."""
        ...

    def notify_all(self) -> None:
        """Wake all waiting threads: something has changed."""


class BackgroundThread:
    """A daemon thread with a queue of functions.

    Not a ThreadPoolExecutor, since the interpreter joins its threads at exit: a step that waits for a lost peer would keep the
    process from ending.
    """

    def __init__(self, name: str, first: Callable[[], None] | None = None) -> None:
        """``first`` is called in the thread before anything else."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        if first is not None:
            self._jobs.put(first)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds references to the last call's tensors
        self._ended.set()

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call ``function`` after everything submitted before it. Cancelling the future does not stop a call that has begun."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def settle(setter: Callable[[Any], None], value: object) -> None:
            if not outcome.done():  # otherwise the waiter was cancelled
                setter(value)

        def report(setter: Callable[[Any], None], value: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, setter, value)

        def job() -> None:
            if outcome.cancelled():
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed to the waiter, whatever it is
                report(outcome.set_exception, for_future(error))
            else:
                report(outcome.set_result, result)

        self._jobs.put(job)
        return outcome

    async def close(self, timeout_s: float) -> None:
        """End after everything submitted so far; wait for that at most ``timeout_s``."""
        self._jobs.put(None)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._ended.is_set() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - the event is set in a thread
            await asyncio.sleep(0.002)


class AtOnce:
    """Calls functions immediately (`Background`): in a simulation their work takes no virtual time."""

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            outcome.set_result(function())
        except Exception as error:  # noqa: BLE001 - handed to the waiter
            outcome.set_exception(for_future(error))
        return outcome

    async def close(self, timeout_s: float) -> None:
        return None


def for_future(error: BaseException) -> BaseException:
    """The error, or one that a future accepts in its place: without it, who awaits the future would wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    other = RuntimeError("StopIteration was raised, perhaps by next() of an iterator that has ended")
    other.__cause__ = error
    return other
