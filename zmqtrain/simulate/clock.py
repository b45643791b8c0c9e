"""An event loop on virtual time: when nothing is ready, the clock jumps to the next timer.

Nothing here waits for anything real, and everything happens in one order. So a program that takes its time from the loop and its
randomness from seeds repeats exactly. There are no sockets, pipes, signals or threads in this world: a function that would run in a
thread (``run_in_executor``) is called at once, and takes no virtual time.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import logging
import math
import random
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack, cast

from zmqtrain.errors import DeadlockError, TimeLimitError
from zmqtrain.simulate.process import PROCESS, Callback, Process

#: Thousands of simulated processes are many objects, slow to search, with little cyclic garbage: it is rarely collected.
GARBAGE = (100_000, 50, 100)
#: So many cancelled timers may be in the queue, however few others there are.
MOST_CANCELLED = 1000

if TYPE_CHECKING:  # methods that a loop may leave out raise NotImplementedError; the types consider them abstract
    Loop = asyncio.SelectorEventLoop
else:
    Loop = asyncio.AbstractEventLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulatedWorld:
    """Implements `zmqtrain.world.World`: the calendar begins with the simulation, and its seed determines everything random."""

    one_process = True

    def __init__(self, seed: int, clock: Callable[[], float]) -> None:
        self.seed = seed
        self._clock = clock
        self._bits = self.random("identity")

    def wall_s(self) -> float:
        """Virtual seconds since the start of the simulation."""
        return self._clock()

    def random_bits(self, bits: int) -> int:
        return self._bits.getrandbits(bits)

    def random(self, name: str) -> random.Random:
        """A generator for one purpose. Its numbers do not depend on other generators or on their use."""
        return random.Random(f"{self.seed}/{name}")


class _Handle:
    """A callback in the queue (`asyncio.Handle` and `asyncio.TimerHandle`)."""

    __slots__ = ("__weakref__", "_args", "_callback", "_cancelled", "_context", "_loop", "_when", "process")

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        loop: VirtualLoop | None = None,
    ) -> None:
        """``loop``: of a timer, the loop that it tells if it is cancelled."""
        self._when = when
        self._callback: Callable[..., Any] | None = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._loop = loop
        self.process = context.get(PROCESS)

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        if self._loop is not None:
            self._loop.timer_cancelled()
            self._loop = None
        # Cancelled timers stay in the queue for long: free what they would call, and the process in which they would.
        self._callback, self._args, self._context, self.process = None, (), _NO_PROCESS, None

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when

    def get_context(self) -> contextvars.Context:
        return self._context

    def __repr__(self) -> str:
        return f"<{'cancelled ' if self._cancelled else ''}callback {self._callback!r} at {self._when}>"


class VirtualLoop(Loop):
    """A deterministic event loop on virtual time, which begins at 0. Most programs use it through `run_virtual`."""

    def __init__(self, *, seed: int = 0, limit_s: float = math.inf) -> None:
        self.world = SimulatedWorld(seed, self.time)
        self.limit_s = limit_s
        """Waiting for a timer beyond this time raises `TimeLimitError`."""
        self.processes: list[Process] = []
        """The processes that a report of a deadlock should name."""
        self._now = 0.0
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._cancelled = 0  # of these timers
        self._numbers = 0
        self._stopping = False
        self._running = False
        self._closed = False
        self._debug = False
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        self._bodies = 0

    # Time and callbacks.

    def time(self) -> float:
        return self._now

    @property
    def callbacks(self) -> int:
        """How many callbacks have run, as a measure of a simulation's size."""
        return self._bodies

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle(self._now, callback, args, context)
        self._ready.append(handle)
        return cast(asyncio.Handle, handle)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """For a thread that computes while the loop's own thread waits for it; there are no other threads in this world."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle(when, callback, args, context, self)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, handle))
        return cast(asyncio.TimerHandle, handle)

    def timer_cancelled(self) -> None:
        """A timer in the queue will not be needed."""
        self._cancelled += 1
        # Most timers are time-outs that are cancelled long before they are due. Like asyncio's loop, keep no more of them than of
        # others.
        if self._cancelled > MOST_CANCELLED and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def put_back(self, callbacks: Iterable[Callback]) -> None:
        """Run these next, in their order: a process continues."""
        self._ready.extend(cast(Iterable[_Handle], callbacks))

    # Tasks and futures.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None, **kwargs: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context, **kwargs)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop, context=_NO_PROCESS)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Call ``func`` at once, in this thread: virtual time does not pass in threads. Returns a future that is done."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - passed to the waiter
            future.set_exception(error)
        return future

    # Running

    def run_forever(self) -> None:
        if self._running:
            raise RuntimeError("this loop is already running")
        self._running, self._stopping = True, False
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def run_until_complete(self, future: Any) -> Any:
        """Raises the error of ``future``, `DeadlockError`, or `TimeLimitError`."""
        ours = not asyncio.isfuture(future)
        task: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._stop_for, context=_NO_PROCESS)
        try:
            self.run_forever()
        except BaseException:
            if ours and task.done() and not task.cancelled():
                task.exception()  # retrieved, since the loop's own failure is raised instead
            raise
        finally:
            task.remove_done_callback(self._stop_for)
        return task.result()

    def _stop_for(self, _future: asyncio.Future[Any]) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping = True

    def _turn(self) -> None:
        """Run what is ready; if nothing is, advance to the next timer first."""
        ready = self._ready
        if not ready:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            process = handle.process
            if process is not None and process.paused:
                process.held.append(handle)
                continue
            self._bodies += 1
            callback = handle._callback
            if callback is None:
                continue  # it was cancelled
            try:
                handle._context.run(callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - passed to the exception handler, as in every loop
                self.call_exception_handler({"message": f"an error in {handle!r}", "exception": error, "handle": handle})

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._cancelled -= 1
        if not timers:
            raise DeadlockError(self._now, self.waiting())
        when = timers[0][0]
        if when > self.limit_s:
            raise TimeLimitError(self.limit_s, self.waiting())
        self._now = max(self._now, when)
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            if handle._cancelled:
                self._cancelled -= 1
            else:
                handle._loop = None
                self._ready.append(handle)

    def waiting(self) -> dict[str, list[str]]:
        """What each process waits for; under an empty name, where tasks of no process wait."""
        result: dict[str, list[str]] = {}
        for process in self.processes:
            if process.tasks:
                endpoint = process.waits() if process.waits is not None else []
                result[process.name] = endpoint or [place_of(task) for task in process.tasks]
        others = [task for task in asyncio.all_tasks(self) if not any(task in process.tasks for process in self.processes)]
        if others:
            result[""] = sorted(place_of(task) for task in others)
        return result

    # The end.

    def finish(self) -> None:
        """Cancel all remaining tasks, let them clean up for as long as that takes, and close. Virtual time may pass."""
        self.limit_s = math.inf
        try:
            for process in self.processes:
                process.paused = False
                self.put_back(process.held)
                process.held = deque()
            while tasks := sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
                for task in tasks:
                    task.cancel()
                try:
                    self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                except DeadlockError:
                    break
            self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()

    async def shutdown_asyncgens(self) -> None:
        for generator in list(self._generators):
            await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.call_soon(self.create_task, generator.aclose())

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._cancelled = 0

    # What asyncio requires of a loop.

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._exception_handler

    def set_exception_handler(self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None) -> None:
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        logging.getLogger("asyncio").error("%s", context.get("message"), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        handler = self._exception_handler
        if handler is None:
            self.default_exception_handler(context)
        else:
            handler(self, context)


_NO_PROCESS = contextvars.Context()


def place_of(task: asyncio.Task[Any]) -> str:
    """Where a task waits: its name, and its innermost line in our own code."""
    # A task's own stack shows only its outermost coroutine: follow what each one awaits, as far as these are coroutines.
    place: Any = task.get_coro()
    while (awaited := getattr(place, "cr_await", None)) is not None and getattr(awaited, "cr_frame", None) is not None:
        if "/asyncio/" in awaited.cr_code.co_filename:
            break
        place = awaited
    frame = getattr(place, "cr_frame", None)
    if frame is None:
        return f"{task.get_name()}: not started, or in native code"
    return f"{task.get_name()}: {frame.f_code.co_name} at {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int = 0, limit_s: float = math.inf, debug: bool = False) -> T:
    """Run a coroutine to its end on virtual time. The same seed gives the same run.

    Raises the error of ``main``; `DeadlockError` when nothing is ready and nothing is scheduled; `TimeLimitError` when ``limit_s``
    virtual seconds have passed.
    """
    loop = VirtualLoop(seed=seed, limit_s=limit_s)
    loop.set_debug(debug)
    thresholds = gc.get_threshold()
    gc.set_threshold(*GARBAGE)
    try:
        return cast(T, loop.run_until_complete(main))
    finally:
        gc.set_threshold(*thresholds)
        loop.finish()
