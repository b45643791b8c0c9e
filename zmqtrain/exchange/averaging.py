"""Groups train on their own and average their models every few steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, all_reduce
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.allreduce import spread
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.wire.payload import Value


@dataclass(frozen=True, slots=True)
class AveragingGroups:
    """The three sets of workers that this worker belongs to."""

    world: Group
    """All workers."""
    group: Group
    """The workers of its compute group, by position."""
    column: Group
    """The workers with its position, one of each group."""


class AveragingExchange:
    """Implements `Exchange`: the gradients are summed within the group at each step, the parameters averaged over the groups after
    every ``every``-th step.

    The members of a group hold equal models, so the worker at position i averages only part i with its like in the other groups,
    and the group gathers the parts. A worker so moves 2(g-1)/(gk) + (k-1)/k of the model, against 2(gk-1)/(gk) for an all-reduce
    over all workers and 2(g-1)/g for one whole model a column; and between the groups, where the slow links are, travels one
    model a group and not k.

    Optimizer state (momentum) stays each group's own. Between averagings the groups' models differ: evaluation and the final model
    are group 0's, so let the number of steps be a multiple of ``every``.
    """

    def __init__(self, groups: AveragingGroups, every: int, *, recorder: Recorder | None = None, overlap: bool = True) -> None:
        if every < 1:
            raise ValueError(f"models are averaged every {every} steps: it must be at least 1")
        self._groups = groups
        self._every = every
        self._recorder: Recorder = recorder or NullRecorder()
        self._sum = GradientSum(groups.group, self._recorder, overlap=overlap)
        self._replica: Replica | None = None
        self._step = 0

    @property
    def synchronous(self) -> bool:
        return self._every == 1 or self._groups.column.size == 1

    @property
    def averaged(self) -> bool:
        return False

    async def start(self, replica: Replica, *, restored: bool = False) -> None:
        self._replica = replica
        if restored:
            # Each group continues with its own model; its members wrote equal ones into the checkpoint.
            return
        await spread(self._groups.world, replica)

    def begin_step(self, step: int) -> None:
        self._step = step
        self._sum.begin(step, self._replica_started().buckets)

    def exchanges(self, step: int) -> bool:
        return True

    def bucket_ready(self, bucket: Bucket) -> None:
        self._sum.add(bucket)

    async def end_step(self) -> None:
        replica = self._replica_started()
        await self._sum.wait()
        await replica.update()
        # By the step's number and not by a counter, so a resumed run averages at the same steps.
        if (self._step + 1) % self._every == 0 and self._groups.column.size > 1:
            with self._recorder.span("average", "wait", step=self._step):
                await self._average_all(replica)

    async def settle(self) -> None:
        return None

    async def stop(self) -> None:
        await self._sum.cancel()

    def staleness(self) -> Sequence[int]:
        return ()

    def state_dict(self) -> dict[str, Value]:
        return {}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        return None

    async def _average_all(self, replica: Replica) -> None:
        tasks = [asyncio.create_task(self._average(bucket, replica)) for bucket in replica.buckets]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _average(self, bucket: Bucket, replica: Replica) -> None:
        group, column = self._groups.group, self._groups.column
        tag = ("average", self._step, bucket.index)
        part = bucket.parameters.part(*bounds(bucket.parameters.numel, group.size)[group.rank])
        await all_reduce(column, part, tag, priority=bucket.index)
        part.scale_(1.0 / column.size)
        await all_gather(group, bucket.parameters, tag, priority=bucket.index)
        replica.parameters_ready(bucket)

    def _replica_started(self) -> Replica:
        assert self._replica is not None, "start() comes first"
        return self._replica
