"""A model server as a coroutine: gradients come in, updates happen, parameters go out.

What is decided stands in `aggregator` and `staleness`, what is computed in `shard`; here is the way of the messages::

    configure (worker 0) -> initial values -> [ push -> aggregator -> shard -> parameters ] ... -> left -> finished (all workers)

On the way, and when all have left, worker 0 may ask it to keep its part of a checkpoint, and to show its parameters to group 0:
those of one moment, between two updates.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.arithmetic import INLINE_BYTES, Arithmetic
from zmqtrain.exchange.server_messages import (
    Configuration,
    ReadMeta,
    initial_tag,
    kept_label,
    parameters_tag,
    shown_tag,
)
from zmqtrain.net.endpoint import Endpoint, PeerId, Subscription, Tag
from zmqtrain.server.aggregator import Aggregator, Batch, Keep, Order, OrderedEvent, Update
from zmqtrain.server.background import Background, Refusals
from zmqtrain.server.checkpoint import keep_pieces, restore_pieces
from zmqtrain.server.held import Held, Loan
from zmqtrain.server.momentum_sensor import Sensors
from zmqtrain.server.norm import ServerSum
from zmqtrain.server.parse import parse_push
from zmqtrain.server.phantom_shard import PhantomPiece, PhantomSum
from zmqtrain.server.shard import GroupSum, HeldPiece
from zmqtrain.server.staleness import Policy, staleness_values
from zmqtrain.waiting import in_time, task_group, together
from zmqtrain.wire.payload import Value
from zmqtrain.wire.value import ValuePayload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """A server's place and its time-outs."""

    index: int
    workers: tuple[PeerId, ...]
    """All workers of the run, by rank; the server is done when each has said that it is."""
    request_s: float = 60.0
    """How long a peer may take to answer a request."""
    barrier_s: float = 600.0
    """How long to wait for what other servers owe."""


class ServerCheckpoints(Protocol):
    """Where a server's part of a checkpoint goes to and comes from."""

    async def save(self, step: int, tensors: dict[str, Tensor], sidecar: dict[str, Value]) -> None: ...

    async def hold_nothing(self, sidecar: dict[str, Value]) -> None:
        """The part of every checkpoint is empty."""

    async def restore(self) -> tuple[dict[str, Tensor], dict[str, Value]]: ...


