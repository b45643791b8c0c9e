"""The common core of both kinds of session, as coroutines."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from numbers import Integral
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.background import BackgroundThread
from zmqtrain.data.batch import Batch
from zmqtrain.data.bridge import Bridge
from zmqtrain.data.seeding import seed_torch
from zmqtrain.data.source import Shard
from zmqtrain.embed.calls import Calls
from zmqtrain.embed.device import CallersDevice
from zmqtrain.embed.feed import Feed, StreamFeed, content_for, make_feed, steps_of
from zmqtrain.embed.grid.begin import begin_alike as begin_grid_alike
from zmqtrain.embed.grid.meeting import Meetings
from zmqtrain.embed.grid.model import DividedScript
from zmqtrain.embed.guards import check_optimizer
from zmqtrain.embed.other_loops import OtherLoops
from zmqtrain.embed.replicated import Replicated
from zmqtrain.embed.reported import plain_values
from zmqtrain.embed.scope import Scope
from zmqtrain.embed.script_settings import check_script, check_session
from zmqtrain.embed.taken import Taken
from zmqtrain.errors import ConnectivityError, NonFiniteLossError, PeerLostError, RunStopped, UsageError
from zmqtrain.events import EventValue
from zmqtrain.exchange.make import make_exchange, make_members
from zmqtrain.membership.alike import bounded
from zmqtrain.membership.common_stop import Here, may_not_stop
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.parallel.gradient_norm import GradientNorm
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.turns import handing_over
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.topology.elastic import ASKING
from zmqtrain.train.alike import (
    CONTENT,
    OPTIMIZER,
    attributes_of_data,
    facts_of_training,
    require_same,
    require_same_training,
    warn_of_differences,
)
from zmqtrain.train.beginning import begin_alike
from zmqtrain.train.callback import Callback
from zmqtrain.train.callbacks import Callbacks
from zmqtrain.train.checkpoint.saving import send_model, whole_state
from zmqtrain.train.device.accelerator import accelerator_of
from zmqtrain.train.device.base import Staging
from zmqtrain.train.device.make import device_named
from zmqtrain.train.device.streams import StreamStaging
from zmqtrain.train.divided import make_fabric
from zmqtrain.train.participant import Participant
from zmqtrain.train.replica import ReplicaSettings, TorchReplica
from zmqtrain.train.shared import allocate_in
from zmqtrain.train.shares import Scope as StepScope
from zmqtrain.train.shares import draws_of, in_step
from zmqtrain.train.task import check_layers, check_model
from zmqtrain.train.verifying import one_of_each
from zmqtrain.waiting import to_the_end
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.words import counted

#: What is said to whoever uses a session after its end.
ENDED = (
    "the session has ended: use it within its block, `with zmqtrain.session() as session:` (or `async with zmqtrain.join()`), "
    "which has all of the training in it"
)

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741 - M and O: a model and its optimizer


class Core:
    """A worker of the run whose training loop is the user's. All methods on the loop's thread."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        timeouts = context.timeouts
        # Above the longest wait of the coroutines themselves, so that their errors, which name the peer, come first.
        self.bridge = Bridge(threading.Condition(), asyncio.get_running_loop().time, timeouts.barrier_s + 2 * timeouts.lost_s)
        self.members = make_members(context, script=True)
        self.replicated: Replicated | None = None
        self.divided: DividedScript | None = None
        """The replicated model, if the group divides it."""
        self._fabrics: list[NetworkFabric] = []
        self._whole = False  # the divided model is an ordinary one again
        self._allow_steps: Callable[[], None] = lambda: None
        self._part: Participant | None = None
        self._taken = Taken()
        self._ended_step: dict[str, EventValue] | None = None  # the values of the last step, until the next one ends
        self._feeds: list[Feed] = []
        self._epochs: dict[int, tuple[Any, int]] = {}  # by the data's id, which it keeps: the next epoch, where none is given
        self._compared: dict[int, Any] = {}  # by the data's id, too
        self._numbers: Counter[int] = Counter()  # how many of them have so many samples
        self._running: set[asyncio.Task[Any]] = set()
        self._other_loops = OtherLoops(context.endpoint, self._coupled(), timeouts.request_s)
        self.calls = Calls(self.members, context.membership, self._other_loops, lambda: self.replicated)
        """What all workers call together, besides their steps."""
        self.callbacks = Callbacks((), context.role.index)
        """The session's. Their calls are delivered in the thread of the loop."""
        self._samples = 0
        self._evaluated: tuple[int, dict[str, float | int | str | bool]] = (0, {})  # the last report, and its step
        self.finished = False
        """Whether the session has ended in order."""
        self.closed = False
        may_not_stop(context.endpoint, "there is no replicated model yet")
        self._halted: PeerLostError | None = None
        seed_torch(context.topology.job.seed)
        context.membership.on_halt(self._halt)

    @cached_property
    def device(self) -> torch.device:
        role = self.context.role
        if role.device == "modelled":
            raise UsageError('a script cannot run on [compute] device = "modelled": choose another device, or launch a task')
        return device_named(role.device, role.slot)

    def guard(self, coroutine: Coroutine[Any, Any, T]) -> Guarded[T]:
        """Wrap a coroutine so that awaiting it raises at once when the run is stopped."""
        return Guarded(self, coroutine)

    async def run_guarded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if self._halted is not None or self.closed:
                coroutine.close()
                raise self._halted or UsageError(ENDED)
            return await coroutine
        except asyncio.CancelledError:
            if self._halted is None:
                raise
            raise self._halted from None
        finally:
            self._running.discard(task)

    def _halt(self, reason: dict[str, Any]) -> None:
        self._halted = PeerLostError(str(reason.get("peer", "the run")), str(reason.get("message", "the run was stopped")))
        if self.replicated is not None:
            self.replicated.replica.abort(self._halted)
        for task in self._running:
            task.cancel()

    async def replicate(self, model: M, optimizer: O, overlap: bool | None, callbacks: Sequence[Callback] = ()) -> tuple[M, O]:
        if self.replicated is not None:
            raise UsageError(
                "a session replicates one model with one optimizer. Two networks that are trained in turn (a GAN) cannot be "
                "replicated. Networks that are trained by the same optimizer.step() can: put them into one nn.Module, with one "
                "optimizer for all. Models that are trained one after another (k-fold cross-validation) each need a run of their "
                "own: launch the script once for each"
            )
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise UsageError(
                "session.replicate(model, optimizer) takes a torch.nn.Module and a torch.optim.Optimizer, not objects of type "
                f"{type(model).__name__} and {type(optimizer).__name__}. If a class wraps the optimizer, give the optimizer inside"
            )
        check_script(self.context.topology, resume=self.context.resume)
        check_session(self.context.topology, self.context.placement.groups, overlap=overlap)
        check_model(model)
        check_layers(model, self.context.topology)
        served = self.context.topology.exchange.kind == "model_server"
        check_optimizer(model, optimizer, served=served)
        topology, timeouts = self.context.topology, self.context.timeouts
        settings = ReplicaSettings(
            bucket_bytes=BucketLimit.of(topology),
            clip_norm=topology.optimizer.clip_norm,
            overlap=topology.compute.overlap,
            gate_timeout_s=timeouts.barrier_s,
        )
        self.callbacks = Callbacks(callbacks, self.context.role.index)
        if self.callbacks.reads:
            raise UsageError(
                "Callback.on_parameters() is for tasks: your loop has the model itself, complete after optimizer.step()"
            )
        where = next(model.parameters()).device
        facts = facts_of_training(model, optimizer)  # of the whole model
        divided = self.divided = await self._divide(model, optimizer, served=served) if topology.divided else None
        opened = nullcontext if divided is None else divided.guard.opened
        device = CallersDevice(self.bridge, where, _staging(where), opened)
        with opened():
            replica = TorchReplica(
                model if divided is None else divided.parallel,
                optimizer,
                device,
                settings,
                recorder=self.context.recorder,
                allocate=allocate_in(self.context.arena),
                shards=None if divided is None else divided.shards,
                norm=None if divided is None else GradientNorm(divided.shards, divided.parallel.fabric),
            )
        replica.draws = draws_of(topology, self.context.role)
        if self.members.late:  # it may have read a checkpoint of its own, with rates that have changed since; it gets the others'
            facts = {what: items for what, items in facts.items() if what != OPTIMIZER}
        await require_same_training(self.context, "session", facts)
        if divided is not None:
            replica.waiting = handing_over
            for fabric in self._fabrics:
                replica.also_abort(fabric.abort)
        if topology.elastic and not self.members.survives:
            what = "with model servers" if served else "with groups of several workers"
            why = f"{what}, a script's own loop does not train what a lost worker has left"
            if topology.asks_elastic:
                raise UsageError(f"{why}: remove {ASKING}")
            await self.context.membership.need_all(why)
        exchange = make_exchange(self.context, self.members, script=True)
        part = Participant(
            self.context,
            exchange,
            self.members,
            replica,
            step=lambda: self._step,
            quiet=lambda: device.run(replica.take_all),
            begin_alike=None
            if divided is not None
            else lambda group, _: begin_alike(replica.untrained(buffers=True), group, "begin alike", device.run),
        )
        first_step = await part.start()
        self._part = part
        with opened():
            self.replicated = Replicated(
                replica,
                exchange,
                self.bridge,
                self._scope(),
                self._other_loops,
                first_step=first_step,
                overlap=overlap,
                served=served,
                weight=self._weight,
                share=lambda: self._taken.share,
                ended=self._step_ended,
                warn=lambda text: self.context.recorder.event("warning", step=self._step, text=text),
                call_back=self.callbacks.deliver,
                stops=self._stops,
                stop=self._stop,
                wait=self._wait_for,
                divided=divided,
            )
        self.context.recorder.event(
            "start",
            step=first_step,
            parameters=sum(p.numel() for p in replica.parameters),
            buckets=len(replica.buckets),
            steps=None,
        )
        part.stop_point.open(first_step + 1, None)  # not before its first step
        return model, optimizer

    def _wait_for(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Run the coroutine on the loop, and wait in the calling thread for its result."""
        return self.bridge.call(self.guard(coroutine), what)

    async def _divide(self, model: nn.Module, optimizer: Optimizer, *, served: bool) -> DividedScript:
        """Divide the model over the group, as the topology says; all workers begin with rank 0's."""
        context = self.context
        role, placement, timeout_s = context.role, context.placement, context.timeouts.barrier_s
        members = placement.group_members(role.group)
        group = Group(context.endpoint, members, role.position, "session/meeting", timeout_s=timeout_s)
        meetings = self.calls.meetings = Meetings(group)
        await begin_grid_alike(model, meetings, context, self.calls.together)
        where = next(model.parameters()).device
        device = CallersDevice(self.bridge, where, _staging(where))
        for name in ("grid", "verify"):
            fabric = make_fabric(context, device, name)
            assert fabric is not None
            self._fabrics.append(fabric)
        grid, verify = self._fabrics
        references = one_of_each([placement.role(peer).host for peer in members])
        return await device.run(
            lambda: DividedScript(
                model,
                optimizer,
                context.topology,
                (grid, verify),
                meetings,
                self._wait_for,
                context.recorder,
                served=served,
                references=references,
            )
        )

    async def _stops(self, step: int) -> bool:
        assert self._part is not None
        return await self._part.stop_point.here(step) is Here.STOP

    def _coupled(self) -> list[PeerId]:
        """The other workers that wait for this one in every step."""
        topology, role, placement = self.context.topology, self.context.role, self.context.placement
        alone = topology.exchange.kind == "model_server" and topology.exchange.policy != "sync"
        members = placement.group_members(role.group) if alone else tuple(worker.peer for worker in placement.workers)
        return [peer for peer in members if peer != role.peer]

    def _scope(self) -> Scope:
        """The workers whose gradients are combined in one step."""
        context = self.context
        role, placement = context.role, context.placement
        members = StepScope.of(context.topology, placement, role).members
        group = Group(context.endpoint, members, members.index(role.peer), "session/step", timeout_s=context.timeouts.barrier_s)
        self._other_loops.nearest = members
        return Scope(group, placement.groups if in_step(context.topology) else 1)

    async def begin_batches(
        self, data: Any, epoch: int | None, batch_size: int | None, shard: Shard | None, first: int | None, *, trains: bool
    ) -> Feed:
        """Begin this worker's batches of an epoch, from number ``first`` on. Without ``epoch``, if it ``trains``, epochs of the
        same data are counted."""
        if (first is None or (epoch is None and trains)) and self.members.late:
            raise UsageError(
                f"this worker replaces one that was lost, and the others are already at step {self._step}: say where its data "
                f"continues with session.batches(data, epoch, first=N), which skips N batches of the epoch"
            )
        _require_whole("epoch", epoch, 0)
        _require_whole("batch_size", batch_size, 1)
        if trains and not self.members.late and self.calls.step == 0:
            await self._require_same_data(data, batch_size, shard)
        if epoch is None:
            _, epoch = self._epochs.get(id(data), (data, 0))
            if trains:
                self._epochs[id(data)] = data, epoch + 1
        pinned, agree = self.device.type == "cuda", self.calls.agree
        feed = make_feed(self.context, data, epoch, batch_size, shard, pinned, agree, first=first or 0)
        self._feeds.append(feed)
        if isinstance(feed, StreamFeed) and self.context.topology.elastic:
            await self.context.membership.need_all("its data is a stream, and no other worker can take over a part of it")
        return feed

    async def _require_same_data(self, data: Any, batch_size: int | None, shard: Shard | None) -> None:
        """Compare what is in memory with what other workers divide: each has read or drawn it by itself. Raises `TaskError`."""
        if id(data) in self._compared:
            return
        self._compared[id(data)] = data
        content = content_for(self.context, data, batch_size, shard)
        if content is not None:
            samples, lines, dataset = content
            number = self._numbers[samples]
            self._numbers[samples] += 1
            what = f"session's data ({counted(samples, 'sample')}{f', number {number + 1}' if number else ''})"
            await require_same(self.context, "session: data", {f"{CONTENT} the {what}": bounded(lines)})
            if attributes := attributes_of_data({what: dataset}):
                await warn_of_differences(self.context, "session: data", attributes)

    def count_batches(self, data: Any, batch_size: int | None, shard: Shard | None, first: int | None) -> int:
        """The batches of an epoch from number ``first`` on. Raises `TypeError` for a stream, and what `begin_batches` raises."""
        _require_whole("batch_size", batch_size, 1)
        steps = steps_of(self.context, data, batch_size, shard)
        if steps is None:
            raise TypeError(
                "a stream has no length: nobody knows how many batches an epoch has before it has ended. Give the number to what "
                "asks for it (steps_per_epoch=..., total=...)"
            )
        return max(0, steps - (first or 0))

    async def next_batch(self, feed: Feed, *, trains: bool) -> Batch | None:
        """The next batch as it was collated, as the only input; ``None`` at the end. ``trains``: it is not for an evaluation, so
        its share weighs the next gradient."""
        batch = await feed.next()
        if batch is not None:
            batch = batch.to(self.device)
            if trains:
                self._taken.note(batch.samples, feed.group_samples)
        return batch

    async def end_batches(self, feed: Feed) -> None:
        self._feeds.remove(feed)
        await feed.close(self.context.timeouts.grace_s)

    def _weight(self, *, any_share: bool = False) -> float:
        weight = self._taken.weight(self.context.placement.group_size, any_share=any_share or self.divided is not None)
        return weight if self.divided is None else 1.0  # outputs' gradients have their weights

    def _step_ended(self, step: int, backwards: int, seconds: float, exposed_s: float) -> None:
        self._flush_step()
        samples = self._taken.of_step(backwards)
        if self.divided is not None and not self.divided.counts:
            samples = 0
        # A lost worker cannot be asked at the end: then each worker counts for all.
        self._samples += samples * (len(self.members.at(step)) if self.members.survives else 1)
        assert self._part is not None
        self.callbacks.view(step, self.members.at(step))
        self._ended_step = {
            "step": step, "samples": samples, "seconds": seconds, "exposed_s": exposed_s, **self._part.staleness()
        }  # fmt: skip

    def _flush_step(self) -> None:
        """Record the last step, with the values that were reported about it."""
        if self._ended_step is not None:
            values, self._ended_step = self._ended_step, None
            step = values.pop("step")
            assert isinstance(step, int)
            self.callbacks.step(step, values)
            self.context.recorder.event("step", step=step, **values)

    def report(self, kind: str, reported: Mapping[str, object]) -> None:
        values = plain_values(kind, reported)
        loss, step = values.get("loss"), self._step
        if isinstance(loss, float) and not math.isfinite(loss) and self.context.topology.job.on_nan == "stop":
            kept = "No model of the run is saved: a script reports a loss after its step, which cannot be undone"
            raise NonFiniteLossError(loss, self.context.role.index, step, kept)
        if kind == "eval":
            self._evaluated = (step, values)
            numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
            self.callbacks.eval(step, numbers)
        if kind == "step" and self._ended_step is not None:
            self._ended_step.update(values)
        else:
            self.context.recorder.event(kind, step=step, **values)

    # In the caller's thread.

    def backward(self, total: Tensor, weight: Tensor | float) -> float:
        return self._replicated("backward()").backward(total, weight)

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        return self._replicated("clip_grad_norm_()").clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        parameters = self._replicated("clip_grad_value_()").whole("session.clip_grad_value_()")
        nn.utils.clip_grad_value_(parameters, clip_value)

    def same(self, tensor: Tensor) -> Tensor:
        return tensor if self.divided is None else self.divided.parallel.same(tensor)

    def _replicated(self, what: str) -> Replicated:
        if self.replicated is None:
            raise UsageError(f"session.{what} comes after session.replicate(model, optimizer)")
        return self.replicated

    def _stop(self) -> None:
        """All workers stop here: end the session in order, once, and raise in the user's loop."""
        replicated = self._replicated("optimizer.step()")
        if not self.finished:
            self.bridge.call(self.guard(self.finish(early=True)), "the end of the session")
            if self.divided is not None:
                self._allow_steps = self.divided.end_steps(self._stop)
        raise RunStopped(replicated.step)

    # On the loop's thread.

    async def settle(self) -> None:
        if self.replicated is not None:
            await self.replicated.exchange.settle()

    @property
    def _step(self) -> int:
        return self.calls.step

    async def finish(self, *, early: bool = False) -> None:
        """End the session: the user's code has ended, or stops ``early`` at the same step as all. On return the model is complete,
        and the others know that this worker is done. Idempotent."""
        if self.finished:
            return
        self._flush_step()
        if self.replicated is not None and self._part is not None:
            if self.calls.meetings is not None:
                await self.calls.meetings.meet("the end of the session")
            exchange = self._part.exchange
            here = self.context.membership.view.members
            await self._other_loops.tell(self.replicated.step, self.replicated.scope.sums, here)
            self.replicated.check_weights()
            self.replicated.require_steps()
            step = await self._part.ended(alike=exchange.synchronous or exchange.averaged)
            await self.replicated.require_same_weights()
            await self._part.become_run_model("finish")
            if self.divided is not None:
                await self.bridge.compute(self._become_whole)
            await self._leave_model(self.replicated, self._part, step)
            await self._part.stop()
        if early:
            self.context.recorder.event("stopped", step=self._step, kept=False)
        else:
            self.context.recorder.event("finish", step=self._step)
        self.finished = True

    def _become_whole(self) -> None:
        assert self.divided is not None
        assert self.replicated is not None
        self.replicated.detach()
        self.divided.become_whole()
        self._whole = True

    async def _leave_model(self, replicated: Replicated, part: Participant, step: int) -> None:
        """Save the first worker's model, which is the run's model, in the run directory, if there is one."""

        async def leave(group: Group) -> None:
            counts = TensorPayload.of(np.zeros(group.size))
            counts.numpy()[group.rank] = self._samples
            await all_reduce(group, counts, ("finish", "samples"))
            if group.rank != 0 or replicated.step == 0:
                return
            # 0 if the batches were not the session's.
            samples = int(counts.numpy().max() if self.members.survives else counts.numpy().sum())
            metrics = self._evaluated[1] if self._evaluated[0] == step else {}  # otherwise they belong to an earlier model
            model = replicated.replica.model if self.divided is None else self.divided.model
            state = whole_state(model, copied=False)
            about, timeout_s = part.about_model(samples, metrics), self.context.timeouts.barrier_s
            await send_model(self.context.endpoint, step, state, about, alone=True, timeout_s=timeout_s)

        await self.members.together("model", replicated.step, leave)

    async def close(self, thread: BackgroundThread | None = None) -> None:
        """Release the user's model and the loaders' threads, also after an error. ``thread``: the one that trains, which is ended
        before: two threads that set the same gradients can end the process. Without it, nothing trains any more. Cancelled, it
        releases all the same: torch's own backward would stay watched."""
        await to_the_end(self._close(thread))

    async def _close(self, thread: BackgroundThread | None) -> None:
        if thread is not None:
            if not self.finished:  # it may be waiting for others
                error = ConnectivityError("this worker has ended")
                self.bridge.abort(error)
                if self.replicated is not None:
                    self.replicated.replica.abort(error)
            await thread.close(self.context.timeouts.grace_s)
        self.bridge.abort(UsageError(ENDED))  # for whoever uses the session from now on
        if not self.finished:
            await self.bridge.abandon()  # it may be making the model that of the run, and puts that back
        self.closed = True
        self._allow_steps()
        self._allow_steps = lambda: None
        if self.replicated is not None and not self._whole:
            self.replicated.detach()
        if self.divided is not None and not self._whole:
            self.divided.leave_divided()
        for fabric in self._fabrics:
            await fabric.close()
        for feed in self._feeds[:]:
            await self.end_batches(feed)
        await self.members.stop()
        await self.bridge.close()


class Guarded(Generic[T]):
    """Implements `zmqtrain.data.bridge.Awaitable`: what `Core.guard` returns."""

    def __init__(self, core: Core, coroutine: Coroutine[Any, Any, T]) -> None:
        self._core, self._coroutine = core, coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        return self._core.run_guarded(self._coroutine).__await__()

    def close(self) -> None:
        """Close the coroutine without awaiting it."""
        self._coroutine.close()


def _require_whole(name: str, number: object, least: int) -> None:
    if number is not None and (not isinstance(number, Integral) or isinstance(number, bool) or number < least):
        raise UsageError(f"session.batches({name}={number!r}): it must be a whole number from {least} on")


def _staging(device: torch.device) -> Staging | None:
    accelerator = accelerator_of(device)
    return None if accelerator is None else StreamStaging(accelerator, device)
