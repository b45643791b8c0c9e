"""A common step for all workers: the coordinator asks each how far it is, and tells all of them the furthest step. They stop
before it, or write a checkpoint there and continue.

::

    coordinator                         worker
    "stop.ask" why     ->               answers with the step before which it can stop, and waits there
    "stop.at" 12 why   ->               continues up to step 12 (or, without a step, as if not asked)

A worker that has answered trains no further than its answer until it gets the step, which is sent only after all have answered. So
no worker is beyond the common step, and groups that are ahead wait only for those behind, which do not wait. Both requests may be
made at the same time, each once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Literal

from zmqtrain.errors import ConnectivityError, PeerLostError, ProtocolError
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.membership.journal import Journal
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Value

ASK, TELL = "stop.ask", "stop.at"
#: What all workers must do at the step.
Why = Literal["stop", "keep"]
WHYS: tuple[Why, ...] = ("stop", "keep")
#: What names in the ledger begin with, of common steps that are being agreed on: empty, or the step that was decided.
ASKED = "common step/"


class Here(Enum):
    """The decision of all workers about the next step: to train it, to write a checkpoint first, or to stop."""

    TRAIN = "go on"
    KEEP = "write a checkpoint, and continue"
    STOP = "stop"

    def __bool__(self) -> bool:
        return self is Here.STOP


class StopPoint:
    """A worker's side. Requests that come before `open` wait for it."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        """``timeout_s``: seconds that the others may take to say how far they are."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._at = 0
        self._steps: int | None = None
        self._ended = False
        self._asked: dict[Why, asyncio.Future[None]] = {}  # requests that were answered, but have no step yet
        self._told: dict[Why, int] = {}

    def open(self, step: int, steps: int | None) -> None:
        """Training begins with ``step`` and ends by itself after ``steps``, if that is known."""
        self._at, self._steps = step, steps
        self._endpoint.serve(ASK, self._on_ask)
        self._endpoint.serve(TELL, self._on_tell)

    async def serve(self, method: str, caller: PeerId, *args: Value) -> Value:
        """Answer a request before it opens, as one who does not train yet."""
        return await (self._on_ask if method == ASK else self._on_tell)(caller, *args)

    def go_on_from(self, other: StopPoint) -> None:
        """Take the place of another one, before it opens here: what that one was asked and told holds for this one."""
        self._asked, self._told = other._asked, other._told

    async def here(self, step: int) -> Here:
        """Call this before each step. Returns what all workers do here."""
        await self._decided()
        if self._told.get("stop") == step:
            return Here.STOP
        self._at = step + 1
        if self._told.get("keep") == step:
            del self._told["keep"]
            return Here.KEEP
        return Here.TRAIN

    async def end(self) -> bool:
        """Call this when training would end, after its last step. Returns whether it ends: not if all must stop later."""
        await self._decided()
        if self._told:
            return False
        self._ended = True
        return True

    async def _decided(self) -> None:
        while self._asked:
            async with in_time(COORDINATOR, "the common step for all workers", self._timeout_s):
                await asyncio.shield(next(iter(self._asked.values())))

    async def _on_ask(self, caller: PeerId, why: Value = "stop") -> Value:
        _require_coordinator(caller)
        if _known(why) not in self._asked:
            self._asked[_known(why)] = asyncio.get_running_loop().create_future()
        return [self._at, self._steps, self._ended]

    async def _on_tell(self, caller: PeerId, step: Value, why: Value = "stop") -> Value:
        _require_coordinator(caller)
        asked = self._asked.pop(_known(why), None)
        if asked is not None:
            if isinstance(step, int):
                self._told[_known(why)] = step
            asked.set_result(None)
        return None


def may_not_stop(endpoint: Endpoint, why: str) -> None:
    """Until its `StopPoint` opens this worker cannot stop at any step; a request gets the answer ``why``."""

    async def refuse(caller: PeerId, _what: Value = "stop") -> Value:
        raise ConnectivityError(why)

    endpoint.serve(ASK, refuse)


async def stop_together(
    endpoint: Endpoint, workers: Sequence[PeerId], *, timeout_s: float, why: Why = "stop", journal: Journal | None = None
) -> int | None:
    """Let all workers stop before a common step, or write a checkpoint there. Returns the step; ``None`` if training is about to
    end by itself.

    Workers that are lost meanwhile do not count. Raises `ConnectivityError` if another one does not answer, or if none is left.
    """
    name = f"{ASKED}{why}"
    if journal is not None:
        journal.write({name: []}, durable=True)
    answers = await asyncio.gather(
        *(endpoint.request(peer, ASK, why, timeout=timeout_s) for peer in workers), return_exceptions=True
    )
    step, reached = 0, False
    failure: BaseException | None = PeerLostError("all workers", "no worker is left that could stop") if not workers else None
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
                raise ProtocolError(f"{peer} was asked how far it is, but answered {other!r:.60}")
    decision = None if failure is not None or reached else step
    if journal is not None and decision is not None:
        journal.write({name: [decision]}, durable=True)
    told = await asyncio.gather(
        *(endpoint.request(peer, TELL, decision, why, timeout=timeout_s) for peer in there), return_exceptions=True
    )
    if journal is not None:
        journal.write({name: None}, durable=True)
    if failure is None:
        failure = next((each for each in told if isinstance(each, BaseException) and not isinstance(each, PeerLostError)), None)
    if failure is not None:
        raise failure if isinstance(failure, ConnectivityError) else ConnectivityError(str(failure)) from failure
    return decision


async def tell_again(endpoint: Endpoint, workers: Sequence[PeerId], journal: Journal, *, timeout_s: float) -> None:
    """Tell the workers the common steps that another coordinator has decided on, but perhaps not told all of them; or that there is
    none, where it had only asked. Those that were told ignore it."""
    for why in WHYS:
        asked: Value = journal.ledger.get(f"{ASKED}{why}")
        if not isinstance(asked, list):
            continue
        decision = asked[0] if asked else None
        await asyncio.gather(
            *(endpoint.request(peer, TELL, decision, why, timeout=timeout_s) for peer in workers), return_exceptions=True
        )  # who cannot be told is lost, which is decided elsewhere
        journal.write({f"{ASKED}{why}": None}, durable=True)


def _require_coordinator(caller: PeerId) -> None:
    if caller != COORDINATOR:
        raise ProtocolError(f"{caller} asks to stop the workers, but only the coordinator may do so")


def _known(why: Value) -> Why:
    if why == "stop":
        return "stop"
    if why == "keep":
        return "keep"
    raise ProtocolError(f"the reason {why!r:.40} for a common step is not known")
