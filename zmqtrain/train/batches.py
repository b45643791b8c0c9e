"""Where a worker's batches come from: an order of all samples, the sample ring, or a stream."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.background import Background, BackgroundThread
from zmqtrain.data.batch import Batch
from zmqtrain.data.blocks import Contents, TensorContents
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Fetch, Finish, Loader, Reader
from zmqtrain.data.partition import Partition
from zmqtrain.data.processes import Processes
from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_loader import RingLoader
from zmqtrain.data.ring_plan import RingPlan
from zmqtrain.data.source import Source
from zmqtrain.data.stream import Position, StreamLoader, StreamPlace
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.schema import Topology
from zmqtrain.train.shares import Shares, in_step
from zmqtrain.wire.tensor import TensorPayload


class Batches(Protocol):
    """The batches of one worker. All methods on the loop's thread."""

    @property
    def samples(self) -> int | None:
        """Of an epoch; ``None``: nobody knows before the data ends."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps that take the samples once; ``None``: nobody knows before the data ends."""
        ...

    @property
    def promise(self) -> Promise:
        """What becomes of the samples."""
        ...

    async def more(self, step: int) -> bool:
        """Whether there is a batch for ``step``, the same for all workers. Call it before each step."""
        ...

    def epoch(self, step: int) -> int:
        """The epoch of the step that comes next, or is computed."""
        ...

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        """The step's. ``ahead``: another step follows, so its batch may be fetched meanwhile."""
        ...

    def group_samples(self, step: int) -> float | None:
        """By how many samples the group's gradient of the step is divided; ``None``: the usual number."""
        ...

    def used(self, step: int) -> None:
        """The step is computed."""

    def state_dict(self) -> dict[str, Any] | None:
        """How far the worker is, where that does not follow from the step alone."""
        ...

    def load_state_dict(self, state: object) -> None:
        """Go on from there. Raises `CheckpointError` where it is of other data."""

    async def close(self, timeout_s: float) -> None: ...


class _Counted:
    """What batches of a known number of samples have in common."""

    def __init__(self, samples: int, steps_per_epoch: int, promise: Promise) -> None:
        self.samples: int | None = samples
        self.steps_per_epoch: int | None = steps_per_epoch
        self.promise = promise
        self._steps = steps_per_epoch

    async def more(self, step: int) -> bool:
        return True

    def epoch(self, step: int) -> int:
        return step // self._steps

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: object) -> None:
        return None


class OrderedBatches(_Counted):
    """Implements `Batches` by `Partition`, of which the worker has its share."""

    def __init__(
        self,
        context: RoleContext,
        source: Source,
        partition: Partition,
        shares: Shares,
        finish: Finish,
        thread: Background,
        processes: Processes | None,
    ) -> None:
        role, seed = context.role, context.topology.job.seed
        super().__init__(partition.samples, partition.steps_per_epoch, Promise.of_dataset(source, partition))
        column = role.position % context.topology.compute.columns  # those that divide the model have the same samples
        self._loader = Loader(
            Fetch(reader_of(source), finish),
            lambda step: partition.run(step, *shares.bounds(step)),
            (seed, role.index - role.position + column),  # and the same random augmentation
            thread,
            processes=processes,
            epoch_steps=partition.steps_per_epoch,
        )

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        return await self._loader.batch(step, ahead=ahead)

    def group_samples(self, step: int) -> float | None:
        return None

    def used(self, step: int) -> None:
        return None

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


class RingBatches(_Counted):
    """Implements `Batches` by `RingLoader`."""

    def __init__(
        self, context: RoleContext, source: Source, samples: int, members: Members, finish: Finish, thread: Background
    ) -> None:
        self._seed = (context.topology.job.seed, context.role.index)
        steps = Ring.of(samples, context.placement.groups, context.topology.compute.batch_size, self._seed[0]).steps
        super().__init__(samples, steps, Promise.of_ring(survives=members.survives))
        reader = reader_of(source)
        self._fetch, self._thread = Fetch(reader, finish), thread
        self._keep = source.transform is not None  # it may write to what it is given, so it gets a copy
        self._mean = in_step(context.topology)
        self.ring = ring_loader(context, samples, members, TensorContents(reader.collated), thread)

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


