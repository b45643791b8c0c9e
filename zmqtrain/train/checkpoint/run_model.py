"""The run's model: what evaluations judge, checkpoints store as ``model``, and a run leaves at its end.

===========================================  =====================================================================================
exchange                                     the run's model
===========================================  =====================================================================================
allreduce; averaging at every step           the parameters, which are equal on all workers
model servers                                the servers' parameters: during training those of one moment of each server, after
                                             group 0's last step and before its next; at the end, with all steps of all groups
gossip, averaging                            the exact mean of all groups' parameters
averaging by ``elastic``                     the center, not the mean
===========================================  =====================================================================================

Buffers, like batch norm's statistics, are always those of the first worker, as in evaluations. With merged layers the FC server's
part, as it is at the same moment, belongs to the model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, all_reduce
from zmqtrain.exchange.averaging.methods import copy_of
from zmqtrain.exchange.base import Bucket, Exchange, Replica, RunModel
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


@asynccontextmanager
async def gathered(replica: Replica, exchange: Exchange, group: Group, own: Group, tag: str) -> AsyncIterator[float]:
    """A context in which all members of ``group`` have the run's model in place of their own parameters, with `RunModel.MEAN` and
    `RunModel.CENTER`. All members must enter it. Yields the largest difference between this worker's own parameters and the model.

    ``own``: the worker's compute group. Call `TorchReplica.take_all` next, both inside the context and after it.
    """
    mine = [copy_of(bucket.parameters) for bucket in replica.buckets]
    try:
        largest = 0.0
        await take_run_model(replica, exchange, group, own, tag)
        for bucket, kept in zip(replica.buckets, mine, strict=True):
            largest = max(largest, _difference(kept, bucket.parameters))
        yield largest
    finally:
        for bucket, kept in zip(replica.buckets, mine, strict=True):
            bucket.parameters.copy_(kept)
            replica.parameters_ready(bucket)


async def take_run_model(replica: Replica, exchange: Exchange, group: Group, own: Group, tag: str) -> None:
    """As `gathered`, but the worker's own parameters are not restored."""
    await exchange.require_alike(group, tag)
    for bucket in replica.buckets:
        if exchange.model is RunModel.CENTER:
            await _take_center(bucket, exchange.center(bucket), own, tag)
        else:
            await _take_mean(bucket, group, tag, exchange.weight(group))
        replica.parameters_ready(bucket)


async def _take_mean(bucket: Bucket, group: Group, tag: str, weight: float | None) -> None:
    sharers = bucket.sharers(group)
    if weight is not None:
        bucket.parameters.scale_(weight)
    await all_reduce(sharers, bucket.parameters, (tag, "mean", bucket.index))
    if weight is None:
        bucket.parameters.scale_(1.0 / sharers.size)


async def _take_center(bucket: Bucket, part: Payload, own: Group, tag: str) -> None:
    sharers = bucket.sharers(own)
    if sharers.size == 1:
        bucket.parameters.copy_(part)
        return
    start, stop = bounds(bucket.parameters.numel, sharers.size)[sharers.rank]
    bucket.parameters.part(start, stop).copy_(part)
    await all_gather(sharers, bucket.parameters, (tag, "center", bucket.index))


def _difference(one: Payload, other: Payload) -> float:
    """The largest absolute difference; 0 for payloads without elements in memory."""
    if not isinstance(one, TensorPayload) or not isinstance(other, TensorPayload):
        return 0.0
    return float((one.tensor - other.tensor).abs().max())
