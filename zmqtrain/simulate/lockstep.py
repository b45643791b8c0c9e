"""A thread used like a coroutine: it computes while the event loop stands still, and waits on virtual time.

Torch's forward and backward are ordinary calls that wait at gates in the middle. On a real device they run in a thread beside the
loop. On virtual time exactly one of the two threads runs at any moment, so everything happens in one order: the loop's thread hands
over and waits (in real time; no virtual time passes) until the compute thread has finished, or wants to wait itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from zmqtrain.parallel.turns import handing_over

T = TypeVar("T")
_here = threading.local()


class Abandoned(BaseException):
    """Raised in the compute thread if its device is closed while it runs."""


class LockstepThread:
    """Calls functions one after another (`zmqtrain.data.background.Background`), on virtual time.

    Make it in the process to which it belongs. The functions may use `spend`, and the conditions returned by `condition`.
    """

    def __init__(self, name: str, first: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._job: tuple[Callable[[], Any], asyncio.Future[Any]] | None = None
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wants: Callable[[], None] | None = None  # what the loop should do before the thread continues; None: it has finished
        self._closed = False
        # Whatever the functions schedule belongs to this process.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main, first), name=name, daemon=True)
        self._thread.start()

    # On the loop's thread.

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        outcome: asyncio.Future[T] = self._loop.create_future()
        self._jobs.append((function, outcome))
        if self._job is None and len(self._jobs) == 1:
            self._loop.call_soon(self._next)
        return outcome

    async def close(self, timeout_s: float) -> None:
        """Abandon a running function."""
        if not self._closed:
            self._closed = True
            self._go.release()
            self._thread.join()

    def _next(self) -> None:
        if self._closed or self._job is not None or not self._jobs:
            return
        self._job = self._jobs.popleft()
        if self._job[1].cancelled():
            self._job = None
            self._loop.call_soon(self._next)
            return
        self.resume()

    def resume(self) -> None:
        """Let the thread run until it waits, or its function has returned."""
        if self._closed:
            return
        self._wants = None
        self._go.release()
        self._back.acquire()
        if self._wants is not None:
            self._wants()
            return
        assert self._job is not None
        (_, future), self._job = self._job, None
        result, error = self._outcome
        self._outcome = (None, None)
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._next()

    # In the compute thread.

    def spend(self, seconds: float) -> None:
        """Let this much virtual time pass."""

        def wait() -> None:
            self._loop.call_later(seconds, self.resume)

        if seconds > 0:
            self.hand_over(wait)

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the loop run ``work`` to its end. Returns its result."""
        tasks: list[asyncio.Task[T]] = []

        def wait() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: self.resume())

        self.hand_over(wait)
        return tasks[0].result()

    def condition(self) -> LockstepCondition:
        """A condition at which this thread can wait."""
        return LockstepCondition(self, self._loop)

    def hand_over(self, wants: Callable[[], None]) -> None:
        """Have the loop call ``wants``, which later lets this thread continue (`resume`)."""
        # Another rank's thread runs next, and may want the turn in which this one draws random numbers: it would wait for ever,
        # and the loop with it.
        with handing_over():
            self._wants = wants
            self._back.release()
            self._go.acquire()
        if self._closed:
            raise Abandoned

    def _main(self, first: Callable[[], None] | None) -> None:
        _here.thread = self
        if first is not None:
            first()
        while True:
            self._go.acquire()
            if self._closed:
                return
            assert self._job is not None
            try:
                self._outcome = (self._job[0](), None)
            except Abandoned:
                return
            except BaseException as error:  # noqa: BLE001 - passed to the waiter
                self._outcome = (None, error)
            if self._closed:  # abandoned, although some code turned that into another error
                return
            self._back.release()


def current_lockstep_thread() -> LockstepThread:
    """The lockstep thread that calls this function."""
    thread: LockstepThread = _here.thread
    return thread


class LockstepCondition:
    """Implements `zmqtrain.data.background.Condition` for a `LockstepThread`. Nothing else runs, so there is nothing to lock."""

    def __init__(self, thread: LockstepThread, loop: asyncio.AbstractEventLoop) -> None:
        self._thread, self._loop = thread, loop
        self._predicate: Callable[[], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._checking = False

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *exc_info: Any) -> None:
        return None

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Called in the compute thread."""
        if predicate():
            return True
        self._predicate = predicate

        def wait() -> None:
            if timeout is not None:
                self._timer = self._loop.call_later(timeout, self._go_on)

        self._thread.hand_over(wait)
        return predicate()

    def notify_all(self) -> None:
        """Called in either thread."""
        if self._predicate is not None and not self._checking:
            self._checking = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._checking = False
        if self._predicate is not None and self._predicate():
            self._go_on()

    def _go_on(self) -> None:
        self._predicate = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._thread.resume()
