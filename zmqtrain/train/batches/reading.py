"""How the samples of a map-style source are read: in which order, and by whom."""

from __future__ import annotations

import numpy as np

from zmqtrain.data.batch import Batch
from zmqtrain.data.loader import Fetch, Finish, Reader
from zmqtrain.data.partition import Partition
from zmqtrain.data.source import Source
from zmqtrain.errors import UsageError
from zmqtrain.membership.context import RoleContext
from zmqtrain.topology.schema import Topology


def partition_of(source: Source, groups: int, topology: Topology, batch_size: int | None = None) -> Partition:
    """The order of a map-style source's samples, divided between ``groups``. Raises `UsageError` if there are too few, and
    `TaskError`."""
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


def same_samples(context: RoleContext) -> int:
    """The rank of the first worker that has the same samples as this one, and draws the same for them: workers that divide a model
    between them do."""
    role = context.role
    return role.index - role.position + context.topology.compute.column_of(role.position) * context.topology.compute.rows


def sample_batch(source: Source, samples: int, finish: Finish, seed: int) -> Batch:
    """A batch of the first samples, repeated if there are too few, for a trial run.

    Raises `UsageError` for a stream, whose samples would then be missing from training."""
    if source.stream:
        raise UsageError(
            f"{source.name} is a stream: to plan or profile, give the task a map-style dataset; a few samples are enough"
        )
    return Fetch(reader_of(source), finish)(np.arange(samples) % len(source.dataset), (seed,))
