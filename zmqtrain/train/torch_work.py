"""A worker's work with torch: the task's model, data and optimizer, on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import barrier
from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.bridge import Bridge
from zmqtrain.data.loader import Finish
from zmqtrain.errors import ConnectivityError, UsageError
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Bucket, Exchange
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.optimizer import is_torchs_own
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.verify.case import NotComparable
from zmqtrain.topology.elastic import ASKING
from zmqtrain.train.alike import require_same_training, warn_of_differences
from zmqtrain.train.batches import make_batches
from zmqtrain.train.beginning import begin_alike
from zmqtrain.train.built import Built, build
from zmqtrain.train.callbacks import Callbacks
from zmqtrain.train.checkpoint.handed_over import HandedOver
from zmqtrain.train.checkpoint.saving import Saver, send_model, whole_state
from zmqtrain.train.checkpoint.settings import settings_to_resume
from zmqtrain.train.device.base import Device
from zmqtrain.train.device.make import device_of
from zmqtrain.train.divided import PartConverter, elements_of, loss_on_grid, make_fabric
from zmqtrain.train.evaluate import Evaluation, EvaluationSettings, spread_of_replicas
from zmqtrain.train.forgotten import Forgotten
from zmqtrain.train.loss_scale import LossScale
from zmqtrain.train.optimizer_state import require_kept_state
from zmqtrain.train.own_samples import (
    buffers_warning,
    differing_buffers,
    own_buffers,
    require_kept,
    versions_of,
)
from zmqtrain.train.remote_layers import RemoteLayers, RemoteStep
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.resized_rate import require_rates
from zmqtrain.train.shares import Scope, Shares, in_step
from zmqtrain.train.step import StepSettings, TrainStep
from zmqtrain.train.task import Task, shares_parameters, user_code
from zmqtrain.train.unreached import what_blinds
from zmqtrain.train.verifying import Ordinary, one_of_each, verify_task
from zmqtrain.train.weighting import LOSSES_TRIED, WeightSums, taken_apart
from zmqtrain.train.work import ModelState, Outcome, StepResult
from zmqtrain.wire.payload import Value

_SUMMED = "the weights of its loss are summed over the workers that train in step"


class TorchWork:
    """Implements `zmqtrain.train.work.Work`. Use `make` to create one."""

    def __init__(self, context: RoleContext, device: Device, built: Built, members: Members, remote: RemoteLayers | None) -> None:
        compute, exchange, role = context.topology.compute, context.topology.exchange, context.role
        self._context, self._device = context, device
        self._fabric, self._remote = built.fabric, remote
        self._bridge: Bridge | None = None
        self._task, self._replica, self._schedule = built.task, built.replica, built.schedule
        self.callbacks = Callbacks(built.task.callbacks, role.index, built.replica.model)
        if self.callbacks.reads and (built.fabric is not None or remote is not None):
            raise UsageError(
                "Callback.on_parameters() gets the whole model, but here a worker has only a part of it ([compute] grid, "
                "[parallel] statistics, or merged_fc): remove that setting, or this callback"
            )
        settings = StepSettings(
            rank=role.index,
            group_batch=compute.batch_size,
            accumulate=compute.accumulate,
            every=exchange.every_steps(context.placement.groups) if exchange.kind == "allreduce" else 1,
            precision=compute.precision,
            on_nan=context.topology.job.on_nan,
            blind=what_blinds(context.topology),
            shared=shares_parameters(context.topology) and built.fabric is None,
        )
        task = self._task
        self._step: RemoteStep
        if remote is None:
            self._step = self._make_step(settings)
        else:
            self._step = remote.make_step(task, self._replica, device, settings)
        self.shares = Shares.of(context.topology, context.placement, role)
        finish = Finish(
            partial(batch_of, forward=task.forward),
            pin=device.torch_device.type != "cpu" if built.source.pin is None else built.source.pin,
            channels_last=compute.channels_last,
            move=None if device.staging is None else device.staging.ahead,
        )
        thread = device.background("zmqtrain-loader")
        self._batches = make_batches(context, built.source, built.partition, self.shares, members, finish, thread)
        self._evaluation: Evaluation | None = None
        if task.eval_data is not None:
            at_once, groups = max(1, compute.batch_size // compute.columns), context.placement.groups
            evaluation = EvaluationSettings(at_once, compute.precision, compute.channels_last, groups)
            if remote is None:
                recorder, aligned = context.recorder, members.aligned
                self._evaluation = Evaluation(task, self._replica, device, evaluation, recorder, aligned=aligned)
            else:
                self._evaluation = remote.make_evaluation(task, self._replica, device, evaluation)
        self._update_s = 0.0
        model = self._replica.model
        if isinstance(model, ParallelModel) and context.topology.whole_groups:
            context.recorder.audit("holds", elements=partial(elements_of, model, self._replica.buckets))
        own = model.inner if isinstance(model, ParallelModel) else model
        self._forgotten: Forgotten | None = Forgotten(own, self._replica.optimizer)  # until the first checkpoint
        self._state_unseen = bool(context.topology.job.checkpoint_every) and not is_torchs_own(self._replica.optimizer)
        self._members = members
        self._ordinary = None if members.late else built.ordinary  # the others' model is the same
        self._verifying: NetworkFabric | None = None
        if self._ordinary is not None:
            self._verifying = make_fabric(context, device, "verify")
            assert self._verifying is not None
            self._replica.also_abort(self._verifying.abort)

    def _make_step(self, settings: StepSettings) -> TrainStep:
        context, device, loss = self._context, self._device, self._task.loss
        role, divided = context.role, self._fabric is not None
        weighted = loss_on_grid(loss, context.topology) if divided else taken_apart(loss)
        scope = Scope.of(context.topology, context.placement, role)
        groups = context.placement.groups if in_step(context.topology) else 1
        if weighted is not loss and context.topology.asks_elastic and in_step(context.topology):
            raise UsageError(
                f"the task's loss has class weights or an ignore_index: {_SUMMED}, so that none may be lost: remove {ASKING}"
            )
        if settings.precision == "float16" and not divided:
            self._replica.loss_scale = LossScale()
        if context.topology.job.on_resize != "keep":
            require_rates(self._replica.optimizer)
        timeout_s = context.timeouts.barrier_s
        self._bridge = Bridge(device.condition(), device.clock, 2 * timeout_s)
        self._replica.also_abort(self._bridge.abort)
        group = Group(
            context.endpoint, scope.members, scope.members.index(role.peer), f"weights{context.generation}", timeout_s=timeout_s
        )
        topology = context.topology
        first = self._need_all if topology.elastic and not (topology.whole_groups and not in_step(topology)) else None
        parts = context.topology.compute.columns * groups if divided else None
        weights = WeightSums(group, groups, self._bridge, first, parts=parts)
        return TrainStep(self._replica, weighted, device, settings, context.recorder, weights)

    async def _need_all(self) -> None:
        """Weights are summed over all workers in every step."""
        if self._context.topology.asks_elastic:
            raise UsageError(f"{_SUMMED}, so that none may be lost: remove {ASKING}, or return a plain mean")
        await self._context.membership.need_all(_SUMMED)

    @classmethod
    async def make(
        cls,
        context: RoleContext,
        members: Members,
        task: Task | None = None,
        *,
        make_remote: Callable[[Device], RemoteLayers] | None = None,
    ) -> TorchWork:
        """Make this worker's device, load the task and build its model in the compute thread. Raises `TaskError` and `UsageError`.

        ``task``: in place of the one that ``[job] task`` names. ``make_remote``: for a worker that has only the first layers."""
        device = device_of(context, local_rank=context.role.slot, keep=context.topology.compute.keep_memory)
        remote: RemoteLayers | None = None
        try:
            fabric = make_fabric(context, device)
            if make_remote is not None:
                remote = make_remote(device)
            built = await device.run(lambda: build(context, device, task, fabric, remote))
            await require_same_training(context, "task", built.facts)
            if built.attributes:
                await warn_of_differences(context, "task: data", built.attributes)
            if built.source.stream and context.era is not None:
                raise UsageError(
                    f"{built.source.name} is a stream, which is not divided anew when a worker is lost: remove {ASKING}"
                )
            if built.source.stream and context.topology.elastic:
                await context.membership.need_all(
                    f"{built.source.name} is a stream, and no other worker can take over a part of it"
                )
            return cls(context, device, built, members, remote)
        except BaseException:
            if remote is not None:
                await remote.close()
            await device.close(context.timeouts.grace_s)
            raise

    @property
    def replica(self) -> TorchReplica:
        return self._replica

    @property
    def task(self) -> Task:
        """What is trained."""
        return self._task

    @property
    def whole_updates(self) -> bool:
        return not is_torchs_own(self._replica.optimizer)

    @property
    def steps_per_epoch(self) -> int | None:
        return self._batches.steps_per_epoch

    def end(self, epochs: int) -> int | None:
        return self._batches.end(epochs)

    def trained(self, step: int) -> int:
        return self._batches.trained(step)

    async def take_course(self, endpoint: Endpoint) -> None:
        await self._saver(endpoint).take_course()

    async def more(self, step: int) -> bool:
        return await self._batches.more(step)

    def epoch(self, step: int) -> int:
        return self._batches.epoch(step)

    @property
    def evaluates(self) -> bool:
        return self._evaluation is not None

    def describe(self) -> dict[str, EventValue]:
        return {
            "parameters": sum(parameter.numel() for parameter in self._replica.parameters),
            "buckets": len(self._replica.buckets),
            "device": str(self._device.torch_device),
            "samples": self._batches.samples,
            "steps_per_epoch": self.steps_per_epoch,
            "data": self._batches.promise.values(),
        }

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        self._replica.connect(on_ready)

    async def restore(self, endpoint: Endpoint, exchange: Exchange) -> int | None:
        saver = self._saver(endpoint)
        step = await saver.restore(self._replica, exchange, self._device)
        job = self._context.topology.job
        if step is None and job.weights is not None:
            await saver.begin_with_weights(self._replica, exchange, state=job.optimizer_state == "kept")
        for _ in range(step or 0):
            self.after_step()
        return step

    async def begin_alike(self, group: Group, restored: bool) -> None:
        tensors, model = self._replica.untrained(buffers=not restored), self._replica.model
        if isinstance(model, ParallelModel) and self._members.late:  # each row has asked somebody else for what it has
            shards = model.shards_by_name()
            divided = {name for name, shard in shards.items() if shard.dimension is not None}
            tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[2] not in divided}
        elif self._fabric is not None:  # workers of a grid have parts, and the model was compared with the ordinary one
            return
        await begin_alike(tensors, group, "begin alike", self._device.run)

    @property
    def keeps(self) -> bool:
        return True

    async def save(self, endpoint: Endpoint, exchange: Exchange, step: int) -> None:
        await self._device.run(self._replica.take_copies)
        if self._forgotten is not None:
            forgotten, self._forgotten = self._forgotten, None
            for warning in forgotten.warnings(scheduled=self._schedule is not None) if self._context.role.index == 0 else ():
                self._context.recorder.event("warning", step=step, text=warning)
        await self._saver(endpoint, self._there(step)).save(step, self._replica, exchange, self._device)

    async def keep_merged(self, step: int, *, save: bool) -> None:
        if self._remote is not None:
            await self._remote.keep(step, save=save)

    async def model_state(self, step: int, *, copied: bool, to: int = 0) -> ModelState:
        await self._device.run(self._replica.take_copies)
        state = await self._device.run(lambda: whole_state(self._replica.model, copied=copied, to=to))
        if self._remote is not None and self._context.role.position == to:
            return {**state, **await self._remote.state(step)}
        return state

    async def send_model(
        self, endpoint: Endpoint, step: int, state: ModelState, about: Mapping[str, Value], *, alone: bool
    ) -> None:
        context = self._context
        mark = () if context.era is None else context.era.mark
        await send_model(endpoint, step, state, about, alone=alone, timeout_s=context.timeouts.barrier_s, mark=mark)

    async def prepare_update(self) -> None:
        """All gradients of the step are summed: do what needs others before the update (`TorchReplica.prepare_update`)."""
        if self._context.topology.optimizer.clip_norm:
            await self._device.run(self._replica.prepare_update)

    async def rest_at(self, step: int) -> None:
        """Training has broken off, and the replica was aborted: become what it is after ``step`` (`TorchReplica.rest_at`)."""
        await self._device.run(partial(self._replica.rest_at, step))

    async def hand_over(
        self, endpoint: Endpoint, exchange: Exchange, into: HandedOver | None, step: int, column: tuple[PeerId, ...]
    ) -> None:
        """Gather the state at ``step``, and hand it over on the first of ``column``: a worker of each row of the grid, in their
        order, all of which call this. The replica may have been aborted. Raises `ConnectivityError`."""
        fabric = NetworkFabric(
            endpoint, column, "hand over", condition=self._device.condition(), clock=self._device.clock,
            timeout_s=self._context.timeouts.barrier_s,
        )  # fmt: skip
        try:
            saver = replace(self._saver(endpoint), rank=column.index(endpoint.peer), group=0, position=0, size=(1, 1))
            parts = PartConverter.among(self._replica.model, fabric)
            await saver.hand_over(into, step, self._replica, exchange, self._device, parts)
        except BaseException:
            fabric.abort(ConnectivityError("the state is not handed over"))
            raise
        finally:
            await fabric.close()

    async def train_step(self, step: int, *, ahead: bool, hand_over: bool = True) -> StepResult:
        if self._remote is not None:
            self._remote.begin_step(step)
        asked = self._device.clock()
        batch = await self._batches.batch(step, ahead=ahead)
        data_s = self._device.clock() - asked
        if self._ordinary is not None:
            batch = await self._device.run(partial(batch.to, self._device.torch_device))
            await self._verify(self._ordinary, batch)
        if self._members.division is not None:
            self._replica.next_rate = self._context.topology.job.resized_rate(self._members.division.growth(step))
        batches = self._batches
        group_batch, own = batches.group_samples(step), batches.own_group_samples(step)
        compute = partial(self._step, step, batch, hand_over=hand_over, group_batch=group_batch, group_samples=own)
        if self._members.repeats or self._context.era is not None:
            await self._device.run(partial(self._replica.begin_again, step))
        result = await self._device.run(compute)
        self._batches.used(step)
        return replace(result, data_s=data_s)

    async def _verify(self, ordinary: Ordinary, batch: Batch) -> None:
        """Compare the divided model with the ordinary one, before the first step."""
        context, fabric, started = self._context, self._verifying, self._device.clock()
        model, device = self._replica.model, self._device.torch_device
        assert isinstance(model, ParallelModel)
        assert fabric is not None
        self._ordinary = None
        roles = map(context.placement.role, context.placement.group_members(context.role.group))
        references = one_of_each([role.host for role in roles])
        try:
            found = await self._device.run(
                lambda: verify_task(
                    self._task, context.topology, fabric, model.grid, ordinary, batch, device, references=references
                )
            )
        except NotComparable as reason:
            text = f"the divided model was not compared with the ordinary one: {reason}"
            context.recorder.event("warning", text=text)
        else:
            seconds = self._device.clock() - started
            context.recorder.event(
                "verified", samples=found.samples, precision=found.precision, images=found.images, seconds=seconds
            )
        finally:
            self._verifying = None
            await fabric.close()

    @property
    def lr(self) -> float | None:
        return float(self._replica.optimizer.param_groups[0]["lr"]) * self._replica.rate

    async def compare(self, done: int, first: int) -> None:
        if self._state_unseen and self._replica.optimizer.state:  # now, and not with the first checkpoint
            self._state_unseen = False
            require_kept_state(self._replica.optimizer)
        if done != first + LOSSES_TRIED or self._fabric is not None or self._members.late:
            return
        if self._members.splits:  # nobody may wait for one who may be lost, or may begin again later
            return
        buffers = own_buffers(self._replica.model)
        if isinstance(self._task.loss, nn.Module):
            buffers |= {f"Task.loss.{name}": buffer for name, buffer in own_buffers(self._task.loss).items()}
        if not buffers:
            return
        context = self._context

        async def differing(group: Group) -> list[str]:
            return await differing_buffers(buffers, group, f"buffers {done}")

        if in_step(context.topology):
            names = await self._members.together(f"buffers/{done}", done, differing)
        else:
            members, position = context.placement.group_members(context.role.group), context.role.position
            group = Group(context.endpoint, members, position, "buffers", timeout_s=context.timeouts.barrier_s)
            names = await differing(group)
        if names and context.role.index == 0:
            context.recorder.event("warning", step=done, text=buffers_warning(names))

    async def call_back(self) -> None:
        if not self.callbacks.waiting:
            return
        if self.callbacks.reads:
            await self.quiet()
        await self._device.run(self._deliver)

    def _deliver(self) -> None:
        """In the compute thread, where nothing else writes parameters meanwhile unless copies from a device are under way."""
        before = versions_of(self._replica.model) if self._device.staging is None else {}
        self.callbacks.deliver()
        require_kept(self._replica.model, before)

    def after_step(self) -> None:
        if self._schedule is None:
            return
        with warnings.catch_warnings():
            # torch expects optimizer.step() first, but it runs on the servers, or has run before the run was resumed.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            with user_code("the step() of Task.schedule's schedule"):
                self._schedule.step()

    def sat_out(self, step: int) -> None:
        self._batches.used(step)
        self.after_step()

    def updating_s(self) -> float:
        before, self._update_s = self._update_s, self._replica.update_s
        return self._update_s - before

    async def quiet(self) -> None:
        await self._device.run(self._replica.take_all)

    async def evaluate(self, group: Group, tag: str, *, still: bool = False) -> Outcome:
        assert self._evaluation is not None
        await self.quiet()
        if self._remote is None or not still:
            return await self._evaluation.run(group, tag)
        if group.rank == 0:
            await self._remote.hold(True)
        await barrier(group, (tag, "held"))
        values = await self._evaluation.run(group, tag)  # returns at the same time on all workers
        if group.rank == 0:
            await self._remote.hold(False)
        return values

    async def make_equal(self, group: Group, tag: str) -> float:
        await self.quiet()
        spread = await spread_of_replicas(self._replica, group, tag)
        await self.quiet()
        return spread

    def state_mean(self, group: Group) -> None:
        return None

    async def close(self, timeout_s: float) -> None:
        for fabric in (self._fabric, self._verifying):
            if fabric is not None:
                await fabric.close()
        if self._remote is not None:
            await self._remote.close()
        if self._bridge is not None:
            await self._bridge.close()
        await self._batches.close(timeout_s)
        await self._device.close(timeout_s)
        self.replica.release()  # torch keeps a model and what its hooks refer to for ever, if they refer to the model

    def _there(self, step: int) -> tuple[int, ...] | None:
        """The ranks that trained the previous step and are still present; ``None``: all, since no worker may be lost."""
        if not self._members.survives:
            return None
        before = max(0, step - 1)
        ranks = {worker.peer: worker.index for worker in self._context.placement.everyone}
        return tuple(ranks[peer] for peer in self._members.at(before) if self._members.there(peer, before))

    def _saver(self, endpoint: Endpoint, members: tuple[int, ...] | None = None) -> Saver:
        role, kind = self._context.role, self._context.topology.exchange.kind
        timeout_s = self._context.timeouts.barrier_s
        merged, data, era = self._remote is not None, self._batches, self._context.era
        compute = self._context.topology.compute
        return Saver(
            endpoint,
            kind,
            role.index,
            role.group,
            role.position,
            timeout_s=timeout_s,
            size=(compute.group_size, compute.columns),
            groups=self._context.placement.groups,
            data=data,
            settings=settings_to_resume(self._context.topology, data.samples, self._replica.optimizer),
            merged=merged,
            any_first=self._context.topology.elastic,
            mark=() if era is None else era.mark,
            source=None if era is None else era.fetch,
            members=members,
            whole=kind == "averaging" and self._members.splits,
        )