class ModelServer:
    """Serves one shard of the model until all workers have finished. `run` it once."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: ServerSettings,
        *,
        recorder: Recorder | None = None,
        checkpoints: ServerCheckpoints | None = None,
        arena: Arena | None = None,
    ) -> None:
        """``arena``: the memory that it shares with other processes of its host."""
        self._endpoint = endpoint
        self._arena = arena
        self._settings = settings
        self._recorder: Recorder = recorder or NullRecorder()
        self._checkpoints = checkpoints
        self._held: dict[int, Held] = {}
        self._left: set[PeerId] = set()
        self._finished: set[PeerId] = set()
        self._gone: set[int] = set()
        self._ready = False
        self._staleness: Counter[int] = Counter()
        self._last_staleness: dict[tuple[int, int], int] = {}  # (group, piece) -> of its last push
        self._sensors = Sensors()

    @property
    def updates(self) -> int:
        """Updates of pieces so far."""
        return sum(held.version for held in self._held.values())

    @property
    def staleness(self) -> dict[int, int]:
        """How often a gradient met how many updates by others since its read."""
        return dict(self._staleness)

    @property
    def held(self) -> dict[int, Held]:
        """The pieces of this server, by index."""
        return self._held

    async def run(self) -> None:
        """Returns when all workers have finished. Raises `PeerLostError` when one is lost before."""
        loop = asyncio.get_running_loop()
        self._configured: asyncio.Future[Configuration] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        self._lock = asyncio.Lock()  # one push, leaving or ordered event at a time
        self._arithmetic = Arithmetic("compute")
        self._endpoint.serve("configure", self._on_configure)
        self._endpoint.serve("checkpoint", self._on_checkpoint)
        self._endpoint.serve("show", self._on_show)
        self._endpoint.serve("left", self._on_left)
        self._endpoint.serve("finished", self._on_finished)
        self._endpoint.on_lost(self._on_lost)
        pushes, orders = self._endpoint.subscribe("push"), self._endpoint.subscribe("order")
        try:
            async with task_group() as tasks:
                self._background = Background(tasks)
                self._refusals = Refusals(
                    self._endpoint, "refused", self._recorder, self._background, timeout_s=self._settings.request_s
                )
                life = tasks.create_task(self._live(pushes, orders))
                await self._done
                life.cancel()
                self._background.end()
        finally:
            self._ready = False
            pushes.close()
            orders.close()
            self._arithmetic.close()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # raised above; or something else was the first error
        self._report()

    async def _live(self, pushes: Subscription, orders: Subscription) -> None:
        configuration = await self._configured
        first_step = await self._begin(configuration)
        policy = Policy(configuration.policy, configuration.bound)
        sync = policy.kind == "sync"
        self._clip_norm = configuration.clip_norm if sync else 0.0
        ordered = configuration.snapshot and not sync and bool(self._held)
        # Servers without a piece take no part: they see no step.
        holding = sorted({piece.server for piece in configuration.pieces()})
        self._sum = ServerSum(self._endpoint, [configuration.servers[index] for index in holding], self._settings.barrier_s)
        order: Order = "none"
        if ordered and len(configuration.servers) > 1:
            order = "decide" if self._settings.index == 0 else "follow"
        self._aggregator = Aggregator(
            list(self._held),
            policy,
            len(configuration.groups),
            sums=PhantomSum if configuration.phantom else GroupSum,
            first_step=first_step,
            whole=ordered or (bool(self._clip_norm) and bool(self._held)),
            order=order,
        )
        for group in range(len(configuration.groups)):
            for piece in self._held:
                self._answer(group, piece, initial_tag(piece))
        self._sensors.watch(self._held.values(), len(configuration.groups))
        self._ready = True
        await self._let_go()
        await together(self._take_pushes(pushes), self._take_orders(orders))

    async def _begin(self, configuration: Configuration) -> int:
        """Make the shard and fill it. Returns the first step."""
        index = self._settings.index
        make: Callable[..., Held] = PhantomPiece
        if not configuration.phantom:
            make = partial(HeldPiece, arena=self._arena, horizon=configuration.horizon, rises=configuration.rises)
        for piece in configuration.pieces():
            if piece.server == index:
                bucket = configuration.buckets[piece.bucket]
                held = make(piece, bucket.dtype, bucket.parameter_group, configuration.optimizer, starts=bucket.starts_in(piece))
                self._held[piece.index] = held
        if not self._held and self._checkpoints is not None:
            _, sidecar = keep_pieces({}, 0)
            self._background.run(self._checkpoints.hold_nothing(sidecar))  # workers wait for other servers only
            return 0
        if configuration.restored and self._checkpoints is not None:
            tensors, sidecar = await self._checkpoints.restore()
            return restore_pieces(self._held, tensors, sidecar)
        for held in self._held.values():
            source = configuration.groups[0][configuration.buckets[held.piece.bucket].first]
            wait = self._endpoint.receive(source, initial_tag(held.piece.index), into=held.memory())
            async with in_time(source, f"the initial parameters of piece {held.piece.index}", self._settings.barrier_s):
                await wait
        return 0

    # What comes in.

    async def _on_configure(self, caller: PeerId, value: Value) -> Value:
        configuration = Configuration.from_value(value)
        if caller != configuration.groups[0][0]:
            raise ProtocolError(f"{caller} may not configure {self._endpoint.peer}, only {configuration.groups[0][0]} may")
        if self._configured.done():
            raise ProtocolError(f"{self._endpoint.peer} is configured already")
        self._configured.set_result(configuration)
        return None

    async def _on_finished(self, caller: PeerId) -> Value:
        if caller not in self._settings.workers or caller in self._finished:
            return None
        self._finished.add(caller)
        if len(self._finished) == len(self._settings.workers):
            if not self._done.done():
                self._done.set_result(None)
            return None
        self._leave(caller)
        return None

    async def _on_left(self, caller: PeerId) -> Value:
        if caller in self._settings.workers:
            self._leave(caller)
        return None

    def _leave(self, worker: PeerId) -> None:
        if worker not in self._left:
            self._left.add(worker)
            if self._ready and not self._done.done():
                # Not awaited: the answer must be out before the last worker's word ends this server.
                self._background.run(self._let_go())

    async def _on_checkpoint(self, caller: PeerId, step: int, show: bool = False, ordered: bool = False) -> Value:
        """Keep the shard as it is now, for the checkpoint at ``step``, and ``show`` it to group 0, too. ``ordered``: with
        snapshots, when it is this event's turn, so that all servers keep the same version; else at once, since the run ends."""
        if caller not in self._settings.workers or not self._ready or self._checkpoints is None:
            raise ProtocolError(f"{self._endpoint.peer} has nothing to keep for {caller} now")
        if not self._held:  # the collector knows
            return None
        async with self._lock:
            if ordered:
                await self._carry_out(partial(self._aggregator.keep, step, show=show), 0)
            else:
                self._keep(Keep(step, show))
        return None

    async def _on_show(self, caller: PeerId, label: str) -> Value:
        """Show the shard as it is now to group 0's workers."""
        if caller not in self._settings.workers or not self._ready:
            raise ProtocolError(f"{self._endpoint.peer} has nothing to show to {caller} now")
        async with self._lock:
            self._show(label)
        return None

    async def _let_go(self) -> None:
        """Let nobody wait for groups all of whose workers have finished."""
        for group, members in enumerate(self._configured.result().groups):
            if self._left.issuperset(members) and group not in self._gone:
                self._gone.add(group)
                self._recorder.audit("left", group=group)
                async with self._lock:
                    await self._carry_out(partial(self._aggregator.left, group), 0)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if peer in self._settings.workers and peer not in self._finished and not self._done.done():
            self._done.set_exception(PeerLostError(peer, reason, waiting_for="its gradients"))

    async def _take_pushes(self, pushes: Subscription) -> None:
        groups = self._configured.result().groups
        while True:
            sender, tag, payload = await pushes.get()
            try:
                push = parse_push(sender, tag, payload, self._held, groups)
                async with self._lock:
                    await self._carry_out(partial(self._aggregator.pushed, push), payload.nbytes)
            except ProtocolError as error:
                self._refusals.refuse(sender, tag, error)
            del payload

    async def _take_orders(self, orders: Subscription) -> None:
        while True:
            sender, _, payload = await orders.get()
            match payload.meta:
                case ["step" | "left" | "keep" | "show" as kind, int(number)] if sender == self._configured.result().servers[0]:
                    event = OrderedEvent(kind, number)
                case _:
                    self._recorder.event("refused", sender=sender, reason="an order that server 0 did not give")
                    continue
            async with self._lock:
                await self._carry_out(partial(self._aggregator.ordered, event), INLINE_BYTES)

    # What is done about it. All under the lock.

    async def _carry_out(self, decide: Callable[[], list[Batch]], nbytes: int) -> None:
        """Apply and answer what ``decide`` returns."""

        def work() -> list[Batch]:
            batches = decide()
            if batches and not self._clip_norm:
                self._apply(batches[0].updates)
            return batches

        clock = asyncio.get_running_loop().time
        start = clock()
        for number, batch in enumerate(await self._compute(work, nbytes)):
            if self._clip_norm and batch.updates:
                await self._apply_clipped(batch)
            elif number > 0:  # not before the batch ahead is answered: its readers must not see this one's updates
                await self._compute(partial(self._apply, batch.updates), INLINE_BYTES)
            for update in batch.updates:
                self._count(update)
            if self._sensors.due(len(batch.updates)):
                momentum, seen = self._sensors.fitted()
                self._recorder.event("momentum", fitted=momentum, updates=seen)
            if batch.updates and batch.answer:
                name = f"update of {len(batch.updates)} pieces" if len(batch.updates) > 1 else f"update of piece {batch.pieces[0]}"
                self._recorder.add_span(name, "compute", start, clock(), step=batch.answer[0][1] - 1)
                start = clock()
            for group, step in batch.answer:
                for piece in batch.pieces:
                    self._answer(group, piece, parameters_tag(piece, step))
            if batch.keep is not None:
                self._keep(batch.keep)
        for event in self._aggregator.decided:
            for other in self._configured.result().servers[1:]:
                try:
                    await self._endpoint.send(other, ("order",), ValuePayload([event.kind, event.number]))
                except PeerLostError:
                    if event.kind != "left":  # of a leaving, a server that is done already need not know
                        raise
        self._aggregator.decided.clear()

    def _apply(self, updates: Sequence[Update], factor: float = 1.0) -> None:
        for update in updates:
            held = self._held[update.piece]
            if update.passed_over:
                held.version += 1
                continue
            held.update(update.gradient, update.hyperparameters, factor)
            self._sensors.applied(held, update.gradient, update.reads[0][2])

    async def _apply_clipped(self, batch: Batch) -> None:
        """Clip the mean gradient by its norm over all pieces of all servers, then apply it."""
        updates, held = batch.updates, self._held
        nbytes = sum(update.gradient.nbytes for update in updates)
        mine = await self._compute(lambda: math.fsum(held[each.piece].squares(each.gradient) for each in updates), nbytes)
        norm = math.sqrt(await self._sum.of(mine))
        factor = min(1.0, self._clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        await self._compute(lambda: self._apply(updates, factor), nbytes)

    def _count(self, update: Update) -> None:
        after = self._held[update.piece].version
        for group, _, version in update.reads:
            staleness = after - 1 - version
            self._staleness[staleness] += 1
            self._last_staleness[group, update.piece] = staleness
        self._recorder.audit("applied", piece=update.piece, step=update.reads[0][1], reads=list(update.reads), version=after)

    def _answer(self, group: int, piece: int, tag: Tag) -> None:
        """Send the piece's values as they are now."""
        held = self._held[piece]
        to = self._configured.result().groups[group][held.piece.position]
        loan = held.lend(ReadMeta(held.version, self._last_staleness.get((group, piece), 0)).to_value())
        self._background.run(self._send(to, tag, loan, held.piece.bucket))

    async def _send(self, to: PeerId, tag: Tag, loan: Loan, priority: int) -> None:
        try:
            loan.sent = await self._endpoint.send(to, tag, loan.payload, priority=priority)
        except PeerLostError:
            if to not in self._finished:
                raise
        finally:
            if loan.sent is None:
                loan.give_back()

    def _keep(self, keep: Keep) -> None:
        """Send off what there is now. Updates that follow do not change it."""
        if keep.show:
            self._show(kept_label(keep.step))
        if self._checkpoints is not None:
            tensors, sidecar = keep_pieces(self._held, keep.step)
            self._background.spawn(self._checkpoints.save(keep.step, tensors, sidecar))

    def _show(self, label: str) -> None:
        for piece in self._held:
            self._answer(0, piece, shown_tag(piece, label))

    # Helpers.

    async def _compute(self, work: Callable[[], T], nbytes: int) -> T:
        return await self._arithmetic.do_sized(work, 0 if self._configured.result().phantom else nbytes)

    def _report(self) -> None:
        self._recorder.audit("held", pieces={index: (held.piece, held.memory()) for index, held in self._held.items()})
        momentum, seen = self._sensors.fitted()
        self._recorder.event(
            "server",
            momentum=momentum,
            momentum_updates=seen,
            updates=self.updates,
            pushes=sum(self._staleness.values()),
            **staleness_values(self._staleness),
        )
