"""Gossip (GossipGraD, Daily et al. 2018): in each step every group averages its model with one other, while it computes.

The life of a bucket of weights::

    backward has the gradients -> the optimizer updates the bucket -> bucket_ready
        -> send it to one partner, receive another's, become the mean of both -> replica.parameters_ready
    the next forward waits for it when it comes to its layer

A permutation of the groups determines who sends to whom (`zmqtrain.exchange.gossip.schedule`). So a step preserves the mean of all
models, and halves each group's deviation. No group waits for more than one partner; a late partner delays all groups eventually,
but only after log2 p steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather
from zmqtrain.errors import PeerLostError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.allreduce import spread
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket, Optimize, Replica, RunModel
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.elastic_sums import GroupSums
from zmqtrain.exchange.gossip.contents import MixedContents
from zmqtrain.exchange.gossip.distance import Distance
from zmqtrain.exchange.gossip.schedule import Partners, Schedule, Shape, is_power_of_two
from zmqtrain.exchange.gossip.teams import Place, TeamGossip
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.release import Release
from zmqtrain.exchange.serverless import Serverless
from zmqtrain.exchange.shared_copies import Like, like_in
from zmqtrain.exchange.state_source import NeighboursState, StateSource
from zmqtrain.exchange.sums import Sums
from zmqtrain.exchange.team_parts import weight_in_mean
from zmqtrain.exchange.under_way import UnderWay
from zmqtrain.net.endpoint import Endpoint, PeerId, Sent, Tag
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.waiting import in_time, together
from zmqtrain.wire.payload import Payload

#: Steps between measurements of the distance between partners, each of which reads both models once more.
DISTANCE_EVERY = 10
#: Large buckets are sent in messages of this size. A single message would be averaged only once it has arrived completely, with the
#: link idle in the meantime.
SLICE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """The settings of gossip: what partners exchange, and how partners are chosen."""

    seed: int
    shape: Shape = "dissemination"
    rotation: bool = True
    balanced: bool = True
    exchange: Literal["weights", "gradients"] = "weights"
    by_bucket: bool = True
    """Update and exchange each bucket as soon as backward has computed it; otherwise all of them after backward."""
    overlap: bool = True
    """Let the next forward begin while buckets are being exchanged."""
    timeout_s: float = 60.0
    """How long to wait for a partner."""
    buckets: BucketLimit = field(default_factory=BucketLimit)
    """The limits by which the model was divided into buckets."""


class GossipExchange(Serverless):
    """Implements `Exchange`. The workers of a group hold equal models; the worker at position i exchanges part i of each bucket
    with those at position i of the other groups, and the group gathers the parts.

    With ``members`` that survive losses (and groups of one worker), a lost partner is not waited for: the bucket stays unchanged. A
    bucket is averaged only once it has arrived completely, and then to the end, so it is never left half averaged. Of groups that
    are lost as a whole each worker does so with its part of a bucket, and the group gathers what has become of it.

    The few buckets of a small model are exchanged one after another, on all workers in the same order. A worker that could give its
    next bucket before it had its partner's would run ahead, and soon two of them would send to the same third at once while others'
    NICs have nothing to do: among eight peers at 100 Mbit/s, a step of CIFARNet took 82 ms so, and takes 50 in turn.
    Of a large model's many buckets those that the next forward needs first go first.

    Groups of several workers that may lose some (`GroupSums`) exchange what `TeamGossip` says, when backward has ended; the step
    ends when all of the group have the mean.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        members: Members,
        sums: Sums,
        column: frozenset[PeerId],
        settings: GossipSettings,
        *,
        like: Like | None = None,
        all_groups: Sequence[Sequence[PeerId]] = (),
        recorder: Recorder | None = None,
    ) -> None:
        """``sums`` are over this worker's group; ``column``: the workers at its position, of all groups; ``like`` allocates the
        copies that are sent; ``all_groups``: the workers of all groups, needed only if the sums are `GroupSums`."""
        super().__init__(sums)
        self._like = like or like_in(None)
        self._endpoint, self._members, self._column, self._settings = endpoint, members, column, settings
        self._group = group = sums.group
        self._recorder: Recorder = recorder or NullRecorder()
        # Weights can be sent during backward only if their update needs no gradients of other workers.
        weights = settings.exchange == "weights"
        self._own = sums if isinstance(sums, GroupSums) else None  # if the group may lose some of its workers
        self._early = settings.by_bucket and (group.size == 1 or not weights) and self._own is None
        self._left_out: set[tuple[int, PeerId]] = set()  # step, group: of what it has got nothing, and has said so
        self._contents = MixedContents() if members.takes_turns else None
        self._release = Release(self._members, self._give)
        self._under_way = UnderWay(self._begin, self._abort, overlap=settings.overlap)
        self._sum = GradientSum(sums, self._recorder, self._abort, overlap=settings.overlap)
        self._arithmetic = Arithmetic("zmqtrain-gossip")
        self._when = Optimize.APART if not self._early else Optimize.BEFORE if weights else Optimize.AFTER
        self._outgoing: dict[int, Payload] = {}  # bucket -> the copy of it that is being sent
        self._lent: dict[int, list[Sent]] = {}  # bucket -> its pending sends
        self._step = 0
        self._partners: _Peers | None = None
        self._distance: Distance | None = None
        self._in_turn = False
        self._traded: list[asyncio.Event] = []  # of the step, by bucket
        self._source_of_state = StateSource(endpoint, timeout_s=settings.timeout_s)
        self._repeats = False
        self._teams: TeamGossip | None = None
        self._all_groups = tuple(map(tuple, all_groups))
        if self._own is not None:
            self._teams = TeamGossip(
                endpoint,
                members,
                self._own,
                self._all_groups,
                weights=weights,
                like=self._like,
                arithmetic=self._arithmetic,
                timeout_s=settings.timeout_s,
                recorder=self._recorder,
                fail=self._abort,
                contents=self._contents,
            )

    @classmethod
    def of(cls, context: ExchangeContext) -> GossipExchange:
        """The exchange with the topology file's settings."""
        worker, gossip = context.worker, context.worker.topology.exchange.gossip
        settings = GossipSettings(
            seed=worker.topology.job.seed,
            shape=gossip.topology,
            rotation=gossip.rotation,
            balanced=gossip.balanced,
            exchange=gossip.exchange,
            by_bucket=gossip.granularity == "bucket" and not context.whole_updates,
            overlap=worker.topology.compute.overlap,
            timeout_s=worker.timeouts.barrier_s,
            buckets=BucketLimit.of(worker.topology),
        )
        return cls(
            worker.endpoint,
            context.members,
            context.sums_of_group(context.own_group(), in_place=context.untouched and gossip.exchange != "gradients"),
            frozenset(context.column),
            settings,
            like=like_in(worker.arena),
            all_groups=[worker.placement.group_members(number) for number in range(worker.placement.groups)],
            recorder=worker.recorder,
        )

    @property
    def synchronous(self) -> bool:
        return False

    @property
    def averaged(self) -> bool:
        return True

    @property
    def model(self) -> RunModel:
        return RunModel.MEAN

    async def start(self, replica: Replica, *, restored: bool = False) -> int | None:
        self._replica = replica
        replica.optimize(self._when)
        self._in_turn = self._settings.buckets.divides(sum(bucket.parameters.nbytes for bucket in replica.buckets))
        members = self._members
        if self._contents is not None:
            members.take_over(self._contents)
        (self._source_of_state.serve_groups if members.assigns else self._source_of_state.serve)(members)
        first = None
        if members.late:
            first = await self._start_late(replica)
        elif not restored:  # otherwise each group continues with its own model
            await members.together("gossip/start", 0, lambda world: spread(world, replica))
        await self._sum.start(replica)
        return first

    async def _start_late(self, replica: Replica) -> int:
        timeout_s = self._settings.timeout_s
        state = NeighboursState(self._endpoint, self._members, timeout_s=timeout_s)
        first = await (state.join_group() if self._members.assigns else state.join())
        await state.take(replica)
        await self._release.begin_late(first)
        self._recorder.audit("joined", step=first, source=state.source)
        self._source_of_state.begin()
        if self._own is not None:  # others of its group may have come with the same step
            await self._source_of_state.answer(first, self._members, replica, self.settle)
        return first

    async def _give(self, step: int) -> None:
        """Give the state with which ``step`` begins to those who have asked for it, and begin with that step."""
        source, members, replica = self._source_of_state, self._members, self._replica_started()
        if self._own is None:
            await source.answer(step, members, replica, self.settle)
        else:
            await source.answer_in_group(step, members, self._group.members, replica, self.settle)

    def begin_step(self, step: int) -> None:
        buckets = self._replica_started().buckets
        self._begin_exchange(step)
        if self._own is not None:
            self._own.begin(step)
        else:
            self._under_way.begin(step, len(buckets))
        if not self._early:
            self._sum.begin(step, len(buckets))

    def _begin_exchange(self, step: int) -> None:
        buckets = self._replica_started().buckets
        self._step = step
        if self._contents is not None:
            self._contents.begin(step)
        self._partners = self._partners_at(step)
        measured = step % DISTANCE_EVERY == 0 and self._partners is not None and bool(self._partners.sources)
        self._distance = Distance(len(buckets)) if measured else None
        self._traded = [asyncio.Event() for _ in buckets]

    def bucket_ready(self, bucket: Bucket) -> None:
        if self._early:
            self._under_way.add(bucket)
        else:
            self._sum.add(bucket)

    async def end_step(self) -> None:
        if self._teams is not None:
            await self._exchange_in_team(self._teams)
            if self._repeats:
                return
        else:
            if not self._early:
                await self._exchange_batch()
            await self._under_way.all_added()
            if not self._settings.overlap:
                await self._under_way.settle()
        await self.may_begin(self._step + 1)

    async def may_begin(self, step: int) -> bool:
        return await self._release.may_begin(step)

    async def sit_out(self, step: int) -> None:
        """Exchange the model as it is."""
        assert self._members.takes_turns, "a group without a batch is in step only if groups take turns"
        await self.settle()
        self._begin_exchange(step)
        replica = self._replica_started()
        buckets = replica.buckets
        if self._teams is not None:
            self._repeats = False
            await self._mix_in_team(self._teams)
            for bucket in buckets:
                replica.parameters_ready(bucket)
        else:
            self._under_way.begin(step, len(buckets))
            for bucket in buckets:
                self._under_way.add(bucket)
        await self.settle()
        await self.may_begin(step + 1)

    def repeats(self, step: int) -> bool:
        return self._repeats

    async def settle(self) -> None:
        await self._under_way.settle()
        if self._teams is not None:
            await self._teams.settle()

    def weight(self, group: Group) -> float | None:
        return None if self._own is None else weight_in_mean(self._all_groups, self._endpoint.peer, group)

    async def stop(self, *, failed: bool = False) -> None:
        self._source_of_state.close(failed=failed)
        await self._under_way.cancel()
        if self._teams is not None:
            await self._teams.stop()
        await self._sum.stop()
        self._arithmetic.close()
        await self._members.stop()

    # A step.

    def _column_at(self, step: int) -> tuple[PeerId, ...]:
        """Those who exchange with each other at a step: workers, or groups, by the name of the first worker of each."""
        if self._teams is not None:
            return self._teams.there(step)
        return tuple(peer for peer in self._members.at(step) if peer in self._column)

    def _partners_at(self, step: int) -> _Peers | None:
        column, settings = self._column_at(step), self._settings
        # After losses the number may not be a power of two. Dissemination gives the same guarantee for any number.
        fits = settings.shape != "hypercube" or is_power_of_two(len(column))
        shape: Shape = settings.shape if fits else "dissemination"
        schedule = Schedule(len(column), settings.seed, shape, settings.rotation, settings.balanced)
        name = self._endpoint.peer if self._teams is None else self._teams.name
        partners = schedule.partners(step, _ranks(column)[name])
        return None if partners is None else _Peers.of(partners, column)

    async def _exchange_batch(self) -> None:
        """Exchange all buckets after backward."""
        replica = self._replica_started()
        await self._sum.wait()
        weights = self._settings.exchange == "weights"
        if weights:
            await replica.update(hold=True)
        for bucket in reversed(replica.buckets):  # the next forward needs them in this order
            self._under_way.add(bucket)
        if not weights:
            await self._under_way.settle()
            await replica.update()

    async def _exchange_in_team(self, teams: TeamGossip) -> None:
        """Exchange all buckets after backward, unless the step has been given up."""
        assert self._own is not None
        replica = self._replica_started()
        await self._sum.wait()
        self._repeats = self._own.given_up
        weights = self._settings.exchange == "weights"
        if weights and not self._repeats:
            await replica.update(hold=True)
        if not self._repeats:
            await self._mix_in_team(teams)
        if weights or self._repeats:
            for bucket in replica.buckets:
                replica.parameters_ready(bucket)
        else:
            await replica.update()

    async def _mix_in_team(self, teams: TeamGossip) -> None:
        if (partners := self._partners) is not None:
            buckets = list(reversed(self._replica_started().buckets))
            await teams.exchange(self._step, buckets, partners.to, partners.sources, self._distance)

    def _begin(self, bucket: Bucket, step: int) -> Coroutine[Any, Any, None]:
        return self._exchange(bucket, step, self._partners, self._distance, self._traded)

    async def _exchange(
        self, bucket: Bucket, step: int, partners: _Peers | None, distance: Distance | None, traded: Sequence[asyncio.Event]
    ) -> None:
        group, weights = bucket.sharers(self._group), self._settings.exchange == "weights"
        payload = bucket.parameters if weights else bucket.gradients
        if self._early and self._group.size > 1:
            await self._sums.sum(bucket, ("gradients", step, bucket.index))
        if partners is not None:
            span = bounds(payload.numel, group.size)[group.rank]
            part = payload if group.size == 1 else payload.part(*span)
            before = bucket.index - 1 if self._early else bucket.index + 1
            if self._in_turn and 0 <= before < len(traded):
                await traded[before].wait()
            try:
                await self._trade(bucket.index, part, span, step, partners, distance)
            finally:
                traded[bucket.index].set()
            if group.size > 1:
                await all_gather(group, payload, ("gossip", step, bucket.index), priority=bucket.index)
        if weights or self._early:
            self._replica_started().parameters_ready(bucket)

    async def _trade(
        self, index: int, part: Payload, span: tuple[int, int], step: int, partners: _Peers, distance: Distance | None
    ) -> None:
        """Send the part, which is a bucket's ``span``, receive the partner's, and average: slice by slice, so that one slice is
        averaged while the next is being received."""
        outgoing = await self._outgoing_of(index, part)
        slices = self._slices(part)
        copied = [asyncio.Event() for _ in slices]
        there = self._members.there

        async def give() -> None:
            for number, (start, stop) in enumerate(slices):
                if there(partners.to, step):
                    leaving = outgoing.part(start, stop)
                    if self._contents is not None:
                        leaving = leaving.with_meta(self._contents.told(step))
                    await self._arithmetic.do(partial(leaving.copy_, part.part(start, stop)), leaving)
                    copied[number].set()
                    await self._send(index, partners.to, _tag(step, (index, number), self._members.own_incarnation), leaving)
                else:
                    copied[number].set()

        async def take() -> None:
            for number, (start, stop) in enumerate(slices):
                own, others, came = part.part(start, stop), list[Payload](), list[PeerId]()
                place, sources = (index, number), [source for source in partners.sources if there(source, step)]
                await together(*(self._receive(source, step, place, others, came) for source in sources))
                await copied[number].wait()
                left_out = [each for each in partners.sources if each not in came and (step, each) not in self._left_out]
                if left_out:
                    self._left_out.update((step, source) for source in left_out)
                    self._recorder.event("left_out", step=step, workers=list(left_out))
                if not others:
                    continue
                last = number == len(slices) - 1
                if distance is not None and await self._arithmetic.do(partial(distance.add, own, others[0], last=last), own):
                    self._recorder.event("spread", step=step, distance=distance.relative(), partner=partners.sources[0])
                await self._arithmetic.do(partial(_average, own, others), own)
                self._recorder.audit("mixed", step=step, bucket=index, sources=came, span=span)

        await together(give(), take())

    def _slices(self, part: Payload) -> list[tuple[int, int]]:
        """The bounds of a part's slices. A single slice if a partner may be lost: then all of it is averaged, or nothing."""
        numel = part.numel
        count = 1 if self._members.survives else max(1, part.nbytes // SLICE_BYTES)
        return [bounds(numel, count)[number] for number in range(count)]

    async def _outgoing_of(self, index: int, part: Payload) -> Payload:
        """Memory for the copy to send, apart from the part, which is averaged at the same time."""
        for lent in self._lent.pop(index, ()):
            if not lent.released:
                with suppress(PeerLostError):
                    await lent.wait_released()
        outgoing = self._outgoing.get(index)
        if outgoing is None:
            outgoing = self._outgoing[index] = self._like(part)
        return outgoing

    async def _send(self, index: int, to: PeerId, tag: Tag, leaving: Payload) -> None:
        with self._recorder.span(f"send bucket {index} to {to}", "send", step=int(tag[1])), self._survived():
            self._lent.setdefault(index, []).append(await self._endpoint.send(to, tag, leaving, priority=index))

    async def _receive(self, source: PeerId, step: int, place: Place, received: list[Payload], came: list[PeerId]) -> None:
        """Append what has come, and of whom."""
        index, process = place[0], self._members.incarnation(source, step) or 0
        with self._recorder.span(f"receive bucket {index} of {source}", "receive", step=step), self._survived():
            async with in_time(source, f"bucket {index} of step {step}", self._settings.timeout_s):
                payload = await self._endpoint.receive(source, _tag(step, place, process))
                if self._contents is not None:  # it is averaged in any case
                    self._contents.came(self._members.unit(source, step), step, payload.meta, of=len(self._traded))
                received.append(payload)
                came.append(source)

    def _survived(self) -> suppress:
        """A context that, if losses are survived, ignores the loss of the partner."""
        return suppress(*([PeerLostError] if self._members.survives else []))


def _tag(step: int, place: Place, process: int) -> Tag:
    """Of a slice of a bucket that is mixed at this step, from this process of the sender: an earlier one of its name may have sent
    the same slice, of another model, before it was lost."""
    return ("gossip", step, *place, process)


def _average(own: Payload, others: Sequence[Payload]) -> None:
    """Replace ``own`` by the mean of ``own`` and ``others``."""
    if len(others) == 1:
        own.average_(others[0])
        return
    for other in others:
        own.add_(other)
    own.scale_(1.0 / (1 + len(others)))


@dataclass(frozen=True, slots=True)
class _Peers:
    """A step's partners, by name."""

    to: PeerId
    sources: tuple[PeerId, ...]

    @classmethod
    def of(cls, partners: Partners, column: tuple[PeerId, ...]) -> _Peers:
        return cls(column[partners.to], tuple(column[source] for source in partners.sources))


@lru_cache(maxsize=8)
def _ranks(column: tuple[PeerId, ...]) -> dict[PeerId, int]:
    return {peer: rank for rank, peer in enumerate(column)}
