"""The mean of models that differ from group to group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.exchange.base import Replica
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


async def mean_of_replicas(replica: Replica, group: Group, tag: str) -> float:
    """Give all members the mean of their parameters. Returns the largest difference of any of this worker's from it."""
    largest = 0.0
    for bucket in replica.buckets:
        payload, sharers = bucket.parameters, bucket.sharers(group)
        mean = payload.empty_like()
        mean.copy_(payload)
        await all_reduce(sharers, mean, (tag, "mean", bucket.index))
        mean.scale_(1.0 / sharers.size)
        largest = max(largest, _difference(payload, mean))
        payload.copy_(mean)
        replica.parameters_ready(bucket)
    return largest


@asynccontextmanager
async def mean_for_a_while(replica: Replica, group: Group, tag: str) -> AsyncIterator[None]:
    """For a while all members have the mean of their parameters; afterwards each has its own again."""
    own = [bucket.parameters.empty_like() for bucket in replica.buckets]
    for bucket, kept in zip(replica.buckets, own, strict=True):
        kept.copy_(bucket.parameters)
    try:
        await mean_of_replicas(replica, group, tag)
        yield
    finally:
        for bucket, kept in zip(replica.buckets, own, strict=True):
            bucket.parameters.copy_(kept)
            replica.parameters_ready(bucket)


def _difference(one: Payload, other: Payload) -> float:
    """The largest; 0 for payloads without elements in memory."""
    if not isinstance(one, TensorPayload) or not isinstance(other, TensorPayload):
        return 0.0
    return float((one.tensor - other.tensor).abs().max())
