"""Plain synchronous data parallelism: gradients are averaged over all groups, and each worker updates its own replica.

With overlap this is the layer-wise asynchronous baseline of GossipGraD (Daily et al. 2018, AGD): a bucket is summed as soon as
backward has computed it, and updated when the next forward reaches it.
"""

from __future__ import annotations

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import broadcast
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, Optimize, Replica, RunModel
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.exchange.serverless import Serverless
from zmqtrain.exchange.sums import Sums


class AllReduceExchange(Serverless):
    """Implements `Exchange` without a server. ``sums`` are over all workers, scaled to be the gradient of the update.

    All replicas stay equal to the bit: they begin with rank 0's parameters, and all-reduce gives every rank identical sums.

    ``every`` > 1: the gradients of that number of steps are added up, exchanged in the last one's backward and applied once, as in
    one step with a batch larger by that factor. Steps after the last exchange of a run are not applied.

    ``by_bucket``: update each bucket when the next forward takes it, so that the forward waits only for what it needs next.
    Otherwise the end of a step waits for all gradients and then runs the optimizer, which allows clipping by the norm of all
    gradients.
    """

    def __init__(
        self,
        sums: Sums,
        *,
        every: int = 1,
        by_bucket: bool = False,
        recorder: Recorder | None = None,
        overlap: bool = True,
    ) -> None:
        if every < 1:
            raise ValueError(f"gradients are exchanged every {every} steps; it must be at least every step (1)")
        super().__init__(sums)
        self._every, self._by_bucket = every, by_bucket
        summed = self._summed if by_bucket else None
        self._sum = GradientSum(sums, recorder or NullRecorder(), self._abort, overlap=overlap, summed=summed)
        self._step = 0

    @classmethod
    def of(cls, context: ExchangeContext) -> AllReduceExchange:
        """The exchange with the topology file's settings."""
        worker, every = context.worker, context.every
        # Within a group the gradients sum up to the group's mean; over g groups, to g times the mean of all.
        return cls(
            context.sums_of_all(scale=1.0 / (worker.placement.groups * every)),
            every=every,
            by_bucket=worker.topology.compute.overlap and context.untouched,
            recorder=worker.recorder,
            overlap=worker.topology.compute.overlap,
        )

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
        # Also if restored: the ranks then already hold equal parameters, and sending them again costs no more than one step's
        # traffic.
        self._replica = replica
        replica.optimize(Optimize.AFTER if self._by_bucket else Optimize.APART)
        await spread(self._sums.group, replica)
        await self._sum.start(replica)

    def begin_step(self, step: int) -> None:
        self._step = step
        if self.exchanges(step):
            self._sum.begin(step, len(self._replica_started().buckets))

    def exchanges(self, step: int) -> bool:
        # Decided by the step's number and not by a counter, so that a resumed run exchanges at the same steps.
        return (step + 1) % self._every == 0

    def bucket_ready(self, bucket: Bucket) -> None:
        self._sum.add(bucket)

    async def end_step(self) -> None:
        if not self.exchanges(self._step):
            return
        if self._by_bucket:
            await self._sum.all_added()
        else:
            await self._sum.wait()
            await self._replica_started().update()

    async def settle(self) -> None:
        await self._sum.settle()

    async def stop(self) -> None:
        await self._sum.stop()

    def _summed(self, bucket: Bucket) -> None:
        self._replica_started().parameters_ready(bucket)


async def spread(world: Group, replica: Replica) -> None:
    """Give every replica the parameters of rank 0, or of the first rank with the same part of the model.

    The buckets are sent one after another, so little memory is in use at a time.
    """
    for bucket in replica.buckets:
        await broadcast(bucket.sharers(world), bucket.parameters, ("start", bucket.index))
        replica.parameters_ready(bucket)
