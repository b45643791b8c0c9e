"""A worker's part in the run, whether the training loop is ours (`zmqtrain.train.loop`) or a script's (`zmqtrain.embed.core`)::

    start -> [ a step of the loop ] ... -> ended -> the run's model: become_run_model, or `run_model` for a while -> stop

In an elastic run, the workers that do these things together are those that trained the previous step and are still present.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import broadcast
from zmqtrain.events import EventValue
from zmqtrain.exchange.allreduce import spread
from zmqtrain.exchange.averaging.methods import copy_of
from zmqtrain.exchange.base import Exchange, Replica, RunModel
from zmqtrain.exchange.members import Members, group_of
from zmqtrain.membership.common_stop import StopPoint
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.all_trained import AllTrained
from zmqtrain.train.checkpoint.run_model import gathered, take_run_model
from zmqtrain.versions import versions
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload


class Participant:
    """One worker's participation. All methods are called on the event loop's thread."""

    def __init__(
        self,
        context: RoleContext,
        exchange: Exchange,
        members: Members,
        replica: Replica,
        *,
        step: Callable[[], int],
        quiet: Callable[[], Awaitable[None]],
        state_mean: Callable[[Group], None] | None = None,
        begin_alike: Callable[[Group, bool], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            step: returns how many steps this worker has trained.
            quiet: waits until the parameters of all buckets have arrived and nothing is being computed.
            begin_alike: called at the beginning with all workers, to have what the exchange does not send from the first one; and
                whether the run resumes a checkpoint. Also with a group that divides its model, and has come later.
            state_mean: called at the end while the replica holds the model of groups that differ, for an auditor.
        """
        self._replica, self._step, self._quiet, self._state_mean = replica, step, quiet, state_mean
        self._begin_alike = begin_alike
        self.exchange, self.members = exchange, members
        role, timeouts = context.role, context.timeouts
        self._role = role
        name, group = f"evaluate/{role.group}{context.generation}", context.placement.group_members(role.group)
        self._group = group_of(context.endpoint, group, name, timeouts.barrier_s)
        self._alone = group_of(context.endpoint, (role.peer,), f"{name}/{role.position}", timeouts.barrier_s)
        self.stop_point = StopPoint(context.endpoint, timeout_s=timeouts.barrier_s + context.membership.alone_s)
        self.spread = 0.0
        """The largest difference between this worker's parameters and the run's model, if it was measured."""
        self._trained = AllTrained(context, step)

    @property
    def own(self) -> Group:
        """Those who do together what one group does for all: this worker's compute group, or this worker alone if others of its
        group may be lost meanwhile. Call it after `start`."""
        return self._alone if self.members.splits else self._group

    async def start(self, *, restored: int | None = None) -> int:
        """Begin. On return all replicas are equal, or as they were in the checkpoint at step ``restored``.

        Returns the first step: 0, or that of the checkpoint, or, on a worker that replaces a lost one, the step that the others are
        about to train."""
        joined = await self.exchange.start(self._replica, restored=restored is not None)
        if (alike := self._begin_alike) is not None and not self.members.late:
            await self.members.together("begin alike", 0, lambda group: alike(group, restored is not None))
        elif alike is not None and self.served_elastically and self.own.size > 1:  # a group has come that divides its model
            await alike(self.own, False)
        return restored or joined or 0

    def staleness(self) -> dict[str, EventValue]:
        """The staleness of the parameters read since the last call, for the record of a step."""
        reads = list(self.exchange.staleness())
        return {"staleness": sum(reads) / len(reads) if reads else None, "staleness_max": max(reads, default=None)}

    async def ended(self, *, alike: bool) -> int:
        """This worker has trained its last step. If workers may not be lost, it returns when that is so of all workers.

        ``alike``: all train the same number of steps. Returns that number, or the largest number if not ``alike``. Raises the
        errors of
        `AllTrained.wait`."""
        if self.served_elastically:
            while (step := await self.all_trained(lambda: False)) is None:
                pass
            return step
        await self.exchange.settle()
        await self._quiet()
        await self.exchange.leave()  # first, so that no other group waits for this one's gradients
        return self._step() if self.members.survives else await self._trained.wait(self.members, alike=alike)

    @property
    def served_elastically(self) -> bool:
        """Whether model servers stay when workers are lost, and others train what these have left: then it may turn out at the end
        that there is more to train."""
        return self.members.slots is not None and not self.members.takes_turns

    async def all_trained(self, more: Callable[[], bool]) -> int | None:
        """This worker had nothing more to train. Returns when that is so of all, with the largest of their steps; or ``None``:
        others take part from now on, so that there may be ``more()``."""
        await self.exchange.settle()
        await self._quiet()
        await self.members.settled()
        plan = self.members.slots or self.members.division
        assert plan is not None
        # Others may have left something while this worker's last step was under way. In synchronous training it rests even so: it
        # has had no part in a step that the others are about to end, or have ended.
        if more() and not self.exchange.synchronous:
            return None
        era = plan.eras[-1]
        await self.exchange.leave()  # until others take part, and after that again
        return await self._trained.of_living(self.members, lambda: plan.eras[-1] is not era or more())

    async def leads(self, step: int, what: str) -> bool:
        """Whether this worker does what one worker, or one group, does for all (evaluations of servers' parameters, checkpoints):
        the first group or, if workers may be lost, the first that has trained up to ``step`` and is still there.

        Workers that can train only together hear of losses one after another, so the first of them decides. All of them call it,
        and once for each ``what``, at a step."""
        if not self.served_elastically:
            return self._role.group == 0
        before = max(0, step - 1)
        first = next((peer for peer in self.members.at(before) if self.members.there(peer, before)), None)
        if self.own.size == 1:
            return first == self._role.peer
        decided = TensorPayload.empty(1, "float64")
        decided.numpy()[0] = first in self.own.members
        await broadcast(self.own, decided, ("leads", what, step))
        return bool(decided.numpy()[0])

    @asynccontextmanager
    async def run_model(self, group: Group, tag: str, *, kept: int | None = None, last: bool = False) -> AsyncIterator[None]:
        """A context in which this worker's replica holds the run's model; all of ``group`` enter it. ``kept``: the model as of this
        checkpoint. ``last``: no group trains any more."""
        exchange = self.exchange
        await self._quiet()
        if not exchange.averaged:
            mine = [copy_of(bucket.parameters) for bucket in self._replica.buckets] if self.members.teams and not last else []
            await exchange.read(tag, kept=kept, last=last)
            await self._quiet()
            yield
            for bucket, kept_part in zip(self._replica.buckets, mine, strict=bool(mine)):
                bucket.parameters.copy_(kept_part)  # its team goes on with these
                self._replica.parameters_ready(bucket)
            return
        async with gathered(self._replica, exchange, group, self.own, tag) as self.spread:
            await self._quiet()
            if exchange.model in (RunModel.MEAN, RunModel.CENTER) and last and self._state_mean is not None:
                self._state_mean(group)
            yield
        await self._quiet()

    async def become_run_model(self, tag: str) -> None:
        """This worker's replica becomes the run's model for good, once all have `ended`; all workers call it. After an error or a
        cancellation of means it is what it was."""
        replica, exchange = self._replica, self.exchange
        mine = [copy_of(bucket.parameters) for bucket in replica.buckets] if exchange.averaged else []

        def put_back() -> None:
            for bucket, kept in zip(replica.buckets, mine, strict=bool(mine)):
                bucket.parameters.copy_(kept)

        async def become(group: Group) -> None:
            if exchange.averaged:
                put_back()  # an earlier attempt may have failed because another worker was lost
                await take_run_model(replica, exchange, group, self.own, tag)
            elif exchange.model is RunModel.SERVERS:
                await exchange.read(tag, last=True)
                await spread(group, replica)

        try:
            await self.members.together(tag, self._step(), become)
        except BaseException:  # a session's model stays the user's: its own, and not half of it the mean
            put_back()
            raise
        await self._quiet()

    def about_model(self, samples: int, metrics: Mapping[str, float | int | str | bool]) -> dict[str, Value]:
        """The description of the run's model for its file. ``samples`` that it was trained on; 0 if that is not known."""
        known: dict[str, Value] = {"samples": samples} if samples else {}
        return {"model": self.exchange.model.value, **known, "metrics": dict(metrics), "versions": dict(versions())}

    async def stop(self) -> None:
        """Finish cleanly: wait until nothing of this worker is still being sent."""
        await self.exchange.stop()
        await self.members.stop()
