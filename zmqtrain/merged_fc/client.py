"""A worker's side of the FC server, on the event loop: activations are sent, their gradients come back.

The sent tensors must not change until the answer arrives: within a host the server reads them in place.

If workers may be lost, a step is given up once the worker's team is another one: then no answer comes, nor is one needed. The
server has forgotten the step by then, or has computed it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from zmqtrain.errors import PeerTimeoutError, ProtocolError, ZmqTrainError
from zmqtrain.exchange.checkpoint_part import unpack_manifest
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.server_heads import FcHeads
from zmqtrain.membership.context import RoleContext
from zmqtrain.merged_fc.messages import (
    PRIORITY,
    ActivationsMeta,
    AnswerMeta,
    activations_tag,
    answer_tag,
    evaluate_tag,
    gradient_tag,
    measured_tag,
    model_tag,
)
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.waiting import abandoned, together
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload

T = TypeVar("T")

#: In place of an answer: the step was given up.
GIVEN_UP = AnswerMeta(None, 0.0, 0)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Says for which worker's life a step is trained."""

    life: int | None = None
    """The life of the worker's team, if workers may be lost."""
    torn: tuple[tuple[int, int], ...] = ()
    given_up: asyncio.Future[None] | None = None
    """Done once the team is another one."""


class _GivenUpError(Exception):
    """The step that something is waited for was given up."""


