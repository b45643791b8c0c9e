"""Whether the other workers' loops go on: one that has ended is waited for by nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from zmqtrain.errors import ConnectivityError, TaskError
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Value

T = TypeVar("T")
Count = Literal["steps", "sums"]


class OtherLoops:
    """Those that this worker makes its steps together with. All methods on the loop's thread."""

    def __init__(self, endpoint: Endpoint, others: Sequence[PeerId], timeout_s: float) -> None:
        """``others``: all that wait for each other in every step, this worker left out."""
        self._endpoint, self._others, self._timeout_s = endpoint, others, timeout_s
        self.nearest: Sequence[PeerId] = others
        """Those of them that gradients are summed with while backward runs."""
        self._ended: dict[PeerId, dict[Count, int]] = {}
        self._changed = asyncio.Event()
        endpoint.serve("session_ended", self._on_ended)

    async def wait(self, what: Count, number: int, work: Coroutine[Any, Any, T]) -> T:
        """``work``, for which the others must come to a step, or a sum, of that ``number``. Raises `TaskError` once one of them has
        ended its loop before."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                of = self._others if what == "steps" else self.nearest
                over = {peer: counts for peer, counts in self._ended.items() if peer in of and counts[what] <= number}
                if over and not task.done():
                    peer, steps = next((peer, counts["steps"]) for peer, counts in over.items())
                    raise TaskError(
                        f"{peer} ended its session after {steps} steps, and this worker's loop goes on: all workers must make "
                        "equally many steps. session.batches() gives all the same number; with your own data, end at the "
                        "smallest, which session.all_reduce() tells"
                    )
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if task.done():
                    return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def tell(self, steps: int, sums: int) -> None:
        """This worker's loop has ended after so many."""
        await together(*(self._tell(peer, steps, sums) for peer in self._others))

    async def _tell(self, peer: PeerId, steps: int, sums: int) -> None:
        with suppress(ConnectivityError):  # it has left
            await self._endpoint.request(peer, "session_ended", steps, sums, timeout=self._timeout_s)

    async def _on_ended(self, caller: PeerId, steps: Value, sums: Value) -> Value:
        if caller in self._others and isinstance(steps, int) and isinstance(sums, int):
            self._ended[caller] = {"steps": steps, "sums": sums}
            self._changed.set()
        return None
