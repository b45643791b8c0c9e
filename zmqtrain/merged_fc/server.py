"""An FC server as a coroutine: activations arrive, their gradients are sent back, and parameters are updated between two turns.

`queue` decides, an `Executor` computes, and this module moves the messages::

    activations of a group's workers -> queue -> executor: forward, loss, backward -> gradients of the activations
                                                                                   -> executor: update

If workers may be lost, `zmqtrain.merged_fc.seats` follows who trains. A group of several workers that train in step with others may
then have to train a step once more, with the parameters before its update: that is made only when a group has begun the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.events import Recorder
from zmqtrain.exchange.checkpoint_part import pack_manifest
from zmqtrain.merged_fc.arriving import Arriving
from zmqtrain.merged_fc.executor import BatchPart, Executor, ExecutorState
from zmqtrain.merged_fc.messages import (
    ACTIVATIONS,
    EVALUATE,
    PRIORITY,
    AnswerMeta,
    answer_tag,
    gradient_tag,
    measured_tag,
    model_tag,
    parse_activations_tag,
)
from zmqtrain.merged_fc.queue import Applied, EvaluationTurn, FcQueue, Turn, WorkerPlace
from zmqtrain.merged_fc.seats import FcSeats
from zmqtrain.net.endpoint import Endpoint, PeerId, Subscription, Tag
from zmqtrain.server.background import Refusals, ServerTasks
from zmqtrain.server.load import LoadEvents
from zmqtrain.server.staleness import staleness_values
from zmqtrain.waiting import task_group, together
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

#: This many checkpoints are kept until worker 0 fetches them; a later request fails.
MOST_KEPT = 2


@dataclass(frozen=True, slots=True)
class FcSettings:
    """An FC server's place in the run."""

    groups: tuple[tuple[PeerId, ...], ...]
    """The workers of each group, by position."""
    request_s: float = 60.0
    """How long a peer may take to answer a request."""
    stop_on_nan: bool = True
    elastic: bool = False
    """Whether training goes on without workers that are lost."""


class FcCheckpoints(Protocol):
    """The destination of an FC server's part of checkpoints."""

    async def save(self, step: int, tensors: dict[str, Tensor], sidecar: dict[str, Value]) -> None: ...


