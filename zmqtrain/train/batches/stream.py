"""Batches of an iterable dataset, whose length is not known."""

from __future__ import annotations

from typing import Any

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.background import Background
from zmqtrain.data.batch import Batch
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Finish
from zmqtrain.data.processes import Processes
from zmqtrain.data.source import Source
from zmqtrain.data.stream import Position, StreamLoader
from zmqtrain.errors import CheckpointError, TaskError, UsageError
from zmqtrain.membership.context import RoleContext
from zmqtrain.topology.elastic import ASKING
from zmqtrain.train.course import Course
from zmqtrain.train.shares import Shares, stream_place
from zmqtrain.wire.tensor import TensorPayload


class StreamBatches:
    """Implements `Batches` with `StreamLoader`.

    If the length of the run is given in epochs, an epoch ends for all workers as soon as it ends for one of them: before each step
    they tell each other whether they have another batch. If it is given in steps, each worker starts its stream again when it ends.
    """

    samples: int | None = None
    steps_per_epoch: int | None = None

    common = False

    def __init__(
        self, context: RoleContext, source: Source, shares: Shares, finish: Finish, thread: Background, processes: Processes | None
    ) -> None:
        """Raises `UsageError` if the topology does not allow a stream."""
        topology, placement, role = context.topology, context.placement, context.role
        job = topology.job
        self._epochs = None if job.steps is not None or job.until is not None else job.epochs or 1
        _check_stream(source, context, limited=self._epochs is not None)
        place = stream_place(topology, placement, role, shares)
        self._name = source.name
        self._loader = StreamLoader(source, place, job.seed, thread, finish, processes)
        self._world: Group | None = None
        if self._epochs is not None and placement.world_size > 1:
            peers = tuple(worker.peer for worker in placement.workers)
            self._world = Group(context.endpoint, peers, role.index, "data", timeout_s=context.timeouts.barrier_s)
        self._recorder = context.recorder
        self._course = Course(placement.groups, topology.compute.batch_size)
        self._apart = source.shard is not None
        self.promise = Promise.of_stream(source)

    async def more(self, step: int) -> bool:
        loader = self._loader
        while not await self._all_have_one(await loader.available(), step):
            if not loader.position.batches:
                raise TaskError(
                    f"{self._name} is a stream and has too few samples for one step of all groups (epoch {loader.position.epoch}). "
                    "Lower [compute] batch_size, or provide more data; the stream must also start again each time iter() is called "
                    "on it"
                )
            if self._epochs is not None and loader.position.epoch + 1 >= self._epochs:
                return False
            await loader.next_epoch()
        return True

    async def _all_have_one(self, mine: bool, step: int) -> bool:
        if self._world is None:
            return mine
        flag = TensorPayload.empty(1, "float64")
        flag.numpy()[0] = float(mine)
        await all_reduce(self._world, flag, ("more", step, self._loader.position.epoch))
        return bool(flag.numpy()[0] == self._world.size)

    def epoch(self, step: int) -> int:
        return self._loader.position.epoch

    def end(self, epochs: int) -> int | None:
        return None

    def trained(self, step: int) -> int:
        return step * self._course.samples

    def course(self) -> Course:
        return self._course

    def take_course(self, course: Course, step: int, state: object) -> None:
        """Other groups go on only where all read the whole stream, and take as many samples of it in a step as before."""
        was, now = course.samples, self._course.samples
        if course == self._course or (was == now and not self._apart):
            return
        why = "a part of its own for each of their workers" if self._apart else f"{was} samples a step, where it is {now} now"
        raise CheckpointError(f"the checkpoint says how far {course} have read the stream {self._name}, {why}: resume with these")

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        return await self._loader.take(ahead=ahead)

    def group_samples(self, step: int) -> float | None:
        return None

    def own_group_samples(self, step: int) -> int | None:
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
    if topology.asks_elastic:
        raise UsageError(
            f"{source.name} is a stream, and no other worker can take over a part of it: remove {ASKING}, or use a "
            "map-style dataset"
        )
    if topology.compute.parts == "measured":
        raise UsageError(
            f'[compute] parts = "measured" needs a known number of samples, but {source.name} is a stream: use [compute] weights'
        )
    if limited and apart:
        raise UsageError(
            f"{source.name} is a stream whose length is unknown, and groups that do not wait for each other would end at different "
            "times: set [job] steps instead of epochs"
        )
