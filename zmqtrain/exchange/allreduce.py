"""Plain synchronous data parallelism: gradients are summed over all workers, and each updates its own replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import broadcast
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, Replica
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.wire.payload import Value


class AllReduceExchange:
    """Implements `Exchange` with no server. ``world`` holds the workers of all ``groups``.

    All replicas stay equal to the bit: they begin with rank 0's parameters, and all-reduce gives every rank identical sums.
    """

    def __init__(self, world: Group, groups: int, *, recorder: Recorder | None = None, overlap: bool = True) -> None:
        self._world = world
        self._groups = groups
        self._sum = GradientSum(world, recorder or NullRecorder(), overlap=overlap)
        self._replica: Replica | None = None

    @property
    def synchronous(self) -> bool:
        return True

    async def start(self, replica: Replica, *, restored: bool = False) -> None:
        # Also if restored: the ranks then hold equal parameters already, and to send them once more costs one step's traffic.
        self._replica = replica
        await spread(self._world, replica)

    def begin_step(self, step: int) -> None:
        self._sum.begin(step, self._replica_started().buckets)

    def bucket_ready(self, bucket: Bucket) -> None:
        self._sum.add(bucket)

    async def end_step(self) -> None:
        await self._sum.wait()
        # Within a group the gradients sum up to the group's mean; over g groups, to g times the mean of all.
        await self._replica_started().update(gradient_scale=1.0 / self._groups)

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

    def _replica_started(self) -> Replica:
        assert self._replica is not None, "start() comes first"
        return self._replica


async def spread(world: Group, replica: Replica) -> None:
    """Give every replica the parameters of rank 0's. One bucket after the other, so little memory is under way."""
    for bucket in replica.buckets:
        await broadcast(world, bucket.parameters, ("start", bucket.index))
        replica.parameters_ready(bucket)
