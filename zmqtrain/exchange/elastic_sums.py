"""Sums of gradients over workers of which some may be lost: a step's sums count on all survivors, or on none.

Nothing is asked and nothing is acknowledged while nobody is lost: a complete sum of the next step proves that all members have
completed this one. Until then each worker keeps what it had (its gradients, until all sums of the step are there) and what it has
got (the sums of the last complete step). When the members change, they agree (`zmqtrain.exchange.elastic.ElasticMembers`) on the
newest step that any of them has completed, and complete nothing in the meantime::

    a survivor lacks that step                    it gets the sums from one that has them: the lost worker's gradients count
    nobody has completed the step under way       its sums are computed anew from the survivors' gradients

Sums are divided by the number of samples in them, so the result is the mean over the samples that were trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, broadcast
from zmqtrain.errors import PeerLostError
from zmqtrain.events import Recorder
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.elastic import Decision, ElasticMembers
from zmqtrain.exchange.groups import Groups
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.waiting import abandoned
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a group gets from other groups and mixes with its own, after the sums of a step. It counts on all of the group or on
    none."""

    needed: tuple[PeerId, ...]
    """The workers without whom it cannot be complete: those of this group that train the step, and those from whom it comes."""
    take: Callable[[Group, Bucket, Payload], Awaitable[None]]
    """Fills a payload with what comes for a bucket; the same on all of the group, and only with a part from each."""
    apply: Callable[[Bucket, Payload], None]
    """Mixes the bucket with it. Called in a thread."""
    counts: Callable[[], None] = lambda: None
    """Called as soon as it counts here."""


