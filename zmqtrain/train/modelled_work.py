"""A worker's work on a modelled device. No torch, no task, no checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import barrier
from zmqtrain.data.partition import Partition, even_bounds
from zmqtrain.errors import UsageError
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Bucket, Exchange
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.train.device.modelled import ModelledReplica, Profile
from zmqtrain.train.work import StepResult


class ModelledWork:
    """Implements `zmqtrain.train.work.Work` by waiting."""

    def __init__(self, context: RoleContext) -> None:
        topology, placement, role = context.topology, context.placement, context.role
        compute = topology.compute
        if compute.profile is None:
            raise UsageError('[compute] device = "modelled" needs profile, a JSON file with layer times')
        self._profile = Profile.load(compute.profile)
        self._replica = ModelledReplica(
            self._profile,
            bucket_bytes=compute.bucket_bytes,
            overlap=compute.overlap,
            timeout_s=context.ladder.barrier_s,
            recorder=context.recorder,
        )
        self._partition = Partition(
            self._profile.samples, placement.groups, placement.group_size, compute.batch_size, topology.job.seed, "none"
        )
        start, stop = even_bounds(compute.batch_size, compute.group_size, role.position)
        self._samples = stop - start
        self._update_s = 0.0

    @property
    def replica(self) -> ModelledReplica:
        return self._replica

    @property
    def steps_per_epoch(self) -> int:
        return self._partition.steps_per_epoch

    @property
    def evaluates(self) -> bool:
        return self._profile.evaluate_s > 0

    def describe(self) -> dict[str, EventValue]:
        parameters = sum(layer.numel for layer in self._profile.layers)
        return {"parameters": parameters, "buckets": len(self._replica.buckets), "device": "modelled"}

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        self._replica.connect(on_ready)

    async def restore(self, endpoint: Endpoint, exchange: Exchange) -> int | None:
        return None

    async def save(self, endpoint: Endpoint, exchange: Exchange, step: int) -> bool:
        return False

    async def train_step(self, step: int, *, ahead: bool) -> StepResult:
        return await self._replica.step(step, self._samples)

    def after_step(self) -> None:
        return None

    def updating_s(self) -> float:
        before, self._update_s = self._update_s, self._replica.update_s
        return self._update_s - before

    async def quiet(self) -> None:
        await self._replica.take_all()

    async def evaluate(self, group: Group, tag: str) -> dict[str, float]:
        await self.quiet()
        await asyncio.sleep(self._profile.evaluate_s / group.size)
        await barrier(group, (tag, "done"))
        return {}

    async def make_equal(self, group: Group, tag: str) -> float:
        return 0.0

    async def close(self, timeout_s: float) -> None:
        return None
