"""Batches for a user's training loop: this worker's part of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from zmqtrain.data.background import BackgroundThread
from zmqtrain.data.batch import Batch
from zmqtrain.data.content import content_of
from zmqtrain.data.loader import Fetch, Finish, Loader
from zmqtrain.data.source import Shard, Source, source_of
from zmqtrain.data.stream import StreamLoader
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.membership.context import RoleContext
from zmqtrain.topology.elastic import ASKING
from zmqtrain.train.batches import partition_of, reader_of, same_samples
from zmqtrain.train.shares import Shares, stream_place

#: ``agree(mine)``: whether ``mine`` is true on all workers. Every worker must call it equally often.
Agree = Callable[[bool], Coroutine[Any, Any, bool]]


class Feed(Protocol):
    """Batches of one epoch. All methods on the loop's thread."""

    group_samples: int
    """Samples of the whole group's batch."""

    async def next(self) -> Batch | None:
        """The next batch as it was collated, as the only input; ``None`` when the epoch has ended on all workers."""
        ...

    async def close(self, timeout_s: float) -> None: ...


class DatasetFeed:
    """Implements `Feed` for a dataset of known length."""

    def __init__(self, loader: Loader, steps: range, group_samples: int) -> None:
        self._loader, self._steps, self.group_samples = loader, list(reversed(steps)), group_samples

    async def next(self) -> Batch | None:
        if not self._steps:
            return None
        step = self._steps.pop()
        return await self._loader.batch(step, ahead=bool(self._steps))

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


class StreamFeed:
    """Implements `Feed` for a stream: it ends for all workers when it has ended for one."""

    def __init__(self, loader: StreamLoader, name: str, epoch: int, agree: Agree, group_samples: int) -> None:
        self._loader, self._name, self._agree, self.group_samples = loader, name, agree, group_samples
        self._begun = False
        loader.position.epoch = epoch

    async def next(self) -> Batch | None:
        if not await self._agree(await self._loader.available()):
            if not self._begun:
                raise TaskError(
                    f"{self._name} is a stream that gave some worker not a single batch in this epoch: it is too short, or an "
                    "iterator that has ended (a generator, zip(), iter(loader)). Pass what can be iterated again: a dataset, a "
                    "DataLoader, an IterableDataset"
                )
            return None
        self._begun = True
        return await self._loader.take(ahead=True)

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


def source_for(context: RoleContext, data: Any, batch_size: int | None, shard: Shard | None) -> tuple[Source, int]:
    """``data`` as `zmqtrain.data.source` takes it, and the samples of the whole group's batch. Raises `UsageError` and `TaskError`
    for data that cannot be divided."""
    topology = context.topology
    source = source_of("the session's data", data, shard=shard)
    size = batch_size or source.batch_size or topology.compute.batch_size
    if topology.data.shuffle == "ring":
        raise UsageError('[data] shuffle = "ring" is for tasks: use "global" or "none" with your own training loop')
    if topology.compute.parts == "measured":
        raise UsageError('[compute] parts = "measured" is for tasks: with your own training loop give weights, or remove parts')
    source.require(size, topology.data.shuffle)
    return source, size


def steps_of(context: RoleContext, data: Any, batch_size: int | None, shard: Shard | None) -> int | None:
    """The batches of an epoch; ``None`` for a stream, which has no length. Raises what `source_for` raises."""
    source, size = source_for(context, data, batch_size, shard)
    return None if source.stream else partition_of(source, context.placement.groups, context.topology, size).steps_per_epoch


def content_for(context: RoleContext, data: Any, batch_size: int | None, shard: Shard | None) -> tuple[int, list[str], Any] | None:
    """The number of samples, what is known of them in memory (`zmqtrain.data.content`), and the dataset; ``None`` for a stream.
    Raises what `source_for` raises."""
    source, size = source_for(context, data, batch_size, shard)
    if source.stream:
        return None
    partition = partition_of(source, context.placement.groups, context.topology, size)
    return partition.samples, content_of(source.dataset, partition.order), source.dataset


def make_feed(
    context: RoleContext,
    data: Any,
    epoch: int,
    batch_size: int | None,
    shard: Shard | None,
    pin: bool,
    agree: Agree,
    *,
    first: int = 0,
) -> Feed:
    """The batches of an epoch from number ``first`` on. Raises what `source_for` raises."""
    topology, role, placement = context.topology, context.role, context.placement
    source, size = source_for(context, data, batch_size, shard)
    shares = Shares.of(topology, placement, role, size)
    finish = Finish(_as_collated, pin=pin if source.pin is None else source.pin)
    seed = topology.job.seed
    if source.stream:
        if first:
            raise UsageError(f"{source.name} is a stream, which cannot skip batches: remove `first`")
        if topology.asks_elastic:
            raise UsageError(f"other workers cannot take over a stream in the middle: remove {ASKING}")
        place = stream_place(topology, placement, role, shares, size)
        loader = StreamLoader(source, place, seed, BackgroundThread("zmqtrain-loader"), finish, source.processes)
        return StreamFeed(loader, source.name, epoch, agree, size)
    partition = partition_of(source, placement.groups, topology, size)
    steps = partition.steps_per_epoch
    if not 0 <= first <= steps:
        raise UsageError(f"{source.name}: first = {first}, but an epoch has {steps} batches")
    ordered = Loader(
        Fetch(reader_of(source), finish),
        lambda step: partition.run(step, *shares.bounds(step)),
        (seed, same_samples(context)),
        processes=source.processes,
        epoch_steps=steps,
    )
    return DatasetFeed(ordered, range(epoch * steps + first, (epoch + 1) * steps), size)


def _as_collated(collated: Any, samples: int) -> Batch:
    # torch's collate turns the tuple of a sample into a list.
    return Batch((tuple(collated) if type(collated) is list else collated,), None, samples)
