"""A worker's life between joining and leaving the run: steps, evaluations, checkpoints, and how it ends.

::

    restore -> exchange.start -> [ step -> evaluate? -> checkpoint? ] ... -> exchange.stop -> all have trained -> last evaluation

Before each step the run may be asked to stop early (`zmqtrain.membership.common_stop`): then it ends with a checkpoint instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum
from typing import Any

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.checkpoint_part import wait_committed
from zmqtrain.exchange.members import Members, group_of
from zmqtrain.membership.common_stop import StopPoint
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.train.rebalance import Rebalance, announce
from zmqtrain.train.work import Work
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload

#: Workers that wait for each other only now and then may be so many checkpoints apart.
MOST_KEPT = 64


class Phase(Enum):
    """What the worker does now, as far as stopping it cares."""

    BETWEEN = "between steps"
    COMPUTING = "forward and backward"
    ENDING = "the exchange of the step"


class TrainLoop:
    """Trains one worker. `run` it once; stopping it from outside is `zmqtrain.train.worker`'s business."""

    def __init__(self, context: RoleContext, work: Work, exchange: Exchange, members: Members) -> None:
        self._context, self.work, self.exchange, self._members = context, work, exchange, members
        self._endpoint, self._recorder = context.endpoint, context.recorder
        self._job = context.topology.job
        self.step = 0
        """The step that is computed, or comes next."""
        self.phase = Phase.BETWEEN
        self.stop_in: int | None = None
        """Stop as soon as this step's gradients are computed, before its exchange ends."""
        self._aim_reached = False  # by group 0, which evaluates for all where groups are not in step
        role, placement = context.role, context.placement
        own = placement.group_members(role.group)
        self._own = group_of(context.endpoint, own, f"evaluate/{role.group}", context.ladder.barrier_s)
        self._rebalance = Rebalance.of(context, work.shares)
        self._stop_point = StopPoint(context.endpoint, timeout_s=context.ladder.barrier_s)
        self._kept: list[int] = []  # the steps of the newest checkpoints of which this worker's part is on disk
        self._endpoint.serve("reached", self._on_reached)

    async def run(self) -> None:
        """Train to the end."""
        work, exchange, job = self.work, self.exchange, self._job
        restored = None if self._members.late else await work.restore(self._endpoint, exchange)
        work.connect(exchange.bucket_ready)
        joined = await exchange.start(work.replica, restored=restored is not None)
        if joined is not None:
            for _ in range(joined):
                work.after_step()
        self.step = first = restored or joined or 0
        steps = self._steps()
        self._recorder.event("start", step=first, steps=steps, restored=restored is not None, **work.describe())
        announce(self._context, work.shares, first)
        self._stop_point.open(first, steps)
        reached = False
        while not reached and (steps is None or self.step < steps):
            if await self._stop_point.here(self.step):
                await self._stop_early(first)
                return
            if not await self._train_step(last=self.step + 1 == steps):
                return
            done = self.step
            if job.eval_every and done % job.eval_every == 0 and done != steps:
                reached = await self._evaluate_between(done) and await self._stop_point.end()
            if job.checkpoint_every and done % job.checkpoint_every == 0:
                await exchange.settle()
                await work.quiet()
                await self.save(done)
        await self._finish()

    async def save(self, step: int) -> None:
        """This worker's part of the checkpoint at ``step``. Nothing changes the parameters meanwhile."""
        start = asyncio.get_running_loop().time()
        if await self.work.save(self._endpoint, self.exchange, step):
            self._kept = [*self._kept, step][-MOST_KEPT:]
            self._recorder.event("checkpoint", step=step, seconds=asyncio.get_running_loop().time() - start)

    async def save_all(self, step: int, *, within_s: float | None = None) -> int | None:
        """A checkpoint at ``step`` out of turn, for which servers are asked for their parts as they are now. Best effort, since the
        run ends anyway, for another reason.

        Returns its step once it is on disk; ``None`` where there is none."""
        context = self._context
        try:
            async with asyncio.timeout(within_s):
                if step not in self._kept:
                    if context.role.index == 0:
                        for server in (*context.placement.server_roles, *context.placement.fc_roles):
                            await self._endpoint.request(server.peer, "checkpoint", step, timeout=context.ladder.request_s)
                    await self.save(step)
                if step in self._kept:
                    await wait_committed(self._endpoint, step, timeout_s=context.ladder.request_s)
        except (ZmqTrainError, TimeoutError) as error:
            self._recorder.event("part of a checkpoint failed", step=step, reason=str(error) or f"not done after {within_s} s")
            return None
        return step if step in self._kept else None

    def last_good(self, step: int) -> int:
        """Of which step a checkpoint is right if none may have anything of ``step`` and what follows.

        Gradients that are added up over several steps have something of it already, on workers whose loss is good: then it is the
        newest step of which there is a checkpoint, or after which gradients were exchanged."""
        exchanged = step
        while exchanged and not self.exchange.exchanges(exchanged - 1):
            exchanged -= 1
        return max((kept for kept in self._kept if exchanged <= kept <= step), default=exchanged)

    def _steps(self) -> int | None:
        """How many steps each group trains; None: until a metric is reached."""
        job = self._job
        if job.until is not None:
            if not self.work.evaluates:
                raise UsageError("[job] until needs an evaluation: give the task eval_data")
            return job.until.max_steps
        if job.steps is not None:
            return job.steps
        return (job.epochs or 1) * self.work.steps_per_epoch

    async def _train_step(self, *, last: bool) -> bool:
        """One step. False where it was given up."""
        loop, step = asyncio.get_running_loop(), self.step
        start = loop.time()
        self.phase = Phase.COMPUTING
        self._recorder.witness("begin_step", step=step)
        self.exchange.begin_step(step)
        result = await self.work.train_step(step, ahead=not last, hand_over=self.exchange.exchanges(step))
        if self.stop_in == step:
            return False
        self.phase = Phase.ENDING
        handed_over = loop.time()
        with self._recorder.span("end of step", "wait", step=step):
            await self.exchange.end_step()
        self.phase = Phase.BETWEEN
        self.step += 1
        self.work.after_step()
        if self._rebalance is not None:
            await self._rebalance.after(step, result.samples, result.compute_s)
        updating_s = self.work.updating_s()
        staleness = list(self.exchange.staleness())
        self._recorder.event(
            "step",
            step=step,
            epoch=step // self.work.steps_per_epoch,
            loss=result.loss,
            samples=result.samples,
            seconds=loop.time() - start,
            compute_s=result.compute_s + updating_s,
            exposed_s=result.exposed_s + max(0.0, loop.time() - handed_over - updating_s),
            staleness=sum(staleness) / len(staleness) if staleness else None,
            staleness_max=max(staleness, default=None),
            **({} if result.fc_wait_s is None else {"fc_wait_s": result.fc_wait_s}),
        )
        return True

    async def _evaluate_between(self, done: int) -> bool:
        """Evaluate where it is this worker's turn. Returns whether training ends here; the same for all of a group."""
        reached = False
        everybody = self.exchange.synchronous or self.exchange.averaged
        if self.work.evaluates and (everybody or self._context.role.group == 0):
            await self.exchange.settle()
            values = await (self._evaluate_together(done) if everybody else self._evaluate(self._own, done))
            reached = self._reached(values)
            if reached and not everybody and self._context.role.position == 0:
                async with asyncio.TaskGroup() as tasks:
                    for peer in (peer for peer in self._members.at(done) if peer not in self._own.members):
                        tasks.create_task(self._endpoint.request(peer, "reached", timeout=self._context.ladder.request_s))
        if self._job.until is None or everybody or self._context.role.group == 0:
            return reached
        # The members of a group learn at different moments that the run is to end, but must take the same number of steps.
        flag = TensorPayload.empty(1, "float64")
        flag.numpy()[0] = float(self._aim_reached)
        await all_reduce(self._own, flag, ("reached", done))
        return bool(flag.numpy()[0])

    def _reached(self, values: Mapping[str, float]) -> bool:
        until = self._job.until
        if until is None:
            return False
        value = values.get(until.metric, values.get(f"eval_{until.metric}"))
        if value is None:
            raise UsageError(f"[job] until: there is no metric {until.metric!r}; the task's evaluation gives {', '.join(values)}")
        return value <= until.reaches if "loss" in until.metric else value >= until.reaches

    async def _on_reached(self, caller: PeerId) -> Value:
        self._aim_reached = True
        return None

    async def _evaluate_together(self, done: int) -> dict[str, float]:
        mean = self.exchange.averaged and self._context.topology.exchange.gossip.average_evaluations
        return await self._members.together(f"evaluate/{done}", done, lambda group: self._evaluate(group, done, mean=mean))

    async def _evaluate(self, group: Group, step: int, *, mean: bool = False, tag: str | None = None) -> dict[str, float]:
        start = asyncio.get_running_loop().time()
        with self._recorder.span("evaluate", "compute", step=step):
            values = await self.work.evaluate(group, tag or f"evaluate {step}", mean=mean)
        if group.rank == 0:
            seconds = asyncio.get_running_loop().time() - start
            self._recorder.event("eval", step=step, seconds=seconds, **values)
        return values

    async def _stop_early(self, first: int) -> None:
        """All have trained as many steps, and none trains another: keep them, and end."""
        context, exchange = self._context, self.exchange
        await exchange.settle()
        await self.work.quiet()
        kept = False
        if self.step > first:
            if context.placement.servers or context.placement.fc_servers:
                await context.membership.barrier("stopped")  # now servers have what all have pushed
            kept = await self.save_all(self.step) is not None
        await exchange.stop()
        if not self._members.survives:
            await context.membership.barrier("trained")
        await self._members.stop()
        self._recorder.event("stopped", step=self.step, kept=kept)

    async def _finish(self) -> None:
        """All have trained: evaluate the run's model, and end the exchange."""
        exchange, work, members = self.exchange, self.work, self._members
        await exchange.settle()
        await work.quiet()
        await exchange.stop()  # before waiting: no other group may wait for this one's gradients
        if not members.survives:
            await self._context.membership.barrier("trained")
        mean = exchange.averaged

        async def last(group: Group) -> float:
            spread = await work.make_equal(group, "last", mean=mean)
            if work.evaluates:
                # Groups that are not in step may have ended at different steps.
                await self._evaluate(group, self.step, tag="last evaluate")
            return spread

        spread = await members.together("last", self.step, last)
        await members.stop()
        samples = self.step * self._context.topology.compute.batch_size
        self._recorder.event("finish", step=self.step, steps=self.step, group_samples=samples, replica_spread=spread)


def applies_here(reason: Mapping[str, Any], exchange: Exchange, group: int) -> bool:
    """Whether a worker that was stopped by another's bad loss can finish the step before it together with the other one."""
    return exchange.synchronous or reason.get("group") == group
