"""Where a worker's batches come from: an order of all samples, or the sample ring."""

from __future__ import annotations

from typing import Protocol

from zmqtrain.data.background import Background
from zmqtrain.data.blocks import Contents, TensorContents
from zmqtrain.data.loader import Batch, Fetch, Loader
from zmqtrain.data.partition import Partition
from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_loader import RingLoader
from zmqtrain.data.ring_plan import RingPlan
from zmqtrain.errors import UsageError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.train.shares import Shares, in_step
from zmqtrain.train.task import Task


class Batches(Protocol):
    """The batches of one worker. All methods on the loop's thread."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that take the samples once."""
        ...

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        """The step's. ``ahead``: another step follows, so its batch may be fetched meanwhile."""
        ...

    def group_samples(self, step: int) -> float | None:
        """By how many samples the group's gradient of the step is divided; ``None``: the usual number."""
        ...

    def used(self, step: int) -> None:
        """The step is computed."""

    async def close(self, timeout_s: float) -> None: ...


class OrderedBatches:
    """Implements `Batches` by `Partition`, of which the worker has its share."""

    def __init__(self, context: RoleContext, partition: Partition, shares: Shares, fetch: Fetch, thread: Background) -> None:
        role, seed = context.role, context.topology.job.seed
        self._partition = partition
        column = role.position % context.topology.compute.columns  # those that divide the model have the same samples
        key = (seed, role.index - role.position + column)  # and the same random augmentation
        self._loader = Loader(fetch, lambda step: partition.run(step, *shares.bounds(step)), key, thread)

    @property
    def steps_per_epoch(self) -> int:
        return self._partition.steps_per_epoch

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        return await self._loader.batch(step, ahead=ahead)

    def group_samples(self, step: int) -> float | None:
        return None

    def used(self, step: int) -> None:
        return None

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


class RingBatches:
    """Implements `Batches` by `RingLoader`."""

    def __init__(
        self, context: RoleContext, samples: int, members: Members, fetch: Fetch, thread: Background, *, keep: bool
    ) -> None:
        """``keep``: the transform may write to what it is given, so it gets a copy."""
        self._fetch, self._thread, self._keep = fetch, thread, keep
        self._seed = (context.topology.job.seed, context.role.index)
        self._mean = in_step(context.topology)
        self.ring = ring_loader(context, samples, members, TensorContents(fetch.collated), thread)
        self._steps = Ring.of(samples, context.placement.groups, context.topology.compute.batch_size, self._seed[0]).steps

    @property
    def steps_per_epoch(self) -> int:
        return self._steps

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        block = await self.ring.block(step)

        def content() -> object:
            return TensorContents.copied(block.content) if self._keep else block.content

        return await self._thread.submit(lambda: self._fetch.finished(block.ids, content, (*self._seed, step)))

    def group_samples(self, step: int) -> float | None:
        return self.ring.group_samples(step, mean=self._mean)

    def used(self, step: int) -> None:
        self.ring.used(step)

    async def close(self, timeout_s: float) -> None:
        await self.ring.close(timeout_s)


def make_batches(
    context: RoleContext, task: Task, partition: Partition, shares: Shares, members: Members, fetch: Fetch, thread: Background
) -> Batches:
    """What ``[data] shuffle`` asks for."""
    if context.topology.data.shuffle == "ring":
        return RingBatches(context, len(task.train_data), members, fetch, thread, keep=task.transform is not None)
    return OrderedBatches(context, partition, shares, fetch, thread)


def ring_loader(context: RoleContext, samples: int, members: Members, contents: Contents, thread: Background) -> RingLoader:
    """This worker's place on the ring of its like in all groups. Raises `UsageError` where there are too few samples."""
    topology, placement, role = context.topology, context.placement, context.role
    compute = topology.compute
    column = tuple(placement.group_members(group)[role.position] for group in range(placement.groups))
    ring = Ring.of(samples, placement.groups, compute.batch_size, topology.job.seed)
    smallest = min(len(part) for part in ring.parts) // ring.steps
    if smallest < compute.group_size:
        raise UsageError(
            f"a batch of the sample ring may have {smallest} samples, fewer than group_size = {compute.group_size}: lower "
            "group_size or groups, or give more data"
        )
    loader = RingLoader(
        RingPlan(ring, column),
        contents,
        context.endpoint,
        position=(role.position, compute.group_size),
        survives=members.survives,
        late=members.late,
        travel=topology.data.ring == "tensors",
        thread=thread,
        timeout_s=context.ladder.barrier_s,
        recorder=context.recorder,
    )

    def change(step: int, workers: tuple[PeerId, ...]) -> None:
        loader.change(step, tuple(peer for peer in workers if peer in column))

    members.on_change(change)
    return loader
