"""A worker's life between joining and leaving the run: steps, evaluations, checkpoints, and how it ends.

::

    restore -> exchange.start -> [ checkpoint? -> step -> evaluate? ] ... -> all have trained -> last evaluation -> last checkpoint

Before each step another process may ask the run to stop early (`zmqtrain.membership.common_stop`): it then ends there, without an
evaluation. `zmqtrain.train.checkpoint.run_model` says which model is evaluated and kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.division import length_of
from zmqtrain.data.slots import SlotPlan
from zmqtrain.errors import CheckpointError, PeerLostError, TaskError, TooLateError, UsageError, ZmqTrainError
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Exchange, RunModel
from zmqtrain.exchange.checkpoint_part import wait_committed
from zmqtrain.exchange.members import Members
from zmqtrain.membership.common_stop import Here, StopPoint
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.train.participant import Participant
from zmqtrain.train.rebalance import Rebalance, announce
from zmqtrain.train.work import ModelState, StepResult, Work
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload

#: Workers that wait for each other only occasionally may be this many checkpoints apart.
MOST_KEPT = 64


#: Parameters that should be the same on all workers may differ by this much: by rounding, on processors of different kinds.
MOST_APART = 1e-3


class TrainingPhase(Enum):
    """What the worker is doing, as far as stopping it depends on it."""

    BETWEEN = "between steps"
    COMPUTING = "forward and backward"
    ENDING = "the exchange of the step"


class TrainingOutcome(Enum):
    """How training came to its end, or to a pause."""

    DONE = "no step is left"
    REACHED = "the metric has reached its aim"
    STOPPED = "all workers were asked to stop"
    ABANDONED = "a step was abandoned"


class TrainLoop:
    """Trains one worker. `run` it once; `zmqtrain.train.worker` stops it from outside."""

    def __init__(
        self,
        context: RoleContext,
        work: Work,
        exchange: Exchange,
        members: Members,
        *,
        begun: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """``begun(step)`` is awaited before the first step, once all is ready for it."""
        self._begun = begun
        self._unrecorded: Callable[[], None] | None = None  # the step that is being exchanged
        self._context, self.work, self.exchange, self._members = context, work, exchange, members
        self._endpoint, self._recorder = context.endpoint, context.recorder
        self._job = context.topology.job
        self.step = 0
        """The step that is being computed or comes next."""
        self.took_part = False
        """Whether this worker has begun a step."""
        self.phase = TrainingPhase.BETWEEN
        self.stop_in: int | None = None
        """Stop as soon as this step's gradients are computed, before its exchange ends."""
        self._aim_reached = False  # set by group 0, which evaluates for all groups if they are not in step
        self._part = Participant(
            context,
            exchange,
            members,
            work.replica,
            step=lambda: self.step,
            quiet=self._quiet,
            state_mean=work.state_mean,
            begin_alike=work.begin_alike,
        )
        self._rebalance = Rebalance.of(context, work.shares)
        self.halted = False
        """The run was stopped in the middle of a step, so the replica's parameters can no longer be waited for."""
        self._kept: list[int] = []  # the steps of the newest checkpoints for which this worker's part is on disk
        self._evaluated: tuple[int, dict[str, float]] | None = None  # the last evaluation, and its step
        self._ended_at: int | None = None
        self._model_of: tuple[PeerId, ...] = ()  # whose the run's newest model is
        self._failure: TaskError | UsageError | None = None  # why the last evaluation failed here
        self._job_batch = context.topology.compute.batch_size
        self._samples = 0  # number of samples that the run's model has been trained on
        self._endpoint.serve("reached", self._on_reached)

    @property
    def stop_point(self) -> StopPoint:
        """Where other processes ask for a common step of all workers."""
        return self._part.stop_point

    async def run(self) -> None:
        """Train to the end."""
        work, exchange, job, stop_point = self.work, self.exchange, self._job, self._part.stop_point
        members = self._members
        if members.late:
            await work.take_course(self._endpoint)
        restored = None if members.late else await work.restore(self._endpoint, exchange)
        members.limits = self._limits()
        if not members.late:
            members.begin_division(restored or 0)
            if members.takes_turns and work.steps_per_epoch is not None:
                members.begin_slots(restored or 0)
        work.connect(exchange.bucket_ready)
        self.step = first = await self._part.start(restored=restored)
        if self._begun is not None:
            await self._begun(first)
        steps = self._steps()
        if members.late and members.slots is None and members.division is None and steps is not None and first >= steps:
            raise TooLateError(self._endpoint.peer, "the others have begun all steps there are")
        if restored is None:
            for _ in range(first):
                work.after_step()
        self._samples = work.trained(first)
        if members.division is not None:
            left, taken = members.division.rest(first)
            self._samples += taken - length_of(left) - first * members.division.batch
        if members.slots is not None:
            members.slots.steps, members.slots.total = members.limits
        if members.division is not None:
            members.division.steps = job.steps if job.until is None else job.until.max_steps
            end = work.end(job.epochs or 1)
            if members.division.steps is None and job.until is None and end is not None:
                members.division.total = end * members.division.batch
        due = None if members.division is None else members.division.due(first)
        if (plan := members.slots) is not None and plan.total is not None:  # the steps are more if somebody is lost already
            due = self._job_batch * (plan.total - plan.done(first))
        self._recorder.event("start", step=first, steps=self._steps(), due=due, restored=restored is not None, **work.describe())
        announce(self._context, work.shares, first)
        elastic = members.slots is not None
        known = job.steps is not None or not (elastic or members.divides)  # otherwise losses may make it later
        stop_point.open(first, self._steps() if known else None)
        work.callbacks.parameters(first)
        await work.call_back()
        outcome = await self._train(first)
        until: int | None = None
        more = elastic or members.division is not None  # others may leave something to train
        while outcome is TrainingOutcome.DONE and more and (until := await self._part.all_trained(self._more)) is None:
            outcome = await self._train(first)
        if outcome is not TrainingOutcome.ABANDONED:
            await self._end(first, until, early=outcome is TrainingOutcome.STOPPED)

    async def _train(self, first: int) -> TrainingOutcome:
        """Train all steps that there are now. ``first``: this worker's first step in the run."""
        work, job, stop_point, members = self.work, self._job, self._part.stop_point, self._members
        again = False  # the step was given up, so that the group trains it once more
        while True:
            passes, sits_out = False, False
            if members.slots is not None:
                await members.settled()
                since = members.slots.eras[-1].since
                # It may have a part in later steps, because of a change.
                while not members.teams and not self._due() and self.step < since:
                    self.step += 1
                passes = not self._due() and self.step < since
                sits_out = self._sits_out(self.step)
            steps = self._steps()
            if steps is not None and self.step >= steps:
                return TrainingOutcome.DONE
            ended = not passes and not sits_out and not await work.more(self.step)
            if ended and members.slots is not None and members.slots.total is None:
                members.slots.steps = self.step  # the length of a stream is known only now
            if ended and await stop_point.end():
                return TrainingOutcome.DONE
            here = await stop_point.here(self.step)
            if here is Here.STOP:
                return TrainingOutcome.STOPPED
            if ended:  # the data has ended, for all workers, at a step where a checkpoint is due
                await stop_point.end()
                if here is Here.KEEP and work.keeps and not job.checkpoint_every:
                    await self._keep(self.step)
                return TrainingOutcome.DONE
            # Not at the end of the previous step: if training stops or ends there, that step's checkpoint is written elsewhere.
            due = here is Here.KEEP or (self._is_due(self.step) and self.step not in self._kept[-1:])
            if self.step > first and self._took_part(self.step - 1) and work.keeps and due and not again:
                await self._keep(self.step)
            again = False
            if passes:  # its team begins later
                self.step += 1
                work.after_step()
            elif not await (
                self.exchange.may_begin(self.step)
                if members.slots is None or members.takes_turns
                else members.begin(self.step, self._due)
            ):
                continue
            else:
                step = self.step
                work.callbacks.view(step, members.at(step))
                # It may have got something to train meanwhile, or nothing any more.
                trains = not self._sits_out(step)
                self.took_part = True
                if not await (self._train_step(last=step + 1 == steps) if trains else self._sit_out()):
                    return TrainingOutcome.ABANDONED
                again = self.step == step
            await work.call_back()
            if again:
                continue
            done = self.step
            await work.compare(done, first)
            if not self._took_part(done - 1):
                continue
            if job.eval_every and done % job.eval_every == 0 and done != self._steps():
                reached = await self._evaluate_between(done) and await stop_point.end()
                await work.call_back()
                if reached:
                    return TrainingOutcome.REACHED

    def _took_part(self, step: int) -> bool:
        """Whether this worker trained ``step`` from its beginning; it may also have come while its group gave it up."""
        members = self._members
        return members.incarnation(self._endpoint.peer, step) == members.own_incarnation

    def _limits(self) -> tuple[int | None, int | None]:
        """The steps, or the slots (`zmqtrain.data.slots`), after which training ends, as far as the job says so."""
        job, end = self._job, self.work.end(self._job.epochs or 1)
        steps = job.steps if job.until is None else job.until.max_steps
        if steps is not None or job.until is not None or end is None:
            return steps, None
        return None, end * self._context.placement.groups

    @property
    def _turns(self) -> SlotPlan | None:
        """Who trains which batches, if groups that have models of their own take turns at them."""
        return self._members.slots if self._members.takes_turns else None

    def _more(self) -> bool:
        """Whether a change of the members has left this worker something to train."""
        plan, slot = self._members.slots, self._members.slot
        if plan is None:
            steps = self._steps()
            return steps is not None and self.step < steps
        return any(slot(step) is not None or self._sits_out(step) for step in (self.step, max(self.step, plan.eras[-1].since)))

    def _due(self) -> bool:
        """Whether this worker has a part in the next step."""
        return self._members.slot(self.step) is not None or self._sits_out(self.step)

    def _sits_out(self, step: int) -> bool:
        """Whether this worker has to take part in a step in which it has nothing to train: groups that train in step stay so."""
        return (self.exchange.synchronous or self._members.takes_turns) and self._members.sits_out(step)

    def _is_due(self, step: int) -> bool:
        every = self._job.checkpoint_steps
        return every > 0 and step % every == 0

    async def _keep(self, step: int) -> None:
        """Write this worker's part of a checkpoint during training. It is complete when all workers have reached this step."""
        await self.exchange.settle()
        await self.work.quiet()
        leads = await self._part.leads(step, "keep")
        await self._have_servers_keep(step, leads=leads, save=True, last=False)
        await self._send_model(step, await self._model_at(step, leads=leads, last=False), alone=False)
        await self._save(step)

    async def save_all(self, step: int, *, within_s: float | None = None) -> int | None:
        """Try to write an extra checkpoint at ``step``, since the run ends early.

        Returns ``step`` once the checkpoint is on disk; ``None`` if there is none."""
        context = self._context
        if not self.work.keeps:
            return None
        try:
            async with asyncio.timeout(within_s):
                if step not in self._kept:
                    last = self._ended_at is not None
                    leads = await self._part.leads(step, "save")
                    await self._have_servers_keep(step, leads=leads, save=True, last=last, in_turn=False)
                    await self._save(step)
                    async with asyncio.timeout(context.timeouts.request_s):  # other workers may have given up
                        state = await self._model_at(step, leads=leads, last=last)
                    await self._send_model(step, state, alone=False)
                kept = await wait_committed(self._endpoint, step, timeout_s=context.timeouts.request_s)
        except (ZmqTrainError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            self._recorder.event("part of a checkpoint failed", step=step, reason=reason)
            return None
        return step if kept else None

    def last_good(self, step: int) -> int:
        """The newest step whose checkpoint contains nothing of ``step`` or later.

        If gradients are added up over several steps, the sums already contain something of ``step`` on workers whose loss is
        finite. It is then the newest step with a checkpoint, or after which gradients were exchanged."""
        exchanged = step
        while exchanged and not self.exchange.exchanges(exchanged - 1):
            exchanged -= 1
        return max((kept for kept in self._kept if exchanged <= kept <= step), default=exchanged)

    # What is kept of the run.

    async def _have_servers_keep(self, step: int, *, leads: bool, save: bool, last: bool, in_turn: bool = True) -> None:
        """One worker asks the servers to keep their state."""
        if leads and self._part.own.rank == 0 and self.work.keeps:
            if save:
                await self.exchange.keep(step, last=last, in_turn=in_turn)
            await self.work.keep_merged(step, save=save)

    async def _save(self, step: int) -> None:
        """Write this worker's part of the checkpoint at ``step``. Nothing changes the parameters in the meantime."""
        start = asyncio.get_running_loop().time()
        if self.work.keeps:
            await self.work.save(self._endpoint, self.exchange, step)
            self._kept = [*self._kept, step][-MOST_KEPT:]
            self.work.callbacks.checkpoint(step)
            self._recorder.event("checkpoint", step=step, seconds=asyncio.get_running_loop().time() - start)

    async def _model_at(self, step: int, *, leads: bool, last: bool) -> ModelState | None:
        """The run's model, on the worker that sends it; ``None`` elsewhere."""

        async def gather(group: Group) -> ModelState | None:
            async with self._part.run_model(group, f"keep {step}", kept=None if last else step, last=last):
                return await self._state(group, step)

        apart = self._part.served_elastically  # the servers have the model, and groups need not be in step
        if self.exchange.averaged or (self._members.survives and not apart):  # anyone may be the first who is left
            return await self._members.together(f"keep/{step}", step, gather)
        return await gather(self._part.own) if leads else None

    async def _state(self, group: Group, step: int) -> ModelState | None:
        """The whole state of the replica, on the first member of ``group``; ``None`` elsewhere."""
        await self._members.aligned(f"state {step}", group)
        self._model_of = group.members
        first = group.members[0]
        sender = self._context.placement.role(first)
        if not self.work.keeps or sender.group != self._context.role.group:
            return None
        # With means, or where one of a team has read the model alone, the parameters change back before the state is sent.
        copied = self.exchange.averaged or bool(self._members.teams)
        state = await self.work.model_state(step, copied=copied, to=sender.position)
        return state if first == self._endpoint.peer else None

    async def _send_model(self, step: int, state: ModelState | None, *, alone: bool) -> None:
        if state is None:
            return
        self._recorder.audit("run model", step=step, state=state, members=list(self._model_of))
        moved = self.exchange.model is RunModel.SERVERS and not self.exchange.synchronous and step != self._ended_at
        metrics = self._evaluated[1] if self._evaluated is not None and self._evaluated[0] == step and not moved else {}
        about = self._part.about_model(self._samples - self._added_up(step), metrics)
        await self.work.send_model(self._endpoint, step, state, about, alone=alone)

    def _added_up(self, step: int) -> int:
        """The number of samples whose gradients are added up before ``step``, but not exchanged yet."""
        division, each, samples = self._members.division, self._job_batch * self._context.placement.groups, 0
        while step and not self.exchange.exchanges(step - 1):
            step -= 1
            samples += each if division is None else division.size(step)
        return samples

    async def _quiet(self) -> None:
        if not self.halted:  # after a halt the replica only raises the reason
            await self.work.quiet()

    def _steps(self) -> int | None:
        """How many steps each group trains; None if that depends on a metric or on the end of the data."""
        job = self._job
        if job.until is not None and not self.work.evaluates:
            raise UsageError("[job] until needs an evaluation: give the task eval_data")
        if self._members.slots is not None:
            return self._members.slots.end
        if self._members.division is not None:
            return self._members.division.end
        if job.until is not None:
            return job.until.max_steps
        if job.steps is not None:
            return job.steps
        return self.work.end(job.epochs or 1)

    async def _train_step(self, *, last: bool) -> bool:
        """Train one step. Returns False if the step was abandoned."""
        loop, step = asyncio.get_running_loop(), self.step
        start = loop.time()
        self.phase = TrainingPhase.COMPUTING
        self._recorder.audit("begin_step", step=step)
        if self._members.divides:
            self._recorder.audit("divides", step=step, spans=self._members.spans(step))
        if self._turns is not None and (slot := self._members.slot(step)) is not None:
            self._recorder.audit("takes", step=step, slot=slot.number)
        self.exchange.begin_step(step)
        epoch = self.work.epoch(step)
        result = await self.work.train_step(step, ahead=not last, hand_over=self.exchange.exchanges(step))
        if self.stop_in == step:
            return False
        self.phase = TrainingPhase.ENDING
        handed_over = loop.time()
        self._unrecorded = partial(self._record_step, step, epoch, result, start, handed_over)
        with self._recorder.span("end of step", "wait", step=step):
            await self.exchange.end_step()
        self.phase = TrainingPhase.BETWEEN
        if self.exchange.repeats(step):
            return True
        self._count(step)
        lr = self.work.lr
        self.work.after_step()
        if self._rebalance is not None:
            await self._rebalance.after(step, result.samples, result.compute_s)
        self._record_step(step, epoch, result, start, handed_over, lr)
        return True

    def counts_up_to(self, step: int) -> None:
        """Training has broken off, and all steps up to ``step`` count: record the last one, if that was still to come."""
        if self._unrecorded is not None and self.step == step:
            self._unrecorded()

    def _record_step(
        self, step: int, epoch: int, result: StepResult, start: float, handed_over: float, lr: float | None = None
    ) -> None:
        loop, self._unrecorded = asyncio.get_running_loop(), None
        updating_s = self.work.updating_s()
        values: dict[str, EventValue] = {
            "epoch": epoch,
            "loss": result.loss,
            "samples": result.samples,
            "seconds": loop.time() - start,
            "compute_s": result.compute_s + updating_s,
            "exposed_s": result.exposed_s + max(0.0, loop.time() - handed_over - updating_s),
            "data_s": result.data_s,
            **({} if lr is None else {"lr": lr}),
            **self._part.staleness(),
            **({} if result.fc_wait_s is None else {"fc_wait_s": result.fc_wait_s}),
        }
        self._recorder.event("step", step=step, **values)
        self.work.callbacks.step(step, values)

    async def _sit_out(self) -> bool:
        """Take part in a step in which only others have something to train. Returns False if the step was abandoned."""
        step = self.step
        if self.stop_in == step:
            return False
        self.phase = TrainingPhase.ENDING
        with self._recorder.span("sits out", "wait", step=step):
            await self.exchange.sit_out(step)
        self.phase = TrainingPhase.BETWEEN
        if not self.exchange.repeats(step):
            self._count(step)
            self.work.sat_out(step)
        return True

    def _count(self, step: int) -> None:
        """The step is done."""
        self.step += 1
        members = self._members
        if members.division is not None:
            self._samples += members.division.size(step)
        elif (turns := self._turns) is not None:
            self._samples += self._job_batch * turns.taken(step)
        else:
            groups = len(members.teams) or len({self._context.placement.role(peer).group for peer in members.at(step)})
            self._samples += groups * self._job_batch

    async def _evaluate_between(self, done: int) -> bool:
        """Evaluate if it is this worker's turn. Returns whether training ends here, which is the same for all workers of a
        group."""
        reached = False
        together = self.exchange.synchronous or self.exchange.averaged
        leads = not together and await self._part.leads(done, "evaluate")
        if self.work.evaluates and (together or leads):
            await self.exchange.settle()
            values = await (self._evaluate_together(done) if together else self._evaluate_servers(done))
            reached = self._reached(values)
            if reached and not together and self._context.role.position == 0:
                async with asyncio.TaskGroup() as tasks:
                    for peer in (peer for peer in self._members.at(done) if peer not in self._part.own.members):
                        tasks.create_task(self._tell_reached(peer))
        if self._job.until is None or together or leads:
            return reached
        # The members of a group learn at different moments that the run ends, but must train the same number of steps.
        flag = TensorPayload.empty(1, "float64")
        flag.numpy()[0] = float(self._aim_reached)
        await all_reduce(self._part.own, flag, ("reached", done))
        return bool(flag.numpy()[0])

    def _reached(self, values: Mapping[str, float] | None) -> bool:
        until = self._job.until
        if until is None or values is None:
            return False
        value = until.value(values)
        if value is None:
            raise UsageError(
                f"[job] until: there is no metric {until.metric!r}; the task's evaluation has {', '.join(values)}. Metrics that "
                "are no means over samples are left out: return the pair (sum, weight), or let all eval_data be one batch"
            )
        return until.reached(value)

    def _say_if_not_reached(self, values: Mapping[str, float] | None) -> None:
        until = self._job.until
        if until is None or values is None or self._reached(values):
            return
        text = f"{until.metric} has not reached {until.reaches:g}: that of the run's model is {until.value(values):.6g}"
        self._recorder.event("warning", step=self.step, text=text)

    async def _tell_reached(self, peer: PeerId) -> None:
        try:
            await self._endpoint.request(peer, "reached", timeout=self._context.timeouts.request_s)
        except PeerLostError:
            if not self._members.survives:
                raise

    async def _on_reached(self, caller: PeerId) -> Value:
        self._aim_reached = True
        return None

    async def _evaluate_together(self, done: int) -> dict[str, float] | None:
        tag, exchange = f"evaluate {done}", self._context.topology.exchange
        gossip = exchange.gossip if exchange.kind == "gossip" else None

        async def evaluate(group: Group) -> dict[str, float] | None:
            if gossip and not gossip.average_evaluations:
                values = await self._evaluate(group, done, tag)
                self._evaluated = None  # each group has evaluated its own parameters
                return values
            async with self._part.run_model(group, tag):
                return await self._evaluate(group, done, tag)

        return await self._members.together(f"evaluate/{done}", done, evaluate)

    async def _evaluate_servers(self, done: int) -> dict[str, float] | None:
        """While other groups train, evaluate the servers' parameters of one moment."""
        tag = f"evaluate {done}"
        async with self._part.run_model(self._part.own, tag):
            return await self._evaluate(self._part.own, done, tag, still=True)

    async def _evaluate(
        self, group: Group, step: int, tag: str, *, still: bool = False, last: bool = False
    ) -> dict[str, float] | None:
        """``None``: it has failed on another worker, which says so; or here, where that does not end the run before its model is
        kept (``last``)."""
        start = asyncio.get_running_loop().time()
        with self._recorder.span("evaluate", "compute", step=step):
            values = await self.work.evaluate(group, tag, still=still)
        if isinstance(values, TaskError | UsageError):
            if not last:
                raise values
            self._failure = values
        if not isinstance(values, dict):
            return None
        self._evaluated = (step, values)
        self.work.callbacks.eval(step, values)
        if group.rank == 0:
            seconds = asyncio.get_running_loop().time() - start
            self._recorder.event("eval", step=step, seconds=seconds, **values)
        return values

    # The end.

    async def _end(self, first: int, until: int | None, *, early: bool) -> None:
        """All have trained, or stop before the same step: evaluate the run's model unless ``early``, and keep it.

        ``until``: what all have agreed on already. (They must not do so twice: one that comes in between would do it once.)"""
        exchange, work, members, job = self.exchange, self.work, self._members, self._job
        alike = job.until is None or exchange.synchronous or exchange.averaged
        step = self._ended_at = await self._part.ended(alike=alike) if until is None else until
        if self._turns is not None:  # who is lost from here on takes along what nobody else has
            self._recorder.audit("all trained", step=step, early=early)
        if early:
            kept = step > first and await self.save_all(step) is not None
        else:
            checkpoint = work.keeps and step > 0 and bool(job.checkpoint_every)
            await self._have_servers_keep(step, leads=await self._part.leads(step, "last"), save=checkpoint, last=True)
            # Also of those who have come when there was nothing left to train.
            served = None if members.takes_turns else members.slots
            members_since = step if served is None else max(step, served.eras[-1].since + 1)
            state = await members.together("last", members_since, self._last)
            if step > 0:
                await self._send_model(step, state, alone=not checkpoint)
            if checkpoint:
                await self._save(step)
                await self._wait_for_last(step)
        await work.call_back()
        await self._part.stop()
        if self._failure is not None:
            raise self._failure
        turns = self._turns
        done = {} if turns is None else {"batches": turns.done(self.step) - turns.done(turns.eras[0].since)}
        if early:
            self._recorder.event("stopped", step=step, kept=kept, **done)
            return
        samples, spread = self.work.trained(self.step) // self._context.placement.groups, self._part.spread
        self._recorder.event("finish", step=self.step, steps=self.step, group_samples=samples, replica_spread=spread, **done)

    async def _wait_for_last(self, step: int) -> None:
        """Wait until the final checkpoint is on disk. In a run that survives losses, a failure to write it is only recorded."""
        try:
            await wait_committed(self._endpoint, step, timeout_s=self._context.timeouts.barrier_s)
        except CheckpointError as error:
            if not self._members.survives:
                raise
            self._recorder.event("part of a checkpoint failed", step=step, reason=str(error))

    async def _last(self, group: Group) -> ModelState | None:
        """Called by all workers: the last evaluation. Returns the evaluated model on the worker that sends it; ``None``
        elsewhere."""
        async with self._part.run_model(group, "last", last=True):
            if not self.exchange.averaged:
                self._part.spread = await self.work.make_equal(group, "last")
                if self.exchange.synchronous and group.rank == 1 and self._part.spread > MOST_APART:
                    self._recorder.event("warning", step=self.step, text=_apart(self._part.spread))
            if self.work.evaluates:
                # Groups that are not in step may have ended at different steps.
                values = await self._evaluate(group, self._ended_at or self.step, "last evaluate", last=True)
                if group.rank == 0 and self._failure is None:
                    self._say_if_not_reached(values)
            return await self._state(group, self._ended_at or self.step)


def applies_here(reason: Mapping[str, Any], exchange: Exchange, group: int) -> bool:
    """Whether a worker that is stopped by another worker's bad loss can finish the previous step together with that worker."""
    return exchange.synchronous or reason.get("group") == group


def _apart(spread: float) -> str:
    return (
        f"workers that should have the same parameters had different ones at the end, by up to {spread:.2g}: something in the task "
        "has changed them differently on each worker (a callback, or an optimizer that draws with numpy or random?). The run's "
        "model has those of the first worker"
    )
