"""What the compute thread begins on the event loop, and waits for later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from zmqtrain.data.background import Condition
from zmqtrain.errors import ConnectivityError, PeerTimeoutError

T = TypeVar("T")


class Crossing:
    """Made on the event loop. `begin` and `Begun.wait` are called in the compute thread, `abort` anywhere, `close` on the loop."""

    def __init__(self, condition: Condition, clock: Callable[[], float], timeout_s: float) -> None:
        """``condition`` and ``clock``: the device's. What is begun has time-outs of its own; ``timeout_s`` is for a loop that is
        gone."""
        self._loop = asyncio.get_running_loop()
        self.changed, self.clock, self.timeout_s = condition, clock, timeout_s
        self.error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, T], what: str) -> Begun[T]:
        """Let the loop do ``work``; ``what`` it is for, in words."""
        begun: Begun[T] = Begun(self, what)
        self._loop.call_soon_threadsafe(self._start, work, begun)
        return begun

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, raises ``error``."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()

    async def close(self) -> None:
        """Give up what is under way."""
        self.abort(ConnectivityError("this worker has ended"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, work: Coroutine[Any, Any, T], begun: Begun[T]) -> None:
        task = self._loop.create_task(self._run(work, begun), name=begun.what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, T], begun: Begun[T]) -> None:
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(await work)
        except Exception as raised:  # noqa: BLE001 - it is raised where it is waited for
            error = raised
        with self.changed:
            begun.result, begun.error = result, error
            self.changed.notify_all()


class Begun(Generic[T]):
    """Something under way."""

    def __init__(self, crossing: Crossing, what: str) -> None:
        self._crossing, self.what = crossing, what
        self.result: list[T] = []
        self.error: BaseException | None = None
        self.waited_s = 0.0
        """Seconds that `wait` has taken."""

    def wait(self) -> T:
        """Block until it is done. Raises what it raised, or what `Crossing.abort` was given."""
        crossing = self._crossing
        if not self._ended():
            start = crossing.clock()
            with crossing.changed:
                ended = crossing.changed.wait_for(self._ended, 2 * crossing.timeout_s)
            self.waited_s = crossing.clock() - start
            if not ended:
                raise PeerTimeoutError("the event loop", self.what, 2 * crossing.timeout_s)
        error = self.error or (None if self.result else crossing.error)
        if error is not None:
            raise error
        return self.result[0]

    def _ended(self) -> bool:
        return bool(self.result) or self.error is not None or self._crossing.error is not None
