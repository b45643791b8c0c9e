"""An FC server as a coroutine: activations arrive, their gradients are sent back, and parameters are updated between two turns.

`queue` decides, an `Executor` computes, and this module moves the messages::

    activations of a group's workers -> queue -> executor: forward, loss, backward -> gradients of the activations
                                                                                   -> executor: update

If workers may be lost, `zmqtrain.merged_fc.seats` follows who trains. A group of several workers that train in step with others may
then have to train a step once more, with the parameters before its update: that is made only when a group has begun the next one.

If another FC server has a copy of the layers (`zmqtrain.merged_fc.chain`), whatever changes them is an *operation*, which both
carry out in the same order: a turn, or what somebody asks for (`FcServer.perform`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from zmqtrain.server.gate import OPEN, Gate
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

    async def committed(self, step: int) -> None:
        """Wait until the checkpoint is complete, or will never be."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a worker was sent, or is to be sent, for its turn."""

    turn: Turn
    life: int | None
    answer: AnswerMeta
    gradients: Sequence[Payload]


class FcCopies(Protocol):
    """The other FC server, if it has a copy of the layers. All under the lock, but for `run`."""

    serves: bool
    """Whether this server is the one that workers ask."""

    async def log(self, kind: str, *arguments: Any) -> None:
        """The next operation that this server carries out."""

    async def log_turn(self, sender: PeerId, turn: Turn, part: BatchPart) -> None:
        """The next turn."""

    async def settled(self) -> None:
        """Wait until there is a copy, or no server that could have one. Not under the lock."""

    def lost(self, peer: PeerId, reason: str) -> None:
        """The link to this peer is lost."""

    async def run(self) -> None:
        """See to it that there is a copy, for as long as the server lasts."""


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
        self.endpoint, self._settings, self.queue, self.executor = endpoint, settings, queue, executor
        self._checkpoints, self.recorder = checkpoints, recorder
        self.copies: FcCopies | None = None
        """Set before `run` if another server has a copy."""
        self.gate: Gate = OPEN
        """What all that is sent must pass."""
        self.answered: dict[int, Answered] = {}
        """If there are copies: the last answer to each group."""
        self.unsaved: dict[int, int] = {}
        """If there are copies: steps of checkpoints that are not complete yet, and the versions of the layers there."""
        self.applied = asyncio.Event()
        """Set, and replaced, whenever an update was made."""
        self._asked = 0  # requests whose callers wait
        self._places = {
            peer: WorkerPlace(group, position)
            for group, members in enumerate(settings.groups)
            for position, peer in enumerate(members)
        }
        self._arriving = Arriving()
        self._parts: dict[tuple[int, int, int], dict[int, BatchPart]] = {}  # (group, step, micro-batch) -> parts by position
        self._evaluations: dict[EvaluationTurn, tuple[BatchPart, int | None]] = {}  # and the life of the worker
        self._more = asyncio.Event()
        self.held_by: PeerId | None = None
        """The worker that evaluates, and needs unchanged parameters in the meantime."""
        self.kept: dict[int, asyncio.Future[ExecutorState]] = {}
        """The states that somebody may ask for, by step."""
        self._finished: set[PeerId] = set()
        self.saved: set[int] = set()
        """Steps of checkpoints."""
        self._pending: Applied | None = None  # an update that is due, but before which a step may be trained once more
        self.lock = asyncio.Lock()
        """Held while the executor is used."""
        self.seats = FcSeats(endpoint, settings.groups, queue, self, self.lock) if settings.elastic else None
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
        self.endpoint.serve("fc_keep", self._on_keep)
        self.endpoint.serve("fc_hold", self._on_hold)
        self.endpoint.serve("fc_model", self._on_model)
        self.endpoint.serve("fc_finished", self._on_finished)
        self.endpoint.on_lost(self._on_lost)
        arriving = self.endpoint.subscribe(ACTIVATIONS)
        begin = loop.time()
        try:
            async with task_group() as tasks:
                self.background = ServerTasks(tasks)
                if self.seats is not None:
                    self.seats.heed_in(self.background)
                self._refusals = Refusals(
                    self.endpoint, "fc_refused", self.recorder, self.background, timeout_s=self._settings.request_s
                )
                life = tasks.create_task(self._live(arriving))
                if self.copies is not None:
                    self.background.run(self.copies.run())
                await self._done
                async with self.lock:
                    await self._settle()
                life.cancel()
                self.background.end()
        finally:
            arriving.close()
            for kept in self.kept.values():
                kept.cancel()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # raised above, unless another error came first
        if self.copies is None or self.copies.serves:
            self._report(loop.time() - begin)
            self.recorder.audit("fc served")

    def end(self) -> None:
        """Have `run` return: nobody needs this server any more."""
        if not self._done.done():
            self._done.set_result(None)

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
        before = self.answered.get(place.group)
        if before is not None and (before.turn.step, before.turn.micro_batch, before.life) == (what, number, life):
            # Another server has had this turn, and was lost before the worker had all of the answer.
            self._tell(before)
            return
        if what == EVALUATE:
            self._evaluations[EvaluationTurn(sender, number)] = part, life
            self.queue.asked(sender, number)
        else:
            assert isinstance(what, int)
            self.queue.arrived(place, what, number, part.meta.micro_batches, part.meta.torn)
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
        if self.copies is not None:
            self.copies.lost(peer, reason)
            if not self.copies.serves:
                return
        if self.seats is not None and not self.seats.needs(peer):
            return
        if peer in self._places and peer not in self._finished and not self._done.done():
            self._done.set_exception(PeerLostError(peer, reason, waiting_for="its activations"))

    # Turns.

    async def _compute(self) -> None:
        load = LoadEvents(self.recorder)
        while True:
            async with self.lock:
                turn = self.queue.next(training=self.held_by is None)
                if isinstance(turn, EvaluationTurn):
                    await self._evaluate(turn)
                elif turn is not None:
                    parts = self._parts[turn.group, turn.step, turn.micro_batch].values()
                    load.begin()
                    nbytes = sum(tensor.nbytes for part in parts for tensor in part.tensors)
                    if self.copies is not None:
                        (part,) = parts  # groups have one worker
                        await self.copies.log_turn(self._settings.groups[turn.group][0], turn, part)
                        del part
                    del parts
                    await self._train(turn)
                    load.done(waiting=len(self._parts), nbytes=nbytes)
            if turn is None:
                self._more.clear()
                await self._more.wait()

    async def _evaluate(self, turn: EvaluationTurn) -> None:
        part, life = self._evaluations.pop(turn)
        await self._settle()
        with self.recorder.span(f"evaluation for {turn.worker}", "compute"):
            sums = await self.executor.evaluate(part)
        answer: list[Value] = list(sums)
        payload = ValuePayload(answer)
        self.background.run(self._send(turn.worker, measured_tag(turn.number, life), payload, self.gate.ticket()))

    async def _train(self, turn: Turn) -> None:
        by_position = self._parts.pop((turn.group, turn.step, turn.micro_batch))
        parts = [by_position[position] for position in turn.positions]
        life = self.queue.life(turn.group)
        if self._pending is not None and turn.step > self._pending.steps[0]:
            await self._settle()
        with self.recorder.span(f"forward and backward of group {turn.group}", "compute", step=turn.step):
            trained = await self.executor.train(turn, parts)
        self._busy_s += trained.compute_s
        bad = trained.loss is not None and not math.isfinite(trained.loss) and self._settings.stop_on_nan
        for position, gradients in zip(turn.positions, trained.gradients, strict=True):
            answer = AnswerMeta(trained.loss, trained.compute_s, 0 if bad else len(gradients))
            told = Answered(replace(turn, positions=(position,)), life, answer, () if bad else gradients)
            if self.copies is not None:
                self.answered[turn.group] = told
            if not self.gate.shut:
                self._tell(told)
        if bad:  # these gradients are never applied; the state before them is kept, and the run stops
            return
        self._samples += sum(part.meta.samples for part in parts)
        del by_position, parts, trained
        applied = self.queue.computed(turn)
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
        await self.executor.update(applied)
        self._busy_s += clock() - start
        self.recorder.add_span("update", "compute", start, clock(), step=applied.steps[0])
        self._staleness.update(applied.staleness)
        reads = list(zip(applied.groups, applied.steps, strict=True))
        self.recorder.audit("fc applied", reads=reads, staleness=applied.staleness, version=self.queue.version)
        self.applied.set()
        self.applied = asyncio.Event()

    def _tell(self, told: Answered) -> None:
        self.background.run(self._answer(told, self.gate.ticket()))

    async def _answer(self, told: Answered, ticket: int) -> None:
        turn, life = told.turn, told.life
        to = self._settings.groups[turn.group][turn.positions[0]]
        await self._send(to, answer_tag(turn.step, turn.micro_batch, life), ValuePayload(told.answer.to_value()), ticket)
        for place, gradient in enumerate(told.gradients):
            await self._send(to, gradient_tag(turn.step, turn.micro_batch, place, life), gradient, ticket)

    async def _send(self, to: PeerId, tag: Tag, payload: Payload, ticket: int) -> None:
        await self.gate.passed(ticket)
        try:
            await self.endpoint.send(to, tag, payload, priority=PRIORITY)
        except PeerLostError:
            if to not in self._finished and self.seats is None:
                raise

    # If workers may be lost.

    async def begins(self) -> None:
        """They may begin once nothing is lost with this server any more."""
        if self.copies is not None:
            await self.copies.settled()

    async def do(self, kind: str, *arguments: Any) -> Value:
        """Carry out what somebody asks for. On return it may be told."""
        self._asked += 1
        try:
            async with self.lock:
                if self.copies is not None:
                    await self.copies.log(kind, *arguments)
                done = await self.perform(kind, *arguments)
                ticket = self.gate.ticket()
            await self.gate.passed(ticket)
        finally:
            self._asked -= 1
        if self.seats is not None and not self._asked:
            self.seats.maybe_end()
        return done

    # Under the lock.

    async def perform(self, kind: str, *arguments: Any) -> Value:
        """Carry out an operation that is not a turn: what `FcSeats.perform` knows, or one of these.

        ========  ============  ======================================================================
        kind      arguments     meaning
        ========  ============  ======================================================================
        ``keep``  step, save    keep the state for the model at this step (``save``: for a checkpoint)
        ``hold``  worker, held  train no group while this worker evaluates, or train again
        ``free``  step          the checkpoint of this step is complete, or will never be
        ========  ============  ======================================================================
        """
        match kind:
            case "keep":
                step, save = arguments
                await self._keep(step, save=save)
            case "hold":
                caller, held = arguments
                if held or self.held_by == caller:
                    self.held_by = caller if held else None
                self._more.set()
            case "free":
                (step,) = arguments
                self.unsaved.pop(step, None)
                self.kept.pop(step, None)
            case _:
                assert self.seats is not None
                return await self.seats.perform(kind, *arguments)
        return None

    async def perform_turn(self, sender: PeerId, turn: Turn, part: BatchPart) -> None:
        """Carry out a turn that the server has had of which this one has a copy."""
        self.queue.arrived(self._places[sender], turn.step, turn.micro_batch, part.meta.micro_batches, part.meta.torn)
        self._parts[turn.group, turn.step, turn.micro_batch] = {self._places[sender].position: part}
        own = self.queue.next()
        assert own == turn, f"{self.endpoint.peer} computes {own} where the other FC server has computed {turn}"
        await self._train(turn)

    def forget_group(self, group: int) -> None:
        """What has arrived for the group's next step is of no use: its team is no more."""
        for key in [key for key in self._parts if key[0] == group]:
            del self._parts[key]
        for peer in self._settings.groups[group]:
            self._arriving.forget(peer, training=True)

    def forget_worker(self, peer: PeerId) -> None:
        """The worker is lost."""
        self._arriving.forget(peer)
        self.queue.forget(peer)
        for turn in [turn for turn in self._evaluations if turn.worker == peer]:
            del self._evaluations[turn]
        if self.held_by == peer:
            self.held_by = None
        self._more.set()

    # Checkpoints.

    async def _keep(self, step: int, *, save: bool) -> None:
        """Copy the state for the model at ``step``, between two turns. ``save``: for a checkpoint, too."""
        kept = self._future(step)
        if self.copies is not None and kept.done() and (not save or step in self.saved):
            return  # asked once more, since the other server was lost before it had answered
        await self._settle()
        state = await self.executor.state()
        if not kept.done():
            kept.set_result(state)
        for old in list(self.kept)[:-MOST_KEPT]:  # the first ones; who keeps in place of a lost worker may be steps behind it
            self.kept.pop(old).cancel()
        if not save or (self.seats is not None and step in self.saved):  # asked once more, in place of a worker that was lost
            return
        self.saved.add(step)
        if self.copies is not None:
            self.unsaved[step] = self.queue.version
        if self.copies is None or self.copies.serves:
            self.background.spawn(self.save(step, state, self.queue.version))

    async def save(self, step: int, state: ExecutorState, version: int) -> None:
        """Write this server's part of a checkpoint. If there are copies, they learn when it is complete."""
        model = {f"state/{name}": tensor for name, tensor in state.model.items()}
        await self._checkpoints.save(step, model | state.more, {**state.sidecar, "step": step, "version": version})
        if self.copies is not None and not self._done.done():
            self.background.run(self._free(step))

    async def _free(self, step: int) -> None:
        await self._checkpoints.committed(step)
        await self.do("free", step)

    def _future(self, step: int) -> asyncio.Future[ExecutorState]:
        return self.kept.setdefault(step, asyncio.get_running_loop().create_future())

    async def _on_keep(self, caller: PeerId, step: int, save: bool) -> Value:
        """Request: keep the current state."""
        if caller not in self._places:
            raise ProtocolError(f"{self.endpoint.peer} keeps no state for {caller}, which is not a worker of this run")
        await self._serves()
        return await self.do("keep", step, save)

    async def _on_hold(self, caller: PeerId, held: bool) -> Value:
        """Request: train no group from now on, or train again. ``caller`` evaluates one version of the parameters."""
        if caller not in self._places:
            raise ProtocolError(f"{self.endpoint.peer} does not stop training for {caller}, which is not a worker of this run")
        await self._serves()
        return await self.do("hold", caller, held)

    async def _on_model(self, caller: PeerId, step: int, life: int | None = None) -> Value:
        """Request: send the model's state that is kept, or will be, for the checkpoint at ``step``."""
        if caller not in self._places:
            raise ProtocolError(f"{self.endpoint.peer} sends no model to {caller}, which is not a worker of this run")
        await self._serves()
        state = await asyncio.shield(self._future(step))
        self.background.run(self._send_model(caller, model_tag(step, life), state, self.gate.ticket()))
        return None

    async def _send_model(self, to: PeerId, tag: Tag, state: ExecutorState, ticket: int) -> None:
        tensors = {name: TensorPayload.of(tensor) for name, tensor in state.model.items()}
        for payload in (pack_manifest(tensors, {}), *tensors.values()):
            await self._send(to, tag, payload, ticket)

    async def _serves(self) -> None:
        """Wait until it is this server that workers ask. (They may know of a newer view.)"""
        if self.copies is not None:
            assert self.seats is not None
            await self.seats.begun.wait()

    # Helpers.

    def _report(self, seconds: float) -> None:
        self.recorder.event(
            "fc",
            updates=self.queue.version,
            samples=self._samples,
            busy=self._busy_s / seconds if seconds > 0 else 0.0,
            **staleness_values(self._staleness),
        )