class FcServer:
    """Computes for all groups until all workers have finished. `run` it once."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: FcSettings,
        queue: FcQueue,
        executor: Executor,
        checkpoints: FcCheckpoints,
        recorder: Recorder,
    ) -> None:
        self._endpoint, self._settings, self._queue, self._executor = endpoint, settings, queue, executor
        self._checkpoints, self._recorder = checkpoints, recorder
        self._places = {
            peer: WorkerPlace(group, position)
            for group, members in enumerate(settings.groups)
            for position, peer in enumerate(members)
        }
        self._arriving = Arriving()
        self._parts: dict[tuple[int, int, int], dict[int, BatchPart]] = {}  # (group, step, micro-batch) -> parts by position
        self._evaluations: dict[EvaluationTurn, tuple[BatchPart, int | None]] = {}  # and the life of the worker
        self._more = asyncio.Event()
        self._held_by: PeerId | None = None  # the worker that evaluates, and needs unchanged parameters in the meantime
        self._kept: dict[int, asyncio.Future[ExecutorState]] = {}
        self._finished: set[PeerId] = set()
        self._saved: set[int] = set()  # steps of checkpoints
        self._pending: Applied | None = None  # an update that is due, but before which a step may be trained once more
        self._lock = asyncio.Lock()  # held while the executor is used
        self.seats = FcSeats(endpoint, settings.groups, queue, self, self._lock) if settings.elastic else None
        """Who trains, if workers may be lost."""
        self._staleness: Counter[int] = Counter()
        self._samples = 0
        self._busy_s = 0.0

    async def run(self) -> None:
        """Returns when all workers have finished. Raises `PeerLostError` if one is lost before that, and the executor's errors."""
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        if self.seats is not None:
            self.seats.serve(self._done)
        self._endpoint.serve("fc_keep", self._on_keep)
        self._endpoint.serve("fc_hold", self._on_hold)
        self._endpoint.serve("fc_model", self._on_model)
        self._endpoint.serve("fc_finished", self._on_finished)
        self._endpoint.on_lost(self._on_lost)
        arriving = self._endpoint.subscribe(ACTIVATIONS)
        begin = loop.time()
        try:
            async with task_group() as tasks:
                self._background = ServerTasks(tasks)
                if self.seats is not None:
                    self.seats.heed_in(self._background)
                self._refusals = Refusals(
                    self._endpoint, "fc_refused", self._recorder, self._background, timeout_s=self._settings.request_s
                )
                life = tasks.create_task(self._live(arriving))
                await self._done
                async with self._lock:
                    await self._settle()
                life.cancel()
                self._background.end()
        finally:
            arriving.close()
            for kept in self._kept.values():
                kept.cancel()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # raised above, unless another error came first
        self._report(loop.time() - begin)

    async def _live(self, arriving: Subscription) -> None:
        await together(self._take(arriving), self._compute())

    # Arriving messages.

    async def _take(self, arriving: Subscription) -> None:
        if self.seats is not None:
            await self.seats.begun.wait()
        while True:
            sender, tag, payload = await arriving.get()
            try:
                self._arrived(sender, tag, payload)
            except ProtocolError as error:
                self._refusals.refuse(sender, tag, error)
            del payload

    def _arrived(self, sender: PeerId, tag: Tag, payload: Payload) -> None:
        place = self._places.get(sender)
        if place is None:
            raise ProtocolError(f"{sender} is not a worker of this run")
        life = parse_activations_tag(tag)[2]
        if self.seats is not None and not self.seats.trains(sender, tag, place.group):
            return  # it is lost, or its team is another one by now
        arrived = self._arriving.add(sender, tag, payload)
        if arrived is None:
            return
        what, number, part = arrived
        if what == EVALUATE:
            self._evaluations[EvaluationTurn(sender, number)] = part, life
            self._queue.asked(sender, number)
        else:
            assert isinstance(what, int)
            self._queue.arrived(place, what, number, part.meta.micro_batches, part.meta.torn)
            self._parts.setdefault((place.group, what, number), {})[place.position] = part
        self._more.set()

    async def _on_finished(self, caller: PeerId) -> Value:
        if caller not in self._places:
            return None
        self._finished.add(caller)
        if len(self._finished) == len(self._places) and not self._done.done():
            self._done.set_result(None)
        return None

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if self.seats is not None and not self.seats.needs(peer):
            return
        if peer in self._places and peer not in self._finished and not self._done.done():
            self._done.set_exception(PeerLostError(peer, reason, waiting_for="its activations"))

    # Turns.

    async def _compute(self) -> None:
        load = LoadEvents(self._recorder)
        while True:
            async with self._lock:
                turn = self._queue.next(training=self._held_by is None)
                if isinstance(turn, EvaluationTurn):
                    await self._evaluate(turn)
                elif turn is not None:
                    parts = self._parts[turn.group, turn.step, turn.micro_batch].values()
                    load.begin()
                    nbytes = sum(tensor.nbytes for part in parts for tensor in part.tensors)
                    del parts
                    await self._train(turn)
                    load.done(waiting=len(self._parts), nbytes=nbytes)
            if turn is None:
                self._more.clear()
                await self._more.wait()

    async def _evaluate(self, turn: EvaluationTurn) -> None:
        part, life = self._evaluations.pop(turn)
        await self._settle()
        with self._recorder.span(f"evaluation for {turn.worker}", "compute"):
            sums = await self._executor.evaluate(part)
        answer: list[Value] = list(sums)
        self._background.run(self._send(turn.worker, measured_tag(turn.number, life), ValuePayload(answer)))

    async def _train(self, turn: Turn) -> None:
        by_position = self._parts.pop((turn.group, turn.step, turn.micro_batch))
        parts = [by_position[position] for position in turn.positions]
        life = self._queue.life(turn.group)
        if self._pending is not None and turn.step > self._pending.steps[0]:
            await self._settle()
        with self._recorder.span(f"forward and backward of group {turn.group}", "compute", step=turn.step):
            trained = await self._executor.train(turn, parts)
        self._busy_s += trained.compute_s
        members = self._settings.groups[turn.group]
        bad = trained.loss is not None and not math.isfinite(trained.loss) and self._settings.stop_on_nan
        for position, gradients in zip(turn.positions, trained.gradients, strict=True):
            answer = AnswerMeta(trained.loss, trained.compute_s, 0 if bad else len(gradients))
            self._background.run(self._answer(members[position], turn, life, answer, () if bad else gradients))
        if bad:  # these gradients are never applied; the state before them is kept, and the run stops
            return
        self._samples += sum(part.meta.samples for part in parts)
        del by_position, parts, trained
        applied = self._queue.computed(turn)
        if applied is not None:
            await self.apply(applied)

    async def apply(self, applied: Applied) -> None:
        """Make the update, now or as soon as no group can train its step once more. Under the lock."""
        if self.seats is None or not self.seats.keeps_places:
            await self._update(applied)
            return
        await self._settle()  # an update of the step before: nobody can train that any more
        self._pending = applied

    async def _settle(self) -> None:
        """Make the update that is due."""
        if self._pending is not None:
            applied, self._pending = self._pending, None
            await self._update(applied)

    async def _update(self, applied: Applied) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        await self._executor.update(applied)
        self._busy_s += clock() - start
        self._recorder.add_span("update", "compute", start, clock(), step=applied.steps[0])
        self._staleness.update(applied.staleness)
        reads = list(zip(applied.groups, applied.steps, strict=True))
        self._recorder.audit("fc applied", reads=reads, staleness=applied.staleness, version=self._queue.version)

    async def _answer(self, to: PeerId, turn: Turn, life: int | None, answer: AnswerMeta, gradients: Sequence[Payload]) -> None:
        await self._send(to, answer_tag(turn.step, turn.micro_batch, life), ValuePayload(answer.to_value()))
        for place, gradient in enumerate(gradients):
            await self._send(to, gradient_tag(turn.step, turn.micro_batch, place, life), gradient)

    async def _send(self, to: PeerId, tag: Tag, payload: Payload) -> None:
        try:
            await self._endpoint.send(to, tag, payload, priority=PRIORITY)
        except PeerLostError:
            if to not in self._finished and self.seats is None:
                raise

    # If workers may be lost. Under the lock.

    def forget_group(self, group: int) -> None:
        """What has arrived for the group's next step is of no use: its team is no more."""
        for key in [key for key in self._parts if key[0] == group]:
            del self._parts[key]
        for peer in self._settings.groups[group]:
            self._arriving.forget(peer, training=True)

    def forget_worker(self, peer: PeerId) -> None:
        """The worker is lost."""
        self._arriving.forget(peer)
        self._queue.forget(peer)
        for turn in [turn for turn in self._evaluations if turn.worker == peer]:
            del self._evaluations[turn]
        if self._held_by == peer:
            self._held_by = None
        self._more.set()

    # Checkpoints.

    async def _keep(self, step: int, *, save: bool) -> None:
        """Copy the state for the model at ``step``, between two turns. ``save``: for a checkpoint, too."""
        await self._settle()
        state = await self._executor.state()
        kept = self._future(step)
        if not kept.done():
            kept.set_result(state)
        for old in list(self._kept)[:-MOST_KEPT]:  # the first ones; who keeps in place of a lost worker may be steps behind it
            self._kept.pop(old).cancel()
        if not save or (self.seats is not None and step in self._saved):  # asked once more, in place of a worker that was lost
            return
        self._saved.add(step)
        model = {f"state/{name}": tensor for name, tensor in state.model.items()}
        sidecar: dict[str, Value] = {**state.sidecar, "step": step, "version": self._queue.version}
        self._background.spawn(self._checkpoints.save(step, model | state.more, sidecar))

    def _future(self, step: int) -> asyncio.Future[ExecutorState]:
        return self._kept.setdefault(step, asyncio.get_running_loop().create_future())

    async def _on_keep(self, caller: PeerId, step: int, save: bool) -> Value:
        """Request: keep the current state."""
        if caller not in self._places:
            raise ProtocolError(f"{self._endpoint.peer} keeps no state for {caller}, which is not a worker of this run")
        async with self._lock:
            await self._keep(step, save=save)
        return None

    async def _on_hold(self, caller: PeerId, held: bool) -> Value:
        """Request: train no group from now on, or train again. ``caller`` evaluates one version of the parameters."""
        if caller not in self._places:
            raise ProtocolError(f"{self._endpoint.peer} does not stop training for {caller}, which is not a worker of this run")
        async with self._lock:
            if held or self._held_by == caller:
                self._held_by = caller if held else None
        self._more.set()
        return None

    async def _on_model(self, caller: PeerId, step: int, life: int | None = None) -> Value:
        """Request: send the model's state that is kept, or will be, for the checkpoint at ``step``."""
        if caller not in self._places:
            raise ProtocolError(f"{self._endpoint.peer} sends no model to {caller}, which is not a worker of this run")
        state = await asyncio.shield(self._future(step))
        self._background.run(self._send_model(caller, model_tag(step, life), state))
        return None

    async def _send_model(self, to: PeerId, tag: Tag, state: ExecutorState) -> None:
        tensors = {name: TensorPayload.of(tensor) for name, tensor in state.model.items()}
        for payload in (pack_manifest(tensors, {}), *tensors.values()):
            await self._send(to, tag, payload)

    # Helpers.

    def _report(self, seconds: float) -> None:
        self._recorder.event(
            "fc",
            updates=self._queue.version,
            samples=self._samples,
            busy=self._busy_s / seconds if seconds > 0 else 0.0,
            **staleness_values(self._staleness),
        )
