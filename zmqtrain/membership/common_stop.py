"""All workers stop before the same step: the coordinator asks how far each is, and tells the furthest step to all.

::

    coordinator                         worker
    "stop.ask"     ->                   answers with the step before which it can stop, and waits there
    "stop.at" 12   ->                   goes on up to step 12 (or, told no step, as if nobody had asked)

Who has answered trains no further than it has said until it is told, and nobody is told before all have answered. So nobody has
gone beyond the step that all are told, and groups that are ahead wait for nothing but those behind, who wait for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zmqtrain.errors import ConnectivityError, PeerLostError, PeerTimeoutError, ProtocolError
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.wire.payload import Value

ASK, TELL = "stop.ask", "stop.at"


class StopPoint:
    """A worker's side. Requests that come before `open` wait for it."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        """``timeout_s``: how long the others may take to say how far they are."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._at = 0
        self._steps: int | None = None
        self._ended = False
        self._decision: asyncio.Future[int | None] | None = None

    def open(self, step: int, steps: int | None) -> None:
        """Training begins with ``step`` and ends by itself after ``steps``, if that is known."""
        self._at, self._steps = step, steps
        self._endpoint.serve(ASK, self._on_ask)
        self._endpoint.serve(TELL, self._on_tell)

    async def here(self, step: int) -> bool:
        """Call this before each step. Returns whether all stop here."""
        if self._decision is not None and await self._decided() == step:
            return True
        self._at = step + 1
        return False

    async def end(self) -> bool:
        """Training would end here, before its last step. Returns whether it does: not where all are to stop later."""
        if self._decision is not None and await self._decided() is not None:
            return False
        self._ended = True
        return True

    async def _decided(self) -> int | None:
        assert self._decision is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(self._decision)
        except TimeoutError as error:
            raise PeerTimeoutError(COORDINATOR, "the step before which all stop", self._timeout_s) from error

    async def _on_ask(self, caller: PeerId) -> Value:
        _require_coordinator(caller)
        if self._decision is None:
            self._decision = asyncio.get_running_loop().create_future()
        return [self._at, self._steps, self._ended]

    async def _on_tell(self, caller: PeerId, step: Value) -> Value:
        _require_coordinator(caller)
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(step if isinstance(step, int) else None)
        return None


async def stop_together(endpoint: Endpoint, workers: Sequence[PeerId], *, timeout_s: float) -> int | None:
    """Let all workers stop before the same step, which is returned; ``None`` where training is about to end by itself.

    Those that are lost meanwhile do not count. Raises `ConnectivityError` where another does not answer, or none is left.
    """
    answers = await asyncio.gather(*(endpoint.request(peer, ASK, timeout=timeout_s) for peer in workers), return_exceptions=True)
    step, reached = 0, False
    failure: BaseException | None = PeerLostError("all workers", "none is left that could stop") if not workers else None
    there = []
    for peer, answer in zip(workers, answers, strict=True):
        if isinstance(answer, BaseException):
            if not isinstance(answer, PeerLostError) or len(workers) == 1:
                failure = answer
            continue
        there.append(peer)
        match answer.meta:
            case [int(at), int() | None as steps, bool(ended)]:
                step = max(step, at)
                reached = reached or ended or (steps is not None and at >= steps)
            case other:
                raise ProtocolError(f"{peer} does not say how far it is, but {other!r:.60}")
    decision = None if failure is not None or reached else step
    told = await asyncio.gather(
        *(endpoint.request(peer, TELL, decision, timeout=timeout_s) for peer in there), return_exceptions=True
    )
    if failure is None:
        failure = next((each for each in told if isinstance(each, BaseException) and not isinstance(each, PeerLostError)), None)
    if failure is not None:
        raise failure if isinstance(failure, ConnectivityError) else ConnectivityError(str(failure)) from failure
    return decision


def _require_coordinator(caller: PeerId) -> None:
    if caller != COORDINATOR:
        raise ProtocolError(f"{caller} may not stop the workers, only the coordinator may")
