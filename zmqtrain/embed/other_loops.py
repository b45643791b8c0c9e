"""Tracks whether the other workers' loops are still running, so that no worker waits for a loop that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from zmqtrain.errors import ConnectivityError, TaskError
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import abandoned, together
from zmqtrain.wire.payload import Value

T = TypeVar("T")
Count = Literal["steps", "sums"]


class OtherLoops:
    """The loops of the workers with which this worker makes its steps. All methods on the loop's thread."""

    def __init__(self, endpoint: Endpoint, others: Sequence[PeerId], timeout_s: float) -> None:
        """``others``: all workers that wait for each other in every step, without this one."""
        self._endpoint, self._others, self._timeout_s = endpoint, others, timeout_s
        self.nearest: Sequence[PeerId] = others
        """The workers with which gradients are summed during backward."""
        self.came_late: Callable[[TaskError], object] = lambda _: None
        """Called if a loop turns out to have ended before a step that this worker has waited for: what that step has left under
        way, such as an average of models, will not come."""
        self._ended: dict[PeerId, dict[Count, int]] = {}
        self._reached = -1  # the last step that was waited for
        self._changed = asyncio.Event()
        endpoint.serve("session_ended", self._on_ended)

    async def wait(self, what: Count, number: int, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, for which the others must reach a step, or a sum, of that ``number``. Raises `TaskError` if one of them
        has ended its loop before that."""
        task = asyncio.ensure_future(work)
        if what == "steps":
            self._reached = number
        try:
            while True:
                of = self._others if what == "steps" else self.nearest
                over = {peer: counts for peer, counts in self._ended.items() if peer in of and counts[what] <= number}
                if over and not task.done():
                    peer, steps = next((peer, counts["steps"]) for peer, counts in over.items())
                    raise _unlike(peer, steps)
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if task.done():
                    return task.result()
        finally:
            await abandoned([task])

    async def tell(self, steps: int, sums: int, here: Container[PeerId]) -> None:
        """Tell the others that are ``here`` that this worker's loop has ended after ``steps`` steps and ``sums`` sums."""
        await together(*(self._tell(peer, steps, sums) for peer in self._others if peer in here))

    async def _tell(self, peer: PeerId, steps: int, sums: int) -> None:
        with suppress(ConnectivityError):  # it has left
            await self._endpoint.request(peer, "session_ended", steps, sums, timeout=self._timeout_s)

    async def _on_ended(self, caller: PeerId, steps: Value, sums: Value) -> Value:
        if caller in self._others and isinstance(steps, int) and isinstance(sums, int):
            self._ended[caller] = {"steps": steps, "sums": sums}
            self._changed.set()
            if steps <= self._reached:
                self.came_late(_unlike(caller, steps))
        return None


def _unlike(peer: PeerId, steps: int) -> TaskError:
    return TaskError(
        f"{peer} ended its session after {steps} steps, but this worker's loop continues: all workers must make the same number of "
        f"steps. session.batches() gives all the same number; with your own data, agree on the smallest number with "
        f"session.all_reduce()"
    )
