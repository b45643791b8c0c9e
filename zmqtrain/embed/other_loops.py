"""Tracks where the other workers' loops are, so that no worker waits for a loop that has ended, or that waits elsewhere for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from zmqtrain.errors import ConnectivityError, TaskError
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import abandoned, together
from zmqtrain.wire.payload import Value

T = TypeVar("T")
Count = Literal["steps", "sums"]
#: After so many seconds in a call that all workers make together, a worker tells the others, as it may be the only one there.
ALONE_S = 5.0
_CALLS = {"all_reduce": "session.all_reduce()", "session-barrier": "session.barrier()", "agree": "the next batch of a stream"}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Where another worker waits for all."""

    call: str
    counts: dict[Count, int]
    """The steps and sums of its loop until then."""
    made: dict[str, int]
    """How often it has made each kind of call, this one included."""


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
        self._made_at_end: dict[PeerId, dict[str, int]] = {}  # the calls of the loops that have ended, as `_Waiting.made`
        self._made: Counter[str] = Counter()  # calls that all workers make together, by their kind
        self._waiting: dict[PeerId, _Waiting] = {}  # the last call in which each of the others has waited for long
        self._reached = -1  # the last step that was waited for
        self._changed = asyncio.Event()
        endpoint.serve("session_ended", self._on_ended)
        endpoint.serve("session_waits", self._on_waits)

    @property
    def any(self) -> bool:
        """Whether there are others at all."""
        return bool(self._others)

    async def wait(self, what: Count, number: int, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, for which the others must reach a step, or a sum, of that ``number``. Raises `TaskError` if one of them
        has ended its loop before that, or waits elsewhere for this worker."""
        if what == "steps":
            self._reached = number

        def check() -> None:
            of = self._others if what == "steps" else self.nearest
            for peer, counts in self._ended.items():
                if peer in of and counts[what] <= number:
                    raise _unlike(peer, counts["steps"])
            for peer, waiting in self._left_waiting():
                if peer in of and waiting.counts[what] <= number:
                    raise _elsewhere(peer, waiting, "the next step")

        return await self._watched(work, check)

    async def call(self, what: str, steps: int, sums: int, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``, a call that all workers make together, after ``steps`` steps and ``sums`` sums of this one. Raises
        `TaskError` if another worker waits elsewhere for this one."""
        self._made[what] += 1

        def check() -> None:
            for peer, made in self._made_at_end.items():
                if made.get(what, 0) < self._made[what]:
                    raise _unlike(peer, self._ended[peer]["steps"], f"waits in {_CALLS.get(what, what)}")
            for peer, waiting in self._left_waiting():
                if waiting.made.get(what, 0) < self._made[what]:
                    raise _elsewhere(peer, waiting, _CALLS.get(what, what))

        telling = asyncio.ensure_future(self._tell_waiting(what, steps, sums))
        try:
            return await self._watched(work, check)
        finally:
            await abandoned([telling])

    def _left_waiting(self) -> list[tuple[PeerId, _Waiting]]:
        """The workers that wait in a call which this one has not made."""
        return [(peer, at) for peer, at in self._waiting.items() if self._made[at.call] < at.made.get(at.call, 0)]

    async def _watched(self, work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
        """Await ``work``, or the error of ``check``, which is called whenever something is known of the other loops."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                if not task.done():
                    check()
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
            made: dict[str, Value] = dict(self._made)
            await self._endpoint.request(peer, "session_ended", steps, sums, made, timeout=self._timeout_s)

    async def _tell_waiting(self, what: str, steps: int, sums: int) -> None:
        made: dict[str, Value] = dict(self._made)
        await asyncio.sleep(ALONE_S)

        async def tell(peer: PeerId) -> None:
            with suppress(ConnectivityError):  # it has left
                await self._endpoint.request(peer, "session_waits", what, steps, sums, made, timeout=self._timeout_s)

        await together(*(tell(peer) for peer in self._others))

    async def _on_waits(self, caller: PeerId, what: Value, steps: Value, sums: Value, made: Value) -> Value:
        if caller in self._others and isinstance(what, str) and isinstance(steps, int) and isinstance(sums, int):
            self._waiting[caller] = _Waiting(what, {"steps": steps, "sums": sums}, _counts(made))
            self._changed.set()
        return None

    async def _on_ended(self, caller: PeerId, steps: Value, sums: Value, made: Value) -> Value:
        if caller in self._others and isinstance(steps, int) and isinstance(sums, int):
            self._ended[caller] = {"steps": steps, "sums": sums}
            self._made_at_end[caller] = _counts(made)
            self._changed.set()
            if steps <= self._reached:
                self.came_late(_unlike(caller, steps))
        return None


def _counts(made: Value) -> dict[str, int]:
    return {kind: count for kind, count in (made.items() if isinstance(made, dict) else ()) if isinstance(count, int)}


def _unlike(peer: PeerId, steps: int, here: str = "continues") -> TaskError:
    return TaskError(
        f"{peer} ended its session after {steps} steps, but this worker's loop {here}: all workers must make the same number of "
        "steps, and equally many calls of session.all_reduce() and session.barrier(). session.batches() gives all the same number; "
        "with your own data, agree on the smallest number with session.all_reduce(). A GradScaler leaves out steps whose gradients "
        "overflow, and with gossip and averaging each group leaves out its own: use bfloat16 there, which needs no GradScaler"
    )


def _elsewhere(peer: PeerId, waiting: _Waiting, here: str) -> TaskError:
    return TaskError(
        f"{peer} waits in {_CALLS.get(waiting.call, waiting.call)} after {waiting.counts['steps']} steps, but this worker waits in "
        f"{here} and has not made that call, so both would wait for ever: all workers must make these calls equally often, and "
        "between the same steps. A loop that a worker leaves by its own clock or its own loss, or a call for one rank only, is "
        "unlike the others: agree first, with session.all_reduce(torch.tensor(float(stop)))"
    )
