"""Plain synchronous data parallelism: gradients are averaged over all groups, and each worker updates its own replica.

With overlap this is the layer-wise asynchronous baseline of GossipGraD (Daily et al. 2018, AGD): a bucket is summed as soon as
backward has produced it, and updated when the next forward comes to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import broadcast
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, Optimize, Replica, RunModel
from zmqtrain.exchange.sums import Sums
from zmqtrain.exchange.under_way import UnderWay
from zmqtrain.wire.payload import Payload, Value


class AllReduceExchange:
    """Implements `Exchange` with no server. ``sums`` are over the workers of all ``groups``.

    All replicas stay equal to the bit: they begin with rank 0's parameters, and all-reduce gives every rank identical sums.

    ``every`` > 1: the gradients of so many steps are added up, exchanged in the last one's backward and applied once, as one step
    of a batch so many times as large. Steps left over when training ends are not applied.

    ``by_bucket``: update each bucket when the next forward takes it, so that only what the forward needs at once is waited for.
    Otherwise the end of a step waits for all gradients, and then runs the optimizer: gradients can be clipped by their norm so.
    """

    def __init__(
        self,
        sums: Sums,
        groups: int,
        *,
        every: int = 1,
        by_bucket: bool = False,
        recorder: Recorder | None = None,
        overlap: bool = True,
    ) -> None:
        if every < 1:
            raise ValueError(f"gradients are exchanged every {every} steps: it must be at least 1")
        self._sums, self._every, self._by_bucket = sums, every, by_bucket
        # Within a group the gradients sum up to the group's mean; over g groups, to g times the mean of all.
        self._scale = 1.0 / (groups * every * sums.scale)
        self._recorder: Recorder = recorder or NullRecorder()
        self._under_way = UnderWay(self._sum, self._abort, overlap=overlap)
        self._replica: Replica | None = None
        self._step = 0

    @property
    def synchronous(self) -> bool:
        return True

    @property
    def averaged(self) -> bool:
        return False

    @property
    def model(self) -> RunModel:
        return RunModel.REPLICA

    async def start(self, replica: Replica, *, restored: bool = False) -> None:
        # Also if restored: the ranks then hold equal parameters already, and to send them once more costs one step's traffic.
        self._replica = replica
        replica.optimize(Optimize.AFTER if self._by_bucket else Optimize.APART)
        await spread(self._sums.group, replica)
        await self._sums.start(replica)

    def begin_step(self, step: int) -> None:
        self._step = step
        if self.exchanges(step):
            self._under_way.begin(step, len(self._replica_started().buckets))

    def exchanges(self, step: int) -> bool:
        # By the step's number and not by a counter, so a resumed run exchanges at the same steps.
        return (step + 1) % self._every == 0

    def bucket_ready(self, bucket: Bucket) -> None:
        self._under_way.add(bucket)

    async def end_step(self) -> None:
        if not self.exchanges(self._step):
            return
        # With staging, the last buckets are handed over after the compute thread is done with the step.
        await self._under_way.all_added()
        if not self._by_bucket:
            with self._recorder.span("wait for gradients", "wait", step=self._step):
                await self._under_way.settle()
            await self._replica_started().update(gradient_scale=self._scale)

    async def settle(self) -> None:
        await self._under_way.settle()

    async def keep(self, step: int, *, last: bool, in_turn: bool = True) -> None:
        return None

    async def read(self, label: str, *, kept: int | None = None, last: bool = False) -> None:
        return None

    def center(self, bucket: Bucket) -> Payload:
        raise AssertionError("all-reduce has no center")

    async def leave(self) -> None:
        return None

    async def stop(self) -> None:
        await self._under_way.cancel()
        await self._sums.stop()

    def staleness(self) -> Sequence[int]:
        return ()

    def state_dict(self) -> dict[str, Value]:
        return {}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        return None

    async def _sum(self, bucket: Bucket, step: int) -> None:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        await self._sums.sum(bucket, ("gradients", step, bucket.index))
        self._recorder.add_span(
            f"all-reduce bucket {bucket.index}", "send", start_s, clock(), step=step, values={"bytes": bucket.gradients.nbytes}
        )
        if self._by_bucket:
            if self._scale != 1.0:
                bucket.gradients.scale_(self._scale)
            self._replica_started().parameters_ready(bucket)

    def _abort(self, error: BaseException) -> None:
        self._sums.abort(error)
        if self._replica is not None:
            self._replica.abort(error)

    def _replica_started(self) -> Replica:
        assert self._replica is not None, "start() comes first"
        return self._replica


async def spread(world: Group, replica: Replica) -> None:
    """Give every replica the parameters of rank 0's, or of the first with the same part of the model.

    One bucket after the other, so little memory is under way.
    """
    for bucket in replica.buckets:
        await broadcast(bucket.sharers(world), bucket.parameters, ("start", bucket.index))
        replica.parameters_ready(bucket)
