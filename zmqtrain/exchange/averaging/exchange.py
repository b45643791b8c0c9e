"""Groups train on their own and combine their models every few steps."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, all_reduce
from zmqtrain.errors import CheckpointError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.allreduce import spread
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.averaging.fragments import Fragments
from zmqtrain.exchange.averaging.methods import Average, Elastic, Method, Outer, copy_of
from zmqtrain.exchange.averaging.rounded_mean import RoundedMean
from zmqtrain.exchange.base import Bucket, Optimize, Replica, RunModel
from zmqtrain.exchange.checkpoint_part import kept_payload, require_like
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.exchange.serverless import Serverless
from zmqtrain.exchange.sums import NetworkSums, Sums
from zmqtrain.exchange.under_way import UnderWay
from zmqtrain.wire.payload import Payload, Value


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
    task: asyncio.Task[None]


class AveragingExchange(Serverless):
    """Implements `Exchange`: the gradients are summed within the group at each step, and ``method`` combines the groups' models
    after the steps that ``fragments`` names.

    The members of a group hold equal models, so the worker at position i handles only part i of each bucket, together with the
    workers at that position in the other groups; then the group gathers the parts. With g groups of k workers, a worker thus sends
    2(g-1)/(gk) + (k-1)/k of the model, against 2(gk-1)/(gk) for an all-reduce over all workers and 2(g-1)/g for a whole model per
    position. Between the groups, where the slow links are, one model per group is sent, not k.

    Each group keeps its own optimizer state (momentum). Between averagings the groups' models differ; the run's model is their mean
    or, with elastic averaging, its center.
    """

    def __init__(
        self,
        groups: AveragingGroups,
        fragments: Fragments,
        method: Method | None = None,
        *,
        deltas: Literal["float32", "fp16", "int8"] = "float32",
        mix: float = 0.0,
        sums: Sums | None = None,
        recorder: Recorder | None = None,
        overlap: bool = True,
    ) -> None:
        """``sums`` are over the group, by default over the network.

        ``mix``: see `zmqtrain.exchange.averaging.methods`; it has an effect only if ``fragments`` have a delay.
        """
        super().__init__(sums or NetworkSums(groups.group))
        self._groups, self._fragments, self._method = groups, fragments, method or Average()
        self._mix = mix if fragments.delay else 0.0
        self._arithmetic = Arithmetic("zmqtrain-averaging")
        self._rounded = None if deltas == "float32" else RoundedMean(groups.column, deltas, self._arithmetic)
        self._recorder: Recorder = recorder or NullRecorder()
        self._sum = GradientSum(self._sums, self._recorder, self._abort, overlap=overlap)
        self._under_way = UnderWay(self._finish, self._abort)
        self._flights: dict[int, _Flight] = {}
        self._restored: dict[str, Payload] = {}
        self._overlap = overlap
        self._step = 0

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
            sums=context.sums_of_group(groups.group, in_place=context.untouched),
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
        if not restored:
            await spread(self._groups.world, replica)
        # Otherwise each group continues with its own model; its members wrote equal ones to the checkpoint.
        known = set(self._method.state())
        for bucket in replica.buckets:
            part = self._part(bucket)
            await self._arithmetic.do(partial(self._method.begin, bucket.index, part), part)
        if restored:
            self._require_whole(replica, known)
        self._resume_flights()
        await self._sum.start(replica)
        return None

    def begin_step(self, step: int) -> None:
        self._step = step
        self._sum.begin(step, len(self._replica_started().buckets))

    def bucket_ready(self, bucket: Bucket) -> None:
        self._sum.add(bucket)

    async def end_step(self) -> None:
        replica, step, fragments = self._replica_started(), self._step, self._fragments
        await self._sum.wait()
        alone = self._groups.column.size == 1
        ending = [] if alone else [b for b in replica.buckets if b.index in self._flights and fragments.ends(step, b.index)]
        beginning = [] if alone else [b for b in replica.buckets if fragments.begins(step, b.index)]
        if fragments.delay == 0:
            ending = beginning
        if not ending and not beginning:
            await replica.update()
            return
        await replica.update(hold=True)
        for bucket in beginning:
            await self._begin(bucket, step)
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
            await asyncio.wait({flight.task})
            flight.task.result()

    def center(self, bucket: Bucket) -> Payload:
        center = self._method.center(bucket.index)
        assert center is not None, "only elastic averaging has a center"
        return center

    async def stop(self) -> None:
        await self._sum.stop()
        await self._under_way.cancel()
        tasks = [flight.task for flight in self._flights.values()]
        self._flights.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # nothing waits for it any more
        self._arithmetic.close()

    def state_dict(self) -> dict[str, Value]:
        """The method's state, the rounding errors, and averages that have arrived but are not applied yet (call `settle` first)."""
        kept: dict[str, Payload] = dict(self._method.state())
        if self._rounded is not None:
            kept |= {f"lost/{name}": payload for name, payload in self._rounded.state().items()}
        for index, flight in self._flights.items():
            kept |= {f"own/{index}": flight.own, f"came/{index}": flight.mean}
        return {name: [payload.dtype, b"".join(payload.frames())] for name, payload in kept.items()}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        restored = {name: kept_payload(f"{name} of the averaging", value) for name, value in state.items()}
        if self._rounded is not None:
            self._rounded.restore({n.removeprefix("lost/"): p for n, p in restored.items() if n.startswith("lost/")})
        self._restored = {name: payload for name, payload in restored.items() if name.startswith(("own/", "came/"))}
        rest = {n: p for n, p in restored.items() if not n.startswith(("lost/", "own/", "came/"))}
        self._method.restore(rest)

    # The life of a bucket's average.

    async def _begin(self, bucket: Bucket, step: int) -> None:
        """Start to average the bucket, in memory apart from that with which training continues."""
        part = self._part(bucket)

        def copies() -> tuple[Payload, Payload]:
            own = self._method.travels(bucket.index, part)
            return own, copy_of(own)

        own, mean = await self._arithmetic.do(copies, part)
        travel = self._travel(bucket.index, mean, step)
        task = asyncio.get_running_loop().create_task(travel, name=f"average of bucket {bucket.index}")
        task.add_done_callback(self._travelled)
        self._flights[bucket.index] = _Flight(own, mean, task)

    async def _travel(self, index: int, mean: Payload, step: int) -> None:
        column, tag = self._groups.column, ("average", step, index)
        with self._recorder.span(f"average bucket {index}", "send", step=step):
            if self._rounded is not None:
                await self._rounded.mean(index, mean, tag, priority=index)
            else:
                await all_reduce(column, mean, tag, priority=index)
                await self._arithmetic.do(partial(mean.scale_, 1.0 / column.size), mean)

    def _travelled(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._under_way.fail(error)

    def _finish(self, bucket: Bucket, step: int) -> Coroutine[Any, Any, None]:
        return self._apply(bucket, step, self._flights.pop(bucket.index))

    async def _apply(self, bucket: Bucket, step: int, flight: _Flight) -> None:
        group = bucket.sharers(self._groups.group)
        with self._recorder.span(f"wait for the average of bucket {bucket.index}", "wait", step=step):
            await asyncio.wait({flight.task})
        flight.task.result()
        part, own, mean = self._part(bucket), flight.own, flight.mean
        await self._arithmetic.do(partial(self._method.apply, bucket.index, part, own, mean, mix=self._mix), part, own, mean)
        if group.size > 1:
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
            self._rounded.require_like(parts)

    def _resume_flights(self) -> None:
        """Treat averages that had arrived before the run was resumed as arrived."""
        for name in [name for name in self._restored if name.startswith("own/")]:
            index = int(name.removeprefix("own/"))
            done = asyncio.get_running_loop().create_task(asyncio.sleep(0), name=f"average of bucket {index}")
            self._flights[index] = _Flight(self._restored[name], self._restored[f"came/{index}"], done)
        self._restored.clear()

    def _part(self, bucket: Bucket) -> Payload:
        """The part of the bucket that this worker averages."""
        group = bucket.sharers(self._groups.group)
        return bucket.parameters.part(*bounds(bucket.parameters.numel, group.size)[group.rank])
