"""Groups train on their own and combine their models every few steps."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zmqtrain.collectives.call import while_all_are_there
from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, all_reduce
from zmqtrain.data.slots import Life
from zmqtrain.data.teams import owner_of
from zmqtrain.errors import CheckpointError, PeerLostError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.allreduce import PATIENCE_S, spread
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.averaging.alike import require_alike
from zmqtrain.exchange.averaging.contents import AveragedContents
from zmqtrain.exchange.averaging.fragments import Fragments
from zmqtrain.exchange.averaging.methods import Average, Elastic, Method, Outer, copy_of
from zmqtrain.exchange.base import Bucket, Optimize, Replica, RunModel
from zmqtrain.exchange.checkpoint_part import kept_payload, kept_value, require_like
from zmqtrain.exchange.contents import known_of, merge, rows_of
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.elastic_sums import GroupSums
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.exchange.groups import Groups
from zmqtrain.exchange.members import FixedMembers, Members
from zmqtrain.exchange.release import Release
from zmqtrain.exchange.rounded_mean import RoundedMean
from zmqtrain.exchange.serverless import Serverless
from zmqtrain.exchange.state_source import NeighboursState, StateSource
from zmqtrain.exchange.sums import NetworkSums, Sums
from zmqtrain.exchange.team_parts import gather_parts, weight_in_mean
from zmqtrain.exchange.under_way import UnderWay
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.waiting import abandoned, in_time, together
from zmqtrain.wire.compress import make_codec
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.value import ValuePayload

#: The names of what an average that has arrived, but is not applied yet, consists of.
_IN_FLIGHT = ("own", "came")


@dataclass(frozen=True, slots=True)
class AveragingGroups:
    """The three sets of workers to which this worker belongs."""

    world: Group
    """The group of all workers."""
    group: Group
    """The workers of its compute group, by position."""
    column: Group
    """The workers at its position, one from each group."""


@dataclass(slots=True)
class _Flight:
    """A part of a bucket whose average is being computed."""

    own: Payload
    mean: Payload
    task: asyncio.Task[None] | None = None
    """``None``: the mean is there."""

    async def arrived(self) -> None:
        if self.task is not None:
            await asyncio.wait({self.task})
            self.task.result()


class AveragingExchange(Serverless):
    """Implements `Exchange`: the gradients are summed within the group at each step, and ``method`` combines the groups' models
    after the steps that ``fragments`` names.

    The members of a group hold equal models, so the worker at position i handles only part i of each bucket, together with the
    workers at that position in the other groups; then the group gathers the parts. With g groups of k workers, a worker thus sends
    2(g-1)/(gk) + (k-1)/k of the model, against 2(gk-1)/(gk) for an all-reduce over all workers and 2(g-1)/g for a whole model per
    position. Between the groups, where the slow links are, one model per group is sent, not k.

    Each group keeps its own optimizer state (momentum). Between averagings the groups' models differ; the run's model is their mean
    or, with elastic averaging, its center.

    With ``members`` that survive losses, an average counts once all members have it. Until then what they have sent is kept, and if
    one is lost, the survivors average anew. So an average is over the same members everywhere. A worker that joins late begins as a
    copy of a neighbour, with averages that are there but not applied yet.

    Groups of several workers that may lose some have a state that does not depend on who is left: each worker has all of what the
    method keeps and of each average, not a part. Parts still travel between the groups: those who are there divide them, and then
    each group gathers the average in place of the parameters.
    """

    def __init__(
        self,
        groups: AveragingGroups,
        fragments: Fragments,
        method: Method | None = None,
        *,
        deltas: Literal["float32", "fp16", "int8"] = "float32",
        mix: float = 0.0,
        members: Members | None = None,
        sums: Sums | None = None,
        all_groups: Sequence[Sequence[PeerId]] = (),
        recorder: Recorder | None = None,
        overlap: bool = True,
    ) -> None:
        """``sums`` are over the group, by default over the network. ``all_groups``: the workers of all groups, needed only if these
        are `GroupSums`.

        ``mix``: see `zmqtrain.exchange.averaging.methods`; it has an effect only if ``fragments`` have a delay. ``members``:
        those of ``groups.world``, by default a fixed set.
        """
        super().__init__(sums or NetworkSums(groups.group))
        self._own = sums if isinstance(sums, GroupSums) else None  # if the group may lose some of its workers
        self._all_groups: tuple[tuple[PeerId, ...], ...] = ()
        self._made: Groups | None = None
        endpoint, patience_s = groups.world.endpoint, groups.world.timeout_s or PATIENCE_S
        self._members = members or FixedMembers(endpoint, groups.world.members, timeout_s=patience_s)
        self._endpoint, self._patience_s = endpoint, patience_s
        self._source = StateSource(endpoint, timeout_s=patience_s) if self._members.survives else None
        self._groups, self._fragments, self._method = groups, fragments, method or Average()
        self._mix = mix if fragments.delay else 0.0
        self._arithmetic = Arithmetic("zmqtrain-averaging")
        self._rounded = None if deltas == "float32" else RoundedMean(make_codec(deltas), self._arithmetic)
        self._recorder: Recorder = recorder or NullRecorder()
        self._sum = GradientSum(self._sums, self._recorder, self._abort, overlap=overlap)
        self._under_way = UnderWay(self._finish, self._abort)
        self._flights: dict[int, _Flight] = {}
        self._restored: dict[str, Payload] = {}
        self._overlap = overlap
        self._step = 0
        self._release = Release(self._members, self._give)
        self._contents = AveragedContents() if self._members.takes_turns else None
        if self._own is not None:
            assert self._rounded is None, "rounding errors belong to parts"
            self._all_groups = tuple(map(tuple, all_groups))
            self._made = Groups(endpoint, patience_s)

    @classmethod
    def of(cls, context: ExchangeContext) -> AveragingExchange:
        """The exchange with the topology file's settings."""
        worker, averaging = context.worker, context.worker.topology.exchange.averaging
        column = context.group(f"column/{worker.role.position}", context.column)
        groups = AveragingGroups(context.all_workers(), context.own_group(), column)
        method: Method = Average()
        if averaging.method == "elastic":
            method = Elastic(worker.placement.groups, averaging.alpha)
        elif averaging.method == "outer":
            method = Outer(averaging.outer_lr, averaging.outer_momentum)
        return cls(
            groups,
            Fragments(context.every, averaging.fragments, averaging.overlap_steps),
            method,
            deltas=averaging.deltas,
            mix=averaging.mix,
            members=context.members,
            sums=context.sums_of_group(groups.group, in_place=context.untouched),
            all_groups=[worker.placement.group_members(number) for number in range(worker.placement.groups)],
            recorder=worker.recorder,
            overlap=worker.topology.compute.overlap,
        )

    @property
    def synchronous(self) -> bool:
        fragments = self._fragments
        plain = isinstance(self._method, Average) and self._rounded is None
        return (fragments.every == 1 and plain) or self._groups.column.size == 1

    @property
    def averaged(self) -> bool:
        return not self.synchronous

    @property
    def model(self) -> RunModel:
        if self.synchronous:
            return RunModel.REPLICA
        return RunModel.CENTER if isinstance(self._method, Elastic) else RunModel.MEAN

    async def start(self, replica: Replica, *, restored: bool = False) -> int | None:
        self._replica = replica
        replica.optimize(Optimize.APART)
        members = self._members
        if self._contents is not None:
            self._contents.begin(bucket.index for bucket in replica.buckets)
            members.take_over(self._contents)
        if self._source is not None:
            (self._source.serve_groups if members.assigns else self._source.serve)(members)
        if not restored and not members.late:
            await members.together("averaging/start", 0, lambda world: spread(world, replica))
        # Otherwise each group continues with its own model; its members wrote equal ones to the checkpoint.
        known = set(self._method.state())
        for bucket in replica.buckets:
            part = self._part(bucket)
            await self._arithmetic.do(partial(self._method.begin, bucket.index, part), part)
        if restored:
            self._require_whole(replica, known)
        self._resume_flights()
        first = await self._start_late(replica) if members.late else None
        await self._sum.start(replica)
        return first

    async def _start_late(self, replica: Replica) -> int:
        members = self._members
        state = NeighboursState(self._endpoint, members, timeout_s=self._patience_s)
        first = await (state.join_group() if members.assigns else state.join())
        parts = {str(bucket.index): self._part(bucket) for bucket in replica.buckets}
        came: dict[str, Payload] = {}

        def place(name: str) -> Payload | None:
            kind, _, index = name.partition("/")
            if kind in _IN_FLIGHT and index in parts:
                return came.setdefault(name, parts[index].empty_like())
            return self._method.state().get(name)

        await state.take(replica, place)
        self._restored = came
        self._resume_flights()
        await self._release.begin_late(first)
        self._recorder.audit("joined", step=first, source=state.source)
        if self._source is not None:
            self._source.begin()
            if self._own is not None:  # others of its group may have come with the same step
                await self._source.answer(first, members, replica, self.settle, self._kept)
        return first

    async def _give(self, step: int) -> None:
        """Give the state with which ``step`` begins to those who have asked for it, and begin with that step."""
        members, replica = self._members, self._replica_started()
        if self._source is None:
            return
        if self._own is None:
            await self._source.answer(step, members, replica, self.settle, self._kept)
        else:
            await self._source.answer_in_group(step, members, self._groups.group.members, replica, self.settle, self._kept)

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._own is not None:
            self._own.begin(step)
        self._sum.begin(step, len(self._replica_started().buckets))

    def bucket_ready(self, bucket: Bucket) -> None:
        self._sum.add(bucket)

    async def end_step(self) -> None:
        await self._sum.wait()
        if self.repeats(self._step):
            for bucket in self._replica_started().buckets:
                self._replica_started().parameters_ready(bucket)
            return
        await self._average(self._step)
        await self.may_begin(self._step + 1)

    async def may_begin(self, step: int) -> bool:
        return await self._release.may_begin(step)

    async def sit_out(self, step: int) -> None:
        """Take part in the averages of a step with the model as it is."""
        assert self._members.takes_turns, "a group without a batch is in step only if groups take turns"
        await self._under_way.settle()
        self._step = step
        await self._average(step, trained=False)
        await self._under_way.settle()
        await self.may_begin(step + 1)

    def repeats(self, step: int) -> bool:
        return self._own is not None and self._own.given_up

    async def _average(self, step: int, *, trained: bool = True) -> None:
        """Update the model, if it was ``trained``, and begin and end the averages that begin and end with this step."""
        replica, fragments = self._replica_started(), self._fragments
        alone = self._groups.column.size == 1
        ending = [] if alone else [b for b in replica.buckets if b.index in self._flights and fragments.ends(step, b.index)]
        beginning = [] if alone else [b for b in replica.buckets if fragments.begins(step, b.index)]
        if fragments.delay == 0:
            ending = beginning
        if trained:
            await replica.update(hold=bool(ending or beginning))
        if not ending and not beginning:
            return
        await self._begin(beginning, step)
        held = {bucket.index for bucket in ending}
        self._under_way.begin(step, len(ending))
        for bucket in reversed(ending):  # the next forward needs them in this order
            self._under_way.add(bucket)
        for bucket in replica.buckets:
            if bucket.index not in held:
                replica.parameters_ready(bucket)
        if not self._overlap:
            await self._under_way.settle()

    async def settle(self) -> None:
        await self._under_way.settle()
        # A pending average is applied at its own step, but it must have arrived, so that a checkpoint can contain it.
        for flight in list(self._flights.values()):
            await flight.arrived()

    def center(self, bucket: Bucket) -> Payload:
        center = self._method.center(bucket.index)
        assert center is not None, "only elastic averaging has a center"
        return center

    async def require_alike(self, group: Group, tag: str) -> None:
        if self._members.survives:  # a state that was taken over, or an average that some have given up
            await require_alike(self._with_same_parts(group), self._method.state(), tag)

    async def stop(self, *, failed: bool = False) -> None:
        if self._source is not None:
            self._source.close(failed=failed)
        await self._sum.stop()
        await self._under_way.cancel()
        tasks = {flight.task for flight in self._flights.values() if flight.task is not None}
        self._flights.clear()
        await abandoned(tasks)
        self._arithmetic.close()
        if self._made is not None:
            self._made.close()
        await self._members.stop()

    def state_dict(self) -> dict[str, Value]:
        """The method's state, the rounding errors, and averages that have arrived but are not applied yet (call `settle` first)."""
        kept = self._kept()
        if self._rounded is not None:
            errors = self._rounded.state(self._groups.column)
            kept |= {f"lost/{name}": payload for name, payload in errors.items()}
        return {name: kept_value(payload) for name, payload in kept.items()}

    def _kept(self) -> dict[str, Payload]:
        """The method's state, and averages that have arrived but are not applied yet."""
        kept: dict[str, Payload] = dict(self._method.state())
        for index, flight in self._flights.items():
            kept |= {f"own/{index}": flight.own, f"came/{index}": flight.mean}
        return kept

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        restored = {name: kept_payload(f"{name} of the averaging", value) for name, value in state.items()}
        if self._rounded is not None:
            errors = {n.removeprefix("lost/"): p for n, p in restored.items() if n.startswith("lost/")}
            self._rounded.restore(self._groups.column, errors)
        self._restored = {name: payload for name, payload in restored.items() if name.startswith(("own/", "came/"))}
        rest = {n: p for n, p in restored.items() if not n.startswith(("lost/", "own/", "came/"))}
        self._method.restore(rest)

    # The life of a bucket's average.

    async def _begin(self, buckets: Sequence[Bucket], step: int) -> None:
        """Start to average the buckets, in memory apart from that with which training continues."""
        for bucket in buckets:
            part = self._part(bucket)

            def copies(index: int = bucket.index, part: Payload = part) -> tuple[Payload, Payload]:
                own = self._method.travels(index, part)
                return own, copy_of(own)

            own, mean = await self._arithmetic.do(copies, part)
            if self._own is not None:
                self._recorder.audit("combines", step=step, bucket=bucket.index, own=own)
            self._flights[bucket.index] = _Flight(own, mean)
        loop = asyncio.get_running_loop()
        flights = {bucket.index: self._flights[bucket.index] for bucket in buckets}
        if self._members.survives:  # all buckets of a step count, or none
            if flights:
                task = loop.create_task(self._travel_together(flights, step), name=f"averages of step {step}")
                task.add_done_callback(self._travelled)
                for flight in flights.values():
                    flight.task = task
            return
        for index, flight in flights.items():
            travel = self._travel(self._groups.column, index, flight.mean, step)
            flight.task = task = loop.create_task(travel, name=f"average of bucket {index}")
            task.add_done_callback(self._travelled)

    async def _travel_together(self, flights: Mapping[int, _Flight], step: int) -> None:
        """Average these buckets over the members of the step that are still there; on return all of them have the same averages."""
        rounded = self._rounded
        errors = {} if rounded is None else {index: rounded.kept(index) for index in flights}

        copied: dict[Life, int] = {}

        async def attempt(group: Group) -> Group:
            copied.clear()  # one of those that have said it may be lost since then, and its model is not in the average
            await while_all_are_there(group, self._hear_of_copies(group, step, copied))
            for index, kept in errors.items():
                assert rounded is not None
                rounded.take_back(index, kept)
            for flight in flights.values():  # an earlier attempt may have failed because another member was lost
                await self._arithmetic.do(partial(flight.mean.copy_, flight.own), flight.mean)
            column = self._with_same_parts(group)
            travels = (self._travel(column, index, flight.mean, step) for index, flight in flights.items())
            await (together(*travels) if self._own is None else while_all_are_there(group, together(*travels)))
            return group

        group = await self._members.together(f"average/{step}", step + 1, attempt)
        names = [name for bucket in self._replica_started().buckets if bucket.index in flights for name in bucket.names]
        self._recorder.audit("counted", step=step, members=list(group.members), names=names)
        if self._contents is not None:
            lives = {self._members.unit(peer, step) for peer in group.members}
            self._contents.averaged(flights, step, lives, copied)
        if left_out := [peer for peer in self._members.at(step) if peer not in group.members]:
            self._recorder.event("left_out", step=step, workers=list(left_out))

    async def _hear_of_copies(self, group: Group, step: int, copied: dict[Life, int]) -> None:
        """Add to ``copied`` what those began with, as copies of others, that have an average for the first time."""
        plan, contents = self._members.slots, self._contents
        if plan is None or contents is None:
            return
        before = plan.at(max(plan.eras[0].since, step - self._fragments.every))
        if before is plan.at(step):
            return
        known, column = set(before.members), self._with_same_parts(group).members
        firsts = dict(reversed([(self._members.unit(peer, step), peer) for peer in column]))  # one of each group
        new = [peer for life, peer in firsts.items() if life not in known]
        tag, others = (f"{group.name}/copied", step), [peer for peer in column if peer != self._endpoint.peer]
        told = ValuePayload(rows_of(contents.copied))

        async def tell(peer: PeerId) -> None:
            with suppress(PeerLostError):  # the average fails then; but the others wait for this first
                await self._endpoint.send(peer, tag, told)

        if self._endpoint.peer in new:
            await together(*map(tell, others))
        for peer in (peer for peer in others if peer in new):
            async with in_time(peer, f"what its model began with, for the average of step {step}", self._patience_s):
                merge(copied, known_of((await self._endpoint.receive(peer, tag)).meta))

    async def _travel(self, column: Group, index: int, mean: Payload, step: int) -> None:
        tag, groups = ("average", step, index), column.size
        with self._recorder.span(f"average bucket {index}", "send", step=step):
            if self._rounded is not None:
                await self._rounded.mean(column, index, mean, tag, priority=index)
            elif self._own is not None:
                groups = await self._travel_in_parts(column, index, mean, tag)
            else:
                await all_reduce(column, mean, tag, priority=index)
                await self._arithmetic.do(partial(mean.scale_, 1.0 / column.size), mean)
            if (factor := self._method.factor(groups)) != 1.0:
                await self._arithmetic.do(partial(mean.scale_, factor), mean)

    async def _travel_in_parts(self, world: Group, index: int, mean: Payload, tag: Tag) -> int:
        """Average over the groups of which somebody is among ``world``. Returns their number."""
        assert self._made is not None
        me, make = self._endpoint.peer, self._made.of
        teams = [team for group in self._all_groups if (team := tuple(peer for peer in group if peer in world.members))]
        team = next(team for team in teams if me in team)
        size, number = self._groups.group.size, teams.index(team)

        async def average(position: int, part: Payload) -> None:
            owners = tuple(owner_of(position, each) for each in teams)
            column = make(owners, f"{world.name}/column/{position}")
            await all_reduce(column, part, (*tag, position), priority=index)
            await self._arithmetic.do(partial(part.scale_, 1.0 / len(teams)), part)

        parts = enumerate(bounds(mean.numel, size))
        own = ((place, mean.part(*span)) for place, span in parts if owner_of(place, team) == me and span[0] < span[1])
        await together(*(average(position, part) for position, part in own))
        if len(team) > 1:
            await gather_parts(make(team, f"{world.name}/group/{number}"), mean, tag, size=size, priority=index)
        return len(teams)

    def _travelled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._under_way.fail(error)

    def _finish(self, bucket: Bucket, step: int) -> Coroutine[Any, Any, None]:
        return self._apply(bucket, step, self._flights.pop(bucket.index))

    async def _apply(self, bucket: Bucket, step: int, flight: _Flight) -> None:
        group = bucket.sharers(self._groups.group)
        with self._recorder.span(f"wait for the average of bucket {bucket.index}", "wait", step=step):
            await flight.arrived()
        part, own, mean = self._part(bucket), flight.own, flight.mean
        apply = partial(self._method.apply, bucket.index, part, own, mean, mix=self._mix)
        await self._arithmetic.do(apply, part, own, mean)
        if group.size > 1 and self._own is None:
            await all_gather(group, bucket.parameters, ("average", step, bucket.index), priority=bucket.index)
        self._replica_started().parameters_ready(bucket)

    def _require_whole(self, replica: Replica, known: set[str]) -> None:
        """Raise `CheckpointError` unless the restored state is what `state_dict` returned. ``known``: the part that the method
        has."""
        parts = {str(bucket.index): self._part(bucket) for bucket in replica.buckets}
        kept = dict(self._method.state())
        if kept.keys() != known:
            raise CheckpointError(
                f"the checkpoint's averaging state lacks or wrongly contains {min(kept.keys() ^ known)}: use an earlier checkpoint"
            )
        for name, payload in {**kept, **self._restored}.items():
            _, _, index = name.partition("/")
            if index not in parts or (name.startswith("own/") and f"came/{index}" not in self._restored):
                raise CheckpointError(f"the checkpoint's averaging state has {name!r:.60}, but not the values that belong to it")
            require_like(f"{name} of the averaging", payload, parts[index])
        if self._rounded is not None:
            self._rounded.require_like(self._groups.column, parts)

    def _resume_flights(self) -> None:
        """Treat averages that had arrived before the run was resumed as arrived."""
        for name in [name for name in self._restored if name.startswith("own/")]:
            index = int(name.removeprefix("own/"))
            self._flights[index] = _Flight(self._restored[name], self._restored[f"came/{index}"])
        self._restored.clear()

    def weight(self, group: Group) -> float | None:
        return None if self._own is None else weight_in_mean(self._all_groups, self._endpoint.peer, group)

    def _with_same_parts(self, world: Group) -> Group:
        """Those of ``world`` who apply averages of the same parts as this worker."""
        if self._own is not None:
            return world
        column = set(self._groups.column.members)
        return world.part(tuple(rank for rank, peer in enumerate(world.members) if peer in column))

    def _part(self, bucket: Bucket) -> Payload:
        """The part of the bucket whose average this worker applies."""
        if self._own is not None:
            return bucket.parameters
        group = bucket.sharers(self._groups.group)
        return bucket.parameters.part(*bounds(bucket.parameters.numel, group.size)[group.rank])