class FcClient:
    """The client of one worker. Waits raise `PeerLostError`, `PeerTimeoutError`, or a `ProtocolError` if the server refuses."""

    def __init__(self, endpoint: Endpoint, server: PeerId | FcHeads, timeouts: Timeouts, members: Members | None = None) -> None:
        """``members``: given if they survive losses."""
        self._heads = server if isinstance(server, FcHeads) else FcHeads(server, None, None)
        self._endpoint, self._timeouts, self._members = endpoint, timeouts, members
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._evaluations = 0
        self._turn = _Turn()
        self._unwanted: set[asyncio.Task[None]] = set()  # receive what may still come of steps that were given up
        endpoint.serve("fc_refused", self._on_refused)
        if members is not None:
            members.on_change(self._on_change)

    @classmethod
    def of(cls, context: RoleContext, members: Members) -> FcClient:
        """The client of a run's worker. Called on the loop's thread."""
        server, topology = context.placement.fc_roles[0].peer, context.topology
        heads = FcHeads(server, topology.servers if topology.fc_copied else None, context.membership)
        return cls(context.endpoint, heads, context.timeouts, members if members.survives else None)

    def begin_step(self, step: int) -> None:
        """The batch of this step is the next one to be sent. Called when the exchange begins the step, at the same moment."""
        members = self._members
        if members is None:
            return
        slot, team = members.slot(step), members.team()
        assert slot is not None, f"step {step} has no batch for this worker"
        life = members.own_incarnation if team is None else team.life
        self._turn = _Turn(life, slot.torn, asyncio.get_running_loop().create_future())

    async def train(
        self,
        step: int,
        micro_batch: int,
        meta: ActivationsMeta,
        tensors: Sequence[Payload],
        into: Sequence[Payload],
        sent: Callable[[], Awaitable[None]] | None = None,
    ) -> AnswerMeta:
        """Send a micro-batch. On return the wanted gradients are in ``into``, if the answer says that there are any.

        ``sent`` is called once everything is queued. Returns the answer, or `GIVEN_UP`."""
        turn = self._turn
        if turn.given_up is not None and turn.given_up.done():
            return GIVEN_UP
        told = [] if sent is None else [sent]

        async def attempt(server: PeerId) -> AnswerMeta:
            await self._send(server, tags, tensors, meta)
            while told:  # once, also if another server must be asked
                await told.pop()()
            return await self._answer(server, turn, step, micro_batch, into)

        tags = [activations_tag(step, micro_batch, place, turn.life) for place in range(len(tensors))]
        meta = replace(meta, torn=turn.torn)
        try:
            return await self._unless_given_up(turn, self._heads.ask(attempt))
        except _GivenUpError:
            answers = [gradient_tag(step, micro_batch, place, turn.life) for place in range(len(into))]
            self._let_come(self._heads.now, answer_tag(step, micro_batch, turn.life), *answers)
            return GIVEN_UP

    async def _answer(self, server: PeerId, turn: _Turn, step: int, micro_batch: int, into: Sequence[Payload]) -> AnswerMeta:
        what = f"the gradients of the activations of step {step}"
        answer = AnswerMeta.from_value((await self._receive(server, answer_tag(step, micro_batch, turn.life), what)).meta)
        if answer.gradients:
            if answer.gradients != len(into):
                raise ProtocolError(f"{server} sent {answer.gradients} gradients for {len(into)} activations")
            tagged = [(gradient_tag(step, micro_batch, place, turn.life), target) for place, target in enumerate(into)]
            await together(*(self._receive(server, tag, what, into=target) for tag, target in tagged))
        return answer

    async def evaluate(self, meta: ActivationsMeta, tensors: Sequence[Payload]) -> list[float]:
        """Have a batch evaluated. Returns the sums of the metrics over it."""
        number, self._evaluations = self._evaluations, self._evaluations + 1
        own = self._own_life

        async def attempt(server: PeerId) -> list[float]:
            await self._send(server, [evaluate_tag(number, place, own) for place in range(len(tensors))], tensors, meta)
            measured = (await self._receive(server, measured_tag(number, own), "an evaluation")).meta
            match measured:
                case list() if all(isinstance(each, int | float) for each in measured):
                    return [float(each) for each in measured]
            raise ProtocolError(f"{server} answered an evaluation with {measured!r:.100}")

        return await self._heads.ask(attempt)

    async def keep(self, step: int, *, save: bool) -> None:
        """Have the server keep the current state of its part of the model for ``step``. ``save``: in a checkpoint, too."""
        await self._heads.ask(lambda server: self._request(server, "fc_keep", step, save))

    async def hold(self, held: bool) -> None:
        """``held``: the server trains no group while this worker's group evaluates. Otherwise: it continues."""
        await self._heads.ask(lambda server: self._request(server, "fc_hold", held))

    async def model(self, step: int) -> dict[str, TensorPayload]:
        """The server's part of the model's state, by name, as kept for the checkpoint at ``step``."""
        own = self._own_life
        lives = () if own is None else (own,)
        what = f"its part of the model at step {step}"

        async def attempt(server: PeerId) -> dict[str, TensorPayload]:
            await self._request(server, "fc_model", step, *lives)
            listed, _ = unpack_manifest(await self._receive(server, model_tag(step, own), what))
            state = {}
            for name, dtype, shape in listed:
                into = TensorPayload.empty(math.prod(shape), dtype)
                await self._receive(server, model_tag(step, own), what, into=into)
                state[name] = TensorPayload.of(into.tensor.view(shape))
            return state

        return await self._heads.ask(attempt)

    async def _request(self, server: PeerId, method: str, *values: Value) -> None:
        await self._endpoint.request(server, method, *values, timeout=self._timeouts.barrier_s)

    async def finish(self) -> None:
        """Announce that this worker no longer needs the server. If the server is already gone, nothing happens. (If workers may be
        lost, the exchange has announced it to all servers, or this worker is to come back.)"""
        await abandoned(self._unwanted)
        if self._members is not None:
            return
        with suppress(ZmqTrainError):
            await self._endpoint.request(self._heads.now, "fc_finished", timeout=self._timeouts.grace_s)

    async def _send(self, server: PeerId, tags: Sequence[Tag], tensors: Sequence[Payload], meta: ActivationsMeta) -> None:
        tensors[0].meta = meta.to_value()
        for tag, payload in zip(tags, tensors, strict=True):
            await self._endpoint.send(server, tag, payload, priority=PRIORITY, lasting=True)

    @property
    def _own_life(self) -> int | None:
        """This process's incarnation; ``None`` if workers may not be lost."""
        return None if self._members is None else self._members.own_incarnation

    def _on_change(self, step: int, living: tuple[PeerId, ...]) -> None:
        """All know who trains from a step on."""
        assert self._members is not None
        team, turn = self._members.team(), self._turn
        if team is not None and team.life != turn.life and turn.given_up is not None and not turn.given_up.done():
            turn.given_up.set_result(None)

    async def _unless_given_up(self, turn: _Turn, wait: Coroutine[Any, Any, T]) -> T:
        """What ``wait`` returns. Raises `_GivenUpError` as soon as the turn is given up; nothing of it is under way then."""
        if turn.given_up is None:
            return await wait
        task = asyncio.get_running_loop().create_task(wait)
        try:
            ends: list[asyncio.Future[Any]] = [task, turn.given_up]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if turn.given_up.done():
                raise _GivenUpError
            return task.result()
        finally:
            await abandoned([task])

    def _let_come(self, server: PeerId, *tags: Tag) -> None:
        """Take what may still come with these tags, so that it is not stored for ever."""

        async def take(tag: Tag) -> None:
            with suppress(ZmqTrainError):
                await self._endpoint.receive(server, tag)

        for tag in tags:
            task = asyncio.get_running_loop().create_task(take(tag), name=f"let {tag} come")
            self._unwanted.add(task)
            task.add_done_callback(self._unwanted.discard)

    async def _receive(self, server: PeerId, tag: Tag, what: str, *, into: Payload | None = None) -> Payload:
        wait = asyncio.get_running_loop().create_task(self._endpoint.receive(server, tag, into=into))
        ends: list[asyncio.Future[Any]] = [wait, self._refused]
        try:
            done, _ = await asyncio.wait(ends, timeout=self._timeouts.barrier_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise PeerTimeoutError(server, what, self._timeouts.barrier_s)
            if wait in done:
                return wait.result()
            self._refused.result()
            raise AssertionError("a refusal raises an error")
        finally:
            await abandoned([wait])  # nothing writes ``into`` any more

    async def _on_refused(self, caller: PeerId, tag: Value, reason: str) -> Value:
        if caller == self._heads.now and not self._refused.done():
            self._refused.set_exception(ProtocolError(f"{caller} refused {tag!r}: {reason}"))
            self._refused.exception()  # nothing may be waiting for it
        return None
