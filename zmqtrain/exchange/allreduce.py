"""Plain synchronous data parallelism: gradients are averaged over all groups, and each worker updates its own replica.

With overlap this is the layer-wise asynchronous baseline of GossipGraD (Daily et al. 2018, AGD): a bucket is summed as soon as
backward has computed it, and updated when the next forward reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import broadcast
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.exchange.base import Bucket, Optimize, Replica, RunModel
from zmqtrain.exchange.compressed_sums import CompressedSums, refuse_unsent
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.gradient_sum import GradientSum
from zmqtrain.exchange.grid_era import StepCommit
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.serverless import Serverless
from zmqtrain.exchange.state_source import NeighboursState, StateSource
from zmqtrain.exchange.sums import Sums
from zmqtrain.wire.payload import Value

#: How long workers wait for each other if their group has no limit, in seconds.
PATIENCE_S = 60.0


class AllReduceExchange(Serverless):
    """Implements `Exchange` without a server. ``sums`` are over all workers, scaled to be the gradient of the update.

    With ``members`` that survive losses (and groups of one worker; ``sums`` are then `ElasticSums`), a step counts on all that are
    left or on none, and a worker that joins late begins as a copy of a neighbour.

    All replicas stay equal to the bit: they begin with rank 0's parameters, and all-reduce gives every rank identical sums.

    ``every`` > 1: the gradients of that number of steps are added up, exchanged in the last one's backward and applied once, as in
    one step with a batch larger by that factor. Steps after the last exchange of a run are not applied.

    ``by_bucket``: update each bucket when the next forward takes it, so that the forward waits only for what it needs next.
    Otherwise the end of a step waits for all gradients and then runs the optimizer, which allows clipping by the norm of all
    gradients. With ``commit`` it first waits until all workers have them.
    """

    def __init__(
        self,
        sums: Sums,
        *,
        every: int = 1,
        by_bucket: bool = False,
        members: Members | None = None,
        recorder: Recorder | None = None,
        overlap: bool = True,
        commit: StepCommit | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"gradients are exchanged every {every} steps; it must be at least every step (1)")
        super().__init__(sums)
        assert commit is None or not by_bucket, "a step counts as a whole"
        self._every, self._by_bucket, self._commit = every, by_bucket, commit
        self._recorder: Recorder = recorder or NullRecorder()
        summed = self._summed if by_bucket else None
        self._sum = GradientSum(sums, self._recorder, self._abort, overlap=overlap, summed=summed)
        self._step = 0
        self._released = -1  # the newest step that may begin
        self._members = members
        self._source: StateSource | None = None
        if members is not None and members.survives:
            self._source = StateSource(sums.group.endpoint, timeout_s=sums.group.timeout_s or PATIENCE_S)

    @classmethod
    def of(cls, context: ExchangeContext) -> AllReduceExchange:
        """The exchange with the topology file's settings."""
        worker, every = context.worker, context.every
        # Within a group the gradients sum up to the group's mean; over g groups, to g times the mean of all.
        return cls(
            context.sums_of_all(scale=1.0 / (worker.placement.groups * every)),
            every=every,
            by_bucket=worker.topology.compute.overlap and context.untouched and worker.era is None,
            members=context.members,
            recorder=worker.recorder,
            overlap=worker.topology.compute.overlap,
            commit=None if worker.era is None else worker.era.commit,
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

    async def start(self, replica: Replica, *, restored: bool = False) -> int | None:
        # Also if restored: the ranks then already hold equal parameters, and sending them again costs no more than one step's
        # traffic.
        self._replica = replica
        replica.optimize(Optimize.AFTER if self._by_bucket else Optimize.APART)
        members, source = self._members, self._source
        first = None
        if members is None or source is None:
            await spread(self._sums.group, replica)
        else:
            source.serve(members)
            if members.late:
                first = self._released = await self._start_late(replica, members)
                source.begin()
            else:
                await members.together("allreduce/start", 0, lambda world: spread(world, replica))
        await self._sum.start(replica)
        return first

    async def _start_late(self, replica: Replica, members: Members) -> int:
        group = self._sums.group
        timeout_s = group.timeout_s or PATIENCE_S
        state = NeighboursState(group.endpoint, members, timeout_s=timeout_s)
        first = await state.join()
        await state.take(replica)
        await members.release(first)
        self._recorder.audit("joined", step=first, source=state.source)
        return first

    async def _give(self, step: int) -> None:
        """Give the state with which ``step`` begins to those who have asked for it, and begin with that step."""
        members, source = self._members, self._source
        if members is None or source is None:
            return
        if members.joins(step):
            # A newcomer goes on from the last sums. If only some had them, and were lost, the others would compute these anew.
            await members.together(f"allreduce/given/{step}", step, lambda _: self.settle())
        await source.answer(step, members, self._replica_started(), self.settle)

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
        if self.exchanges(self._step):
            if self._by_bucket:
                await self._sum.all_added()
            else:
                await self._sum.wait()
                if self._commit is not None:
                    await self._commit.all_have(self._sums.group, self._step)
                await self._replica_started().update()
        if self._commit is None:  # otherwise the step has to be recorded before it turns out that another era begins
            await self.may_begin(self._step + 1)

    async def may_begin(self, step: int) -> bool:
        if step > self._released:
            if self._members is not None and not await self._members.release(step):
                return False
            self._released = step
            await self._give(step)
        return True

    async def settle(self) -> None:
        await self._sum.settle()

    async def stop(self, *, failed: bool = False) -> None:
        if self._source is not None:
            self._source.close(failed=failed)
        await self._sum.stop()
        if self._members is not None:
            await self._members.stop()

    def state_dict(self) -> dict[str, Value]:
        return self._sums.state_dict() if isinstance(self._sums, CompressedSums) else {}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        if isinstance(self._sums, CompressedSums):
            self._sums.load_state_dict(state)
        else:
            refuse_unsent(state)

    def _summed(self, bucket: Bucket) -> None:
        self._replica_started().parameters_ready(bucket)


async def spread(world: Group, replica: Replica) -> None:
    """Give every replica the parameters of rank 0, or of the first rank with the same part of the model.

    The buckets are sent one after another, so little memory is in use at a time.
    """
    for bucket in replica.buckets:
        await broadcast(bucket.sharers(world), bucket.parameters, ("start", bucket.index))
        replica.parameters_ready(bucket)