class StreamBatches:
    """Implements `Batches` by `StreamLoader`.

    Where the number of epochs says how long the run is, all workers have ended an epoch as soon as one of them has; before each
    step they tell each other whether they have another batch. Where the number of steps does, each begins anew when it has none.
    """

    samples: int | None = None
    steps_per_epoch: int | None = None

    def __init__(
        self, context: RoleContext, source: Source, shares: Shares, finish: Finish, thread: Background, processes: Processes | None
    ) -> None:
        """Raises `UsageError` for a topology in which a stream is not possible."""
        topology, placement, role = context.topology, context.placement, context.role
        job, columns = topology.job, topology.compute.columns
        self._epochs = None if job.steps is not None or job.until is not None else job.epochs or 1
        _check_stream(source, context, limited=self._epochs is not None)
        start, stop = shares.bounds(0)
        place = StreamPlace(
            role.group * columns + role.position % columns,
            placement.groups * columns,
            start,
            stop,
            placement.groups * topology.compute.batch_size,
        )
        self._name = source.name
        self._loader = StreamLoader(source, place, job.seed, thread, finish, processes)
        self._world: Group | None = None
        if self._epochs is not None and placement.world_size > 1:
            peers = tuple(worker.peer for worker in placement.workers)
            self._world = Group(context.endpoint, peers, role.index, "data", timeout_s=context.timeouts.barrier_s)
        self._recorder = context.recorder
        self.promise = Promise.of_stream(source)

    async def more(self, step: int) -> bool:
        loader = self._loader
        while not await self._everybody(await loader.available(), step):
            if not loader.position.batches:
                raise TaskError(
                    f"{self._name}, a stream, has too few samples for one step of all groups in epoch {loader.position.epoch}: "
                    "lower [compute] batch_size, or give more data; a stream must begin anew each time that iter() is called"
                )
            if self._epochs is not None and loader.position.epoch + 1 >= self._epochs:
                return False
            await loader.next_epoch()
        return True

    async def _everybody(self, mine: bool, step: int) -> bool:
        if self._world is None:
            return mine
        flag = TensorPayload.empty(1, "float64")
        flag.numpy()[0] = float(mine)
        await all_reduce(self._world, flag, ("more", step, self._loader.position.epoch))
        return bool(flag.numpy()[0] == self._world.size)

    def epoch(self, step: int) -> int:
        return self._loader.position.epoch

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        return await self._loader.take(ahead=ahead)

    def group_samples(self, step: int) -> float | None:
        return None

    def used(self, step: int) -> None:
        return None

    def state_dict(self) -> dict[str, Any] | None:
        return self._loader.position.to_dict()

    def load_state_dict(self, state: object) -> None:
        self._loader.resume(Position.of(state))
        if self._loader.skips:
            self._recorder.event("skipping", batches=self._loader.skips, reason="the stream has no state_dict and load_state_dict")

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


def _check_stream(source: Source, context: RoleContext, *, limited: bool) -> None:
    topology = context.topology
    exchange = topology.exchange
    apart = exchange.kind == "model_server" and exchange.policy != "sync" and context.placement.groups > 1
    if topology.elastic:
        raise UsageError(
            f"{source.name} is a stream, which others cannot take over in the middle: set [job] elastic = false, or give a "
            "map-style dataset"
        )
    if topology.compute.parts == "measured":
        raise UsageError(f'[compute] parts = "measured" needs to know all samples, and {source.name} is a stream: give weights')
    if limited and apart:
        raise UsageError(
            f"{source.name} is a stream, whose end nobody knows before, and groups that do not wait for each other would not end "
            "together: set [job] steps instead of epochs"
        )


def partition_of(source: Source, groups: int, topology: Topology, batch_size: int | None = None) -> Partition:
    """The order of a map-style source's samples, divided. Raises `UsageError` where there are too few, and `TaskError`."""
    job, compute = topology.job, topology.compute
    order = source.order_of(job.seed)
    return Partition(
        samples=source.samples if order is None else order.samples,
        groups=groups,
        group_size=compute.columns,
        batch_size=batch_size or compute.batch_size,
        seed=job.seed,
        shuffle=source.shuffle(topology.data.shuffle),
        order=order,
    )


def reader_of(source: Source) -> Reader:
    """Reads a map-style source's samples."""
    return Reader(source.dataset, source.collate, source.transform)


def sample_batch(source: Source, samples: int, finish: Finish, seed: int) -> Batch:
    """A batch of the first samples, and again from the beginning where there are fewer, to try something out.

    Raises `UsageError` for a stream, of which that would take samples away."""
    if source.stream:
        raise UsageError(
            f"{source.name} is a stream: to plan or profile, give the task a map-style dataset, if only of a few samples"
        )
    return Fetch(reader_of(source), finish)(np.arange(samples) % len(source.dataset), (seed,))


def make_batches(
    context: RoleContext,
    source: Source,
    partition: Partition | None,
    shares: Shares,
    members: Members,
    finish: Finish,
    thread: Background,
) -> Batches:
    """What ``[data] shuffle`` and the source ask for. ``partition``: of a source that is no stream. Raises `UsageError`."""
    # On virtual time nothing may run beside: the thread reads, which gives the same batches.
    processes = source.processes if isinstance(thread, BackgroundThread) else None
    if partition is None:
        return StreamBatches(context, source, shares, finish, thread, processes)
    if context.topology.data.shuffle == "ring":
        return RingBatches(context, source, partition.samples, members, finish, thread)
    return OrderedBatches(context, source, partition, shares, finish, thread, processes)


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
        timeout_s=context.timeouts.barrier_s,
        recorder=context.recorder,
    )

    def change(step: int, workers: tuple[PeerId, ...]) -> None:
        loader.change(step, tuple(peer for peer in workers if peer in column))

    members.on_change(change)
    return loader
