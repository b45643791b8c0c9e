"""A worker's side of the FC server, on the event loop: activations are sent, their gradients come back.

The sent tensors must not change until the answer arrives: within a host the server reads them in place.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from zmqtrain.errors import PeerTimeoutError, ProtocolError, ZmqTrainError
from zmqtrain.exchange.checkpoint_part import unpack_manifest
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
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload


class FcClient:
    """The client of one worker. Waits raise `PeerLostError`, `PeerTimeoutError`, or a `ProtocolError` if the server refuses."""

    def __init__(self, endpoint: Endpoint, server: PeerId, timeouts: Timeouts) -> None:
        self._endpoint, self._server, self._timeouts = endpoint, server, timeouts
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._evaluations = 0
        endpoint.serve("fc_refused", self._on_refused)

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

        ``sent`` is called once everything is queued. Returns the answer."""
        tags = [activations_tag(step, micro_batch, place) for place in range(len(tensors))]
        await self._send(tags, tensors, meta)
        if sent is not None:
            await sent()
        what = f"the gradients of the activations of step {step}"
        answer = AnswerMeta.from_value((await self._receive(answer_tag(step, micro_batch), what)).meta)
        if answer.gradients:
            if answer.gradients != len(into):
                raise ProtocolError(f"{self._server} sent {answer.gradients} gradients for {len(into)} activations")
            tagged = [(gradient_tag(step, micro_batch, place), target) for place, target in enumerate(into)]
            await together(*(self._receive(tag, what, into=target) for tag, target in tagged))
        return answer

    async def evaluate(self, meta: ActivationsMeta, tensors: Sequence[Payload]) -> list[float]:
        """Have a batch evaluated. Returns the sums of the metrics over it."""
        number, self._evaluations = self._evaluations, self._evaluations + 1
        await self._send([evaluate_tag(number, place) for place in range(len(tensors))], tensors, meta)
        measured = (await self._receive(measured_tag(number), "an evaluation")).meta
        match measured:
            case list() if all(isinstance(each, int | float) for each in measured):
                return [float(each) for each in measured]
        raise ProtocolError(f"{self._server} answered an evaluation with {measured!r:.100}")

    async def keep(self, step: int, *, save: bool) -> None:
        """Have the server keep the current state of its part of the model for ``step``. ``save``: in a checkpoint, too."""
        await self._endpoint.request(self._server, "fc_keep", step, save, timeout=self._timeouts.barrier_s)

    async def hold(self, held: bool) -> None:
        """``held``: the server trains no group while this worker's group evaluates. Otherwise: it continues."""
        await self._endpoint.request(self._server, "fc_hold", held, timeout=self._timeouts.barrier_s)

    async def model(self, step: int) -> dict[str, TensorPayload]:
        """The server's part of the model's state, by name, as kept for the checkpoint at ``step``."""
        await self._endpoint.request(self._server, "fc_model", step, timeout=self._timeouts.barrier_s)
        what = f"its part of the model at step {step}"
        listed, _ = unpack_manifest(await self._receive(model_tag(step), what))
        state = {}
        for name, dtype, shape in listed:
            into = TensorPayload.empty(math.prod(shape), dtype)
            await self._receive(model_tag(step), what, into=into)
            state[name] = TensorPayload.of(into.tensor.view(shape))
        return state

    async def finish(self) -> None:
        """Announce that this worker no longer needs the server. If the server is already gone, nothing happens."""
        with suppress(ZmqTrainError):
            await self._endpoint.request(self._server, "fc_finished", timeout=self._timeouts.grace_s)

    async def _send(self, tags: Sequence[Tag], tensors: Sequence[Payload], meta: ActivationsMeta) -> None:
        tensors[0].meta = meta.to_value()
        for tag, payload in zip(tags, tensors, strict=True):
            await self._endpoint.send(self._server, tag, payload, priority=PRIORITY, lasting=True)

    async def _receive(self, tag: Tag, what: str, *, into: Payload | None = None) -> Payload:
        wait = asyncio.get_running_loop().create_task(self._endpoint.receive(self._server, tag, into=into))
        ends: list[asyncio.Future[Any]] = [wait, self._refused]
        try:
            done, _ = await asyncio.wait(ends, timeout=self._timeouts.barrier_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise PeerTimeoutError(self._server, what, self._timeouts.barrier_s)
            if wait in done:
                return wait.result()
            self._refused.result()
            raise AssertionError("a refusal raises an error")
        finally:
            wait.cancel()

    async def _on_refused(self, caller: PeerId, tag: Value, reason: str) -> Value:
        if caller == self._server and not self._refused.done():
            self._refused.set_exception(ProtocolError(f"{caller} refused {tag!r}: {reason}"))
            self._refused.exception()  # nothing may be waiting for it
        return None