@dataclass(slots=True)
class _Step:
    """The sums of one step."""

    step: int
    """Its number among all that is to be complete (`Commits.step_of`)."""
    group: Group
    members: tuple[PeerId, ...]
    buckets: dict[int, Bucket] = field(default_factory=dict)
    """The buckets handed over so far, by index."""
    sums: dict[int, Payload] = field(default_factory=dict)
    """The sums, being computed or complete; already divided if complete."""
    complete: set[int] = field(default_factory=set)
    attempts: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    samples: asyncio.Future[int] | None = None
    """How many samples the sums are over."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: bool = False
    """It counts nowhere, and what is still handed over belongs to nothing."""
    mixture: Mixture | None = None
    """It is no sum of gradients, but what the group gets from others."""


class ElasticSums:
    """Implements `zmqtrain.exchange.sums.Sums`, and `zmqtrain.exchange.elastic.Commits` for the members."""

    def __init__(
        self,
        endpoint: Endpoint,
        members: ElasticMembers,
        group: Group,
        *,
        every: int,
        batch: int,
        timeouts: Timeouts,
        recorder: Recorder,
    ) -> None:
        """``group``: all workers that the run can have. ``every``: steps whose gradients are added up before they are summed.
        ``batch``: a worker's gradient is the sum over its samples, divided by this number."""
        self.group = group
        self._batch = batch
        self._endpoint, self._members, self._every = endpoint, members, every
        self._timeouts, self._recorder = timeouts, recorder
        self._arithmetic = Arithmetic("zmqtrain-sums")
        self._buckets = 0
        self._now: _Step | None = None  # the newest step of which a bucket was handed over
        self._last: _Step | None = None  # the newest complete step
        self._kept: list[dict[int, Payload]] = [{}, {}]  # memory of sums, of two steps in turn
        self._turn = 0
        self._newest = -1
        self._holds = self._released = 0  # nothing is completed while they differ
        self._living: Mapping[PeerId, int] | None = None  # as of the last decision
        self._groups = Groups(endpoint, timeouts.barrier_s)
        self._decisions: asyncio.Queue[tuple[Decision, int]] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._sharing: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        members.commit_with(self)

    async def start(self, replica: Replica) -> None:
        self._buckets = len(replica.buckets)
        self._worker = asyncio.get_running_loop().create_task(self._decide(), name="decide about sums")

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        step, now = int(tag[1]), self._now
        if self._error is not None:
            raise self._error
        if now is None or now.step != step:
            assert now is None or now.done.is_set(), f"step {step} begins before the sums of {now.step} are complete"
            now = self._now = self._step(step)
            self._turn = 1 - self._turn
        if now.given_up:
            return
        now.buckets[bucket.index] = bucket
        self._attempt(now, bucket)
        await now.done.wait()
        if self._error is not None:
            raise self._error

    def abort(self, error: BaseException) -> None:
        self._fail(error)

    async def stop(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        if self._now is not None:
            await abandoned(_sums_of(self._now))
        self._groups.close()
        self._arithmetic.close()

    # Called by the members, while they agree.

    def hold(self) -> int:
        """Complete no step until `decide`. Returns the newest that is complete here."""
        self._holds += 1
        if self._sharing is not None:
            self._sharing.cancel()
        return max(self._newest, self._members.begins // self._every * self._every - 1)  # also in what it has begun with

    def decide(self, decision: Decision) -> None:
        """All that take part have the same decision."""
        self._decisions.put_nowait((decision, self._holds))

    def step_of(self, number: int) -> int:
        return number

    # An attempt.

    def _step(self, step: int) -> _Step:
        members, group = self._group_at(step)
        return _Step(step, group, members)

    def _group_at(self, step: int) -> tuple[tuple[PeerId, ...], Group]:
        """Those of the planned members that the last decision has left."""
        planned = {peer: self._members.incarnation(peer, step) for peer in self._members.at(step)}
        living = self._living
        members = tuple(peer for peer, process in planned.items() if living is None or living.get(peer) == process)
        name = f"sums/{self._members.era(step)}/{len(planned) - len(members)}"
        return members, self._groups.of(members, name)

    def _attempt(self, now: _Step, bucket: Bucket) -> None:
        attempt = self._sum(now, now.group, bucket)
        task = asyncio.get_running_loop().create_task(attempt, name=f"sum of bucket {bucket.index} in step {now.step}")
        now.attempts[bucket.index] = task

    async def _sum(self, now: _Step, group: Group, bucket: Bucket) -> None:
        index, memory = bucket.index, self._kept[self._turn]
        if index not in memory:
            memory[index] = bucket.gradients.empty_like()
        work = now.sums[index] = memory[index]
        try:
            await self._compute(now, group, bucket, work)
        except PeerLostError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by a decision, at the same moment
                return
            await asyncio.sleep(self._timeouts.lost_s + self._timeouts.request_s)  # a decision cancels this
            self._fail(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - passed to all that wait
            self._fail(error)
        else:
            now.complete.add(index)
            await self._maybe_complete(now)

    async def _compute(self, now: _Step, group: Group, bucket: Bucket, work: Payload) -> None:
        await self._arithmetic.do(partial(work.copy_, bucket.gradients), work)
        await all_reduce(group, work, ("gradients", now.step, bucket.index), priority=bucket.index)
        await self._scale(now, group, work)

    async def _scale(self, now: _Step, group: Group, work: Payload) -> None:
        if now.samples is None:
            now.samples = asyncio.ensure_future(self._samples(now, group))
        samples = await asyncio.shield(now.samples)
        await self._arithmetic.do(partial(work.scale_, self._batch / samples), work)

    async def _samples(self, now: _Step, group: Group) -> int:
        """How many samples the sum is over. A worker that joined in the middle of a window has fewer than others, and only itself
        knows how many."""
        members, division = self._members, self._members.division
        assert division is not None, "the division begins before the first step"
        if self._every == 1:
            return division.samples(now.step, [members.life(peer, now.step) for peer in group.members])
        window = filter(members.took_part, range(max(0, now.step - self._every + 1), now.step + 1))
        own = TensorPayload.empty(1, "float64")
        own.numpy()[0] = sum(division.samples(step, [members.life(self._endpoint.peer, step)]) for step in window)
        await all_reduce(group, own, ("samples", now.step))
        return int(own.numpy()[0])

    async def _maybe_complete(self, now: _Step) -> None:
        """If all sums of the step are there, they count, unless the members are about to decide otherwise."""
        if self._holds != self._released or now.done.is_set() or len(now.complete) < self._buckets:
            return
        self._say_counted(now)
        await self._complete(now)

    def _say_counted(self, now: _Step) -> None:
        self._recorder.audit("counted", step=now.step, members=list(now.members))
        assert now.samples is not None, "all sums are complete"
        division = self._members.division
        assert division is not None
        usual = sum(division.full(step) for step in range(max(0, now.step - self._every + 1), now.step + 1))
        if len(now.members) != len(self._members.at(now.step)) or now.samples.result() != usual:
            samples = now.samples.result()
            self._recorder.event("counted", step=now.step, members=list(now.members), samples=samples)

    async def _complete(self, now: _Step) -> None:
        self._newest, self._last = now.step, now
        for index, bucket in now.buckets.items():
            await self._arithmetic.do(partial(self._apply, now, bucket, now.sums[index]), bucket.gradients)
        now.done.set()

    def _apply(self, now: _Step, bucket: Bucket, result: Payload) -> None:
        bucket.gradients.copy_(result)

    # A decision.

    async def _decide(self) -> None:
        try:
            while True:
                decision, hold = await self._decisions.get()
                if hold == self._holds:  # otherwise another decision follows
                    await self._carry_out(decision, hold)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - passed to all that wait
            self._fail(error)

    async def _carry_out(self, decision: Decision, hold: int) -> None:
        self._living = decision.living
        if decision.lack and not await self._share(decision, hold):
            return  # the next decision says what happens
        if hold != self._holds:
            return
        self._released = hold
        now = self._now
        if now is None or now.step <= self._newest:
            return
        members, group = self._group_at(now.step)
        if members == now.members and self._can_be_complete(now):
            await self._maybe_complete(now)
            return
        await self._take_back(now)
        self._go_on(now, members, group)

    def _can_be_complete(self, now: _Step) -> bool:
        """Whether all are there from whom something must come, beside the members of the step."""
        return True

    def _go_on(self, now: _Step, members: tuple[PeerId, ...], group: Group) -> None:
        """These are left of a step that nobody has completed."""
        now.members, now.group = members, group
        for bucket in now.buckets.values():
            self._attempt(now, bucket)

    async def _take_back(self, now: _Step) -> None:
        await abandoned(_sums_of(now))
        now.attempts.clear()
        now.samples = None
        now.complete.clear()

    async def _share(self, decision: Decision, hold: int) -> bool:
        """One that has completed the newest step gives its sums to those that have not. Returns whether this worker has them, or
        has no part in that step.

        It is given up as soon as the members are about to decide again, since another one may have come so far before it has
        carried out this decision (if the one before took it long), and then has no part in this. The last decision is carried out
        by all."""
        step = decision.newest
        members, _ = self._group_at(step)
        if not self._members.took_part(self.step_of(step)):
            return True
        has = self._newest >= step
        owner = self._last if has else self._now
        assert owner is not None
        assert owner.step == step, f"this worker has no sums of step {step}"
        group = self._groups.of(members, f"sums/shared/{decision.version}")
        if not has:
            await self._take_back(owner)
        give = self._give(owner, group, members.index(decision.holder))
        self._sharing = asyncio.get_running_loop().create_task(give, name=f"share the sums of step {step}")
        try:
            await self._sharing
        except PeerLostError:
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if hold == self._holds or (task is not None and task.cancelling()):  # this worker stops
                raise
            return False
        finally:
            self._sharing = None
        if not has:
            if hold != self._holds:  # this worker has said meanwhile that it lacks them
                return False
            await self._complete(owner)
        return True

    async def _give(self, owner: _Step, group: Group, root: int) -> None:
        for index in sorted(owner.sums):
            await broadcast(group, owner.sums[index], ("sums", owner.step, index), root=root)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        if self._now is not None:
            self._now.done.set()


def _sums_of(now: _Step) -> list[asyncio.Future[Any]]:
    """The sums of a step that have begun."""
    return [*now.attempts.values(), *([] if now.samples is None else [now.samples])]


class GroupSums(ElasticSums):
    """Sums over one of several groups that train apart, of which workers may be lost: a step that none of the others has completed
    is given up by all of them, and they divide its batch anew. So each batch is trained once, and nothing of it is left to others.

    Call `begin` before the first bucket of each step. After its sums a step may have a `mix`ture, which counts on all of the group
    or on none, too. The sums of step t are number 2t of what is complete, its mixture is number 2t + 1: nobody completes one before
    all of the group are done with the one before."""

    def __init__(
        self, endpoint: Endpoint, members: ElasticMembers, group: Group, *, timeouts: Timeouts, recorder: Recorder
    ) -> None:
        """``group``: all workers of the group."""
        super().__init__(endpoint, members, group, every=1, batch=1, timeouts=timeouts, recorder=recorder)

    def begin(self, step: int) -> None:
        """The batch of ``step`` is about to be divided among those that are there now."""
        now = self._now
        assert now is None or now.done.is_set(), f"step {step} begins before that of {now.step} has ended"
        self._begin_result(2 * step)

    def _begin_result(self, number: int) -> _Step:
        if self._now is None or not self._now.given_up:  # otherwise the memory is free; the other one has what counted last
            self._turn = 1 - self._turn
        self._now = self._step(number)
        return self._now

    async def sum(self, bucket: Bucket, tag: Tag) -> None:
        await super().sum(bucket, (tag[0], 2 * int(tag[1]), *tag[2:]))

    async def mix(self, step: int, buckets: Sequence[Bucket], mixture: Mixture) -> bool:
        """Mix these buckets of ``step``, whose sums are complete. Returns whether that counts; if not, they are as they were."""
        if self._error is not None:
            raise self._error
        assert self._now is None or self._now.done.is_set(), "the sums of a step come before its mixture"
        now = self._begin_result(2 * step + 1)
        now.mixture = mixture
        if not self._can_be_complete(now):  # nor is it for others: they need what this worker has not sent
            self._go_on(now, now.members, now.group)
            return False
        for bucket in buckets:
            now.buckets[bucket.index] = bucket
            self._attempt(now, bucket)
        await now.done.wait()
        if self._error is not None:
            raise self._error
        return not now.given_up

    @property
    def given_up(self) -> bool:
        """Whether the step, or the mixture, that was begun last counts nowhere."""
        return self._now is not None and self._now.given_up

    def step_of(self, number: int) -> int:
        return number // 2

    def _can_be_complete(self, now: _Step) -> bool:
        needed = now.mixture.needed if now.mixture is not None else ()
        return len(self._members.present(self.step_of(now.step), needed)) == len(needed)

    async def _compute(self, now: _Step, group: Group, bucket: Bucket, work: Payload) -> None:
        if now.mixture is None:
            await super()._compute(now, group, bucket, work)
        else:
            await now.mixture.take(group, bucket, work)

    async def _complete(self, now: _Step) -> None:
        if now.mixture is not None:
            now.mixture.counts()  # before the members can agree on anything else
        await super()._complete(now)

    def _apply(self, now: _Step, bucket: Bucket, result: Payload) -> None:
        if now.mixture is None:
            super()._apply(now, bucket, result)
        else:
            now.mixture.apply(bucket, result)

    def _group_at(self, number: int) -> tuple[tuple[PeerId, ...], Group]:
        step = self.step_of(number)
        members = self._members.present(step)
        name = f"{self.group.name}/{self._members.era(step)}/{self.group.size - len(members)}"
        return members, self._groups.of(members, name)

    async def _scale(self, now: _Step, group: Group, work: Payload) -> None:
        """The parts of a group's batch are weighted by their samples."""

    def _say_counted(self, now: _Step) -> None:
        if now.mixture is None:
            self._recorder.audit("summed", step=self.step_of(now.step), members=list(now.members))

    def _go_on(self, now: _Step, members: tuple[PeerId, ...], group: Group) -> None:
        now.given_up = True
        now.done.set()
