"""Connects an event loop with a thread of plain code: the compute thread of a worker, or the thread in which a script runs.

The thread starts coroutines on the loop and waits for their results. It waits at a condition of its device, so it works the same
way on virtual time as with real threads. While it waits, a coroutine may have a function computed in it (`Bridge.compute`). So all
of torch's work stays in one thread, with its CUDA stream and its settings::

    thread                                   loop
    begun = bridge.begin(work, "...")  ───>  work runs
    ...                                        │
    begun.wait()                       <───  await bridge.compute(function)      function runs in the thread that waits
                                       ───>  work goes on
                                       <───  what it returns, or raises
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from zmqtrain.data.background import Condition, for_future
from zmqtrain.errors import ConnectivityError, PeerTimeoutError, UsageError
from zmqtrain.waiting import abandoned

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Awaitable(Protocol[T_co]):
    """Something that can be awaited once; a coroutine, for example."""

    def __await__(self) -> Generator[Any, Any, T_co]: ...

    def close(self) -> object:
        """Called when it was not awaited, or has ended."""


class Bridge:
    """Made on the event loop's thread, for one other thread. `begin`, `call` and `Begun.wait` are called in that thread, `abort` in
    any thread, `compute` and `close` on the loop's."""

    def __init__(self, condition: Condition, clock: Callable[[], float], timeout_s: float) -> None:
        """
        Args:
            condition: the condition of the device, at which the thread waits.
            clock: the device's clock, in seconds.
            timeout_s: longer than all time-outs of the coroutines themselves, since it only matters if the loop itself hangs.
        """
        self.loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self.changed, self.clock, self.timeout_s = condition, clock, timeout_s
        self.error: BaseException | None = None
        """The error that was given to `abort`."""
        self.caller = 0
        """The identity of the thread that called `call` last."""
        self._jobs: deque[Callable[[], None]] = deque()  # functions for the thread to call while it waits
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def begin(self, work: Awaitable[T], what: str) -> Begun[T]:
        """Let the loop run ``work``. Call `Begun.wait` next. ``what``: its purpose in words, for errors."""
        begun: Begun[T] = Begun(self, what)
        try:
            self.loop.call_soon_threadsafe(self._start, work, begun)
        except RuntimeError:  # the loop is closed
            work.close()
            if self.error is None:
                raise
        return begun

    def call(self, work: Awaitable[T], what: str) -> T:
        """Run ``work`` and return its result. KeyboardInterrupt, and anything else that ends the wait, cancels it.

        Raises the errors of ``work``, the error given to `abort`, and `UsageError` on the loop's own thread."""
        try:
            self.check_thread(what)
        except UsageError:
            work.close()
            raise
        self.caller = threading.get_ident()
        begun = self.begin(work, what)
        try:
            return begun.wait()
        except BaseException:
            begun.cancel()
            raise

    def check_thread(self, what: str) -> None:
        """Raise `UsageError` on the loop's own thread, which must never wait for itself. ``what``: the call, for the message."""
        if threading.get_ident() == self._loop_thread:
            raise UsageError(f"{what} waits for the network, so it cannot run on the event loop: use `await session.run(function)`")

    async def compute(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the thread, which must be waiting for the caller, and return its result. Once all waits have been
        ended (`abort`) nobody would call it: raises their error."""
        if self.error is not None:
            raise self.error
        outcome: asyncio.Future[T] = self.loop.create_future()

        def settle(setter: Callable[[Any], None], value: object) -> None:
            if not outcome.done():  # otherwise its waiter was cancelled
                setter(value)

        def job() -> None:
            if outcome.cancelled():
                return
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - handed to the coroutine
                self.loop.call_soon_threadsafe(settle, outcome.set_exception, for_future(error))
            except BaseException:  # the thread handles a KeyboardInterrupt itself
                self.loop.call_soon_threadsafe(outcome.cancel)
                raise
            else:
                self.loop.call_soon_threadsafe(settle, outcome.set_result, result)

        with self.changed:
            self._jobs.append(job)
            self.changed.notify_all()
        return await outcome

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``, or the error of the first call."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()

    async def abandon(self) -> None:
        """Cancel all running work, and wait until it has ended."""
        await abandoned(self._tasks)

    async def close(self) -> None:
        """Cancel all running work. Every wait, now and later, raises `ConnectivityError`, or the error given to `abort`."""
        self._closed = True
        self.abort(ConnectivityError("this worker has ended"))
        await self.abandon()

    def _start(self, work: Awaitable[T], begun: Begun[T]) -> None:
        if self._closed:
            work.close()
            return
        begun._task = task = self.loop.create_task(self._run(work, begun), name=begun.what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # matters if it was cancelled before its first step

    async def _run(self, work: Awaitable[T], begun: Begun[T]) -> None:
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(await work)
        except asyncio.CancelledError:
            error = self.error or ConnectivityError(f"{begun.what} was cancelled")
            raise
        except Exception as raised:  # noqa: BLE001 - raised in the thread that waits for it
            error = raised
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self.changed:
                begun._result, begun._error = result, error
                self.changed.notify_all()


class Begun(Generic[T]):
    """Work that has been started by `Bridge.begin`."""

    def __init__(self, bridge: Bridge, what: str) -> None:
        self._bridge, self.what = bridge, what
        self._task: asyncio.Task[None] | None = None
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.waited_s = 0.0
        """Seconds that `wait` has taken."""

    @property
    def ended(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return bool(self._result) or self._error is not None or self._bridge.error is not None

    def wait(self) -> T:
        """Block until the work has ended, and meanwhile call the functions given to `Bridge.compute`. Returns the coroutine's
        result.

        Raises the coroutine's error, the error given to `Bridge.abort`, or `PeerTimeoutError` if the loop hangs."""
        if not self.ended:
            start = self._bridge.clock()
            try:
                self._wait()
            finally:
                self.waited_s += self._bridge.clock() - start
        error = self._error or (None if self._result else self._bridge.error)
        if error is not None:
            raise error
        return self._result[0]

    def cancel(self) -> None:
        """Cancel the coroutine on the loop. May be called in any thread; nothing happens if it has ended."""
        with suppress(RuntimeError):  # the loop is closed
            self._bridge.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _wait(self) -> None:
        bridge = self._bridge
        while True:
            with bridge.changed:
                if not bridge.changed.wait_for(lambda: self.ended or bool(bridge._jobs), bridge.timeout_s):
                    raise PeerTimeoutError("the event loop", self.what, bridge.timeout_s)
                if self.ended:
                    return
                job = bridge._jobs.popleft()
            job()  # which may itself begin work and wait for it
