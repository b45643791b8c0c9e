"""Where a worker's batches come from: a shuffled order of all samples, the sample ring, or a stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.data.background import Background, BackgroundThread
from zmqtrain.data.batch import Batch
from zmqtrain.data.blocks import Contents, TensorContents
from zmqtrain.data.division import spans_of
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Fetch, Finish, Loader, Reader
from zmqtrain.data.partition import Indices, Partition, Since, even_bounds
from zmqtrain.data.processes import Processes
from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_loader import RingLoader
from zmqtrain.data.ring_plan import RingPlan
from zmqtrain.data.source import Source
from zmqtrain.data.stream import Position, StreamLoader
from zmqtrain.errors import CheckpointError, TaskError, UsageError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.elastic import ASKING
from zmqtrain.topology.schema import Topology
from zmqtrain.train.course import Course
from zmqtrain.train.shares import Shares, in_step, stream_place
from zmqtrain.wire.tensor import TensorPayload

_OTHER_DATA = "says what these have left to train: resume with the same data, in a run that may lose workers ([job] elastic)"


class Batches(Protocol):
    """The batches of one worker. All methods are called on the event loop's thread."""

    @property
    def samples(self) -> int | None:
        """The number of samples in an epoch; ``None`` if it is not known before the data ends."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps in an epoch; ``None`` if it is not known before the data ends."""
        ...

    @property
    def promise(self) -> Promise:
        """What the run promises about the use of its samples."""
        ...

    async def more(self, step: int) -> bool:
        """Whether there is a batch for ``step``, the same for all workers. Call it before each step."""
        ...

    def epoch(self, step: int) -> int:
        """The epoch of ``step``, which is being computed or comes next."""
        ...

    def end(self, epochs: int) -> int | None:
        """The step before which so many epochs end; ``None`` if it is not known before the data ends."""
        ...

    def trained(self, step: int) -> int:
        """The number of samples of all steps before ``step``, if no worker is lost."""
        ...

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        """The batch of ``step``. ``ahead``: another step follows, so its batch may be fetched in the meantime."""
        ...

    def group_samples(self, step: int) -> float | None:
        """The number of samples by which the group's gradient of this step is divided; ``None`` for the usual number."""
        ...

    def own_group_samples(self, step: int) -> int | None:
        """The number of samples that this worker's group has in this step; ``None`` for the usual number."""
        ...

    def used(self, step: int) -> None:
        """Called when the batch of ``step`` has been computed."""

    def state_dict(self) -> dict[str, Any] | None:
        """How far the worker has got in its data, if that does not follow from the step alone; otherwise ``None``."""
        ...

    def load_state_dict(self, state: object) -> None:
        """Continue from ``state``, a result of `state_dict`. Raises `CheckpointError` if it belongs to other data."""

    def course(self) -> Course:
        """Which samples a step takes: what `take_course` needs, also in a run with other groups or batches."""
        ...

    def take_course(self, course: Course, step: int, *, left: bool) -> None:
        """Go on with ``step`` where the run was whose `course` this is. ``left``: its `state_dict` said more of that than the step.
        Call it before `load_state_dict`. Raises `CheckpointError` if this run's steps cannot begin there."""

    async def close(self, timeout_s: float) -> None: ...


class _Counted:
    """What batches from a known number of samples have in common."""

    def __init__(self, partition: Partition, promise: Promise) -> None:
        self.samples: int | None = partition.samples
        self.steps_per_epoch: int | None = partition.steps_per_epoch
        self.promise = promise
        self._partition = partition

    async def more(self, step: int) -> bool:
        return True

    def epoch(self, step: int) -> int:
        return self._partition.place(step)[0]

    def end(self, epochs: int) -> int | None:
        return self._partition.end(epochs)

    def trained(self, step: int) -> int:
        return self._partition.trained(step)

    def course(self) -> Course:
        mine = self._partition
        return Course(mine.groups, mine.batch_size, mine.since)

    def take_course(self, course: Course, step: int, *, left: bool) -> None:
        mine, since = self._partition, course.begins
        if course.divides_as(self.course()):
            self._partition = replace(mine, since=since)
            return
        if left:
            raise CheckpointError(
                f"the checkpoint was written when workers had been lost, and what these had left is counted in the batches of "
                f"{course}: resume with these, or from an earlier checkpoint"
            )
        was = replace(mine, groups=course.groups, batch_size=course.batch_size, group_size=1, since=since)
        self._partition = replace(mine, since=was.going_on(step))

    def group_samples(self, step: int) -> float | None:
        return None

    def own_group_samples(self, step: int) -> int | None:
        return None

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: object) -> None:
        return None


class OrderedBatches(_Counted):
    """Implements `Batches` with `Partition`, of which this worker has its share. If workers of its group may be lost, those that
    are there divide the group's batch evenly."""

    def __init__(
        self,
        context: RoleContext,
        source: Source,
        partition: Partition,
        shares: Shares,
        members: Members,
        finish: Finish,
        thread: Background,
        processes: Processes | None,
    ) -> None:
        seed, group = context.topology.job.seed, context.role.group
        self._members = members

        def bounds(step: int) -> tuple[int, int]:
            if not members.splits:
                return shares.bounds(step)
            index, count = members.share(step)
            start, stop = even_bounds(partition.batch_size, count, index)
            return group * partition.batch_size + start, group * partition.batch_size + stop

        super().__init__(partition, Promise.of_dataset(source, partition))
        self._loader = Loader(
            Fetch(reader_of(source), finish),
            lambda step: self._partition.run(step, *bounds(step)),
            (seed, same_samples(context)),
            thread,
            processes=processes,
            epoch_steps=partition.steps_per_epoch,
        )

    def load_state_dict(self, state: object) -> None:
        if state is not None:
            raise CheckpointError(f"the checkpoint was written when workers had been lost, and {_OTHER_DATA}")

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        return await self._loader.batch(step, ahead=ahead, era=self._members.changed if self._members.splits else None)

    def used(self, step: int) -> None:
        return None

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


class SlottedBatches(_Counted):
    """Implements `Batches` with `Partition` and `zmqtrain.data.slots`: each worker has a whole group's batch, or its share of
    one if it has a team, and which one depends on who was lost."""

    def __init__(
        self,
        context: RoleContext,
        source: Source,
        partition: Partition,
        members: Members,
        finish: Finish,
        thread: Background,
        processes: Processes | None,
    ) -> None:
        super().__init__(partition, Promise.of_dataset(source, partition, survives=True))
        self._members = members
        self._next = 0
        self._loader = Loader(
            Fetch(reader_of(source), finish),
            self._indices,
            (context.topology.job.seed,),
            thread,
            processes=processes,
            epoch_steps=partition.steps_per_epoch,
            place=self._drawn_for,
        )

    def _drawn_for(self, step: int) -> tuple[int, ...]:
        index, count = self._members.share(step)
        return self._place(step) if count == 1 else (*self._place(step), index)

    def _place(self, step: int) -> tuple[int, int]:
        """The group and the step to which the batch belongs as long as nobody is lost. Called in the loader's thread, too."""
        slot = self._members.turn(step)
        assert slot is not None, f"this worker does not train step {step}"
        of, group = slot.place(self._partition.groups)
        return group, of

    def _indices(self, step: int) -> Indices:
        group, of = self._place(step)
        index, count = self._members.share(step)
        start, stop = even_bounds(self._partition.batch_size, count, index)
        before = group * self._partition.batch_size
        return self._partition.run(of, before + start, before + stop)

    async def more(self, step: int) -> bool:
        return self._members.slot(step) is not None

    def epoch(self, step: int) -> int:
        return self._partition.place(self._place(step)[1])[0]

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        plan = self._members.slots
        assert plan is not None
        return await self._loader.batch(step, ahead=ahead, era=plan.at(step))

    def used(self, step: int) -> None:
        self._next = step + 1

    def state_dict(self) -> dict[str, Any] | None:
        """What is left to train; ``None`` as long as that follows from the step."""
        plan, step = self._members.slots, self._next
        if plan is None:
            return None
        left, first = plan.at(step).rest(step)
        if not left and first == step * self._partition.groups:
            return None
        return {"step": step, "first": first, "left": [slot.number for slot in left]}

    def load_state_dict(self, state: object) -> None:
        match state:
            case None:
                return
            case {"step": int(step), "first": int(first), "left": [*left]} if all(isinstance(number, int) for number in left):
                self._members.begin_slots(step, first, left)
            case _:
                raise CheckpointError(f"the checkpoint holds {state!r:.100} where it {_OTHER_DATA}")

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


class DividedBatches(_Counted):
    """Implements `Batches` with `Partition` and `zmqtrain.data.division`: all workers divide the samples of each step anew whenever
    the members change."""

    def __init__(
        self,
        context: RoleContext,
        source: Source,
        partition: Partition,
        members: Members,
        finish: Finish,
        thread: Background,
        processes: Processes | None,
    ) -> None:
        super().__init__(partition, Promise.of_dataset(source, partition, survives=True))
        self._members = members
        self._next = 0
        self._loader = Loader(
            Fetch(reader_of(source), finish),
            lambda step: self._partition.of_spans(members.spans(step)),
            (context.topology.job.seed, same_samples(context)),
            thread,
            processes=processes,
            epoch_steps=partition.steps_per_epoch,
        )

    def epoch(self, step: int) -> int:
        spans = self._members.spans(step)
        return self._partition.place(spans[0][0] // self._partition.step_samples)[0]

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        division = self._members.division
        assert division is not None
        return await self._loader.batch(step, ahead=ahead, era=division.at(step))

    def used(self, step: int) -> None:
        self._next = step + 1

    def state_dict(self) -> dict[str, Any] | None:
        """What is left to train; ``None`` as long as that follows from the step."""
        division, step = self._members.division, self._next
        if division is None:
            return None
        left, first = division.rest(step)
        if not left and first == step * division.batch:
            return None
        return {"step": step, "first": first, "left": [list(span) for span in left]}

    def load_state_dict(self, state: object) -> None:
        match state:
            case None:
                return
            case {"step": int(step), "first": int(first), "left": [*left]}:
                self._members.begin_division(step, first, spans_of(left, CheckpointError))
            case _:
                raise CheckpointError(f"the checkpoint holds {state!r:.100} where it {_OTHER_DATA}")

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)


class RingBatches:
    """Implements `Batches` with `RingLoader`."""

    def __init__(
        self, context: RoleContext, source: Source, samples: int, members: Members, finish: Finish, thread: Background
    ) -> None:
        self._seed = (context.topology.job.seed, same_samples(context))
        self._ring = Ring.of(samples, context.placement.groups, context.topology.compute.batch_size, self._seed[0])
        self._since = Since()
        self.samples: int | None = samples
        self.steps_per_epoch: int | None = self._ring.steps
        self.promise = Promise.of_ring(survives=members.survives)
        reader = reader_of(source)
        self._fetch, self._thread = Fetch(reader, finish), thread
        self._keep = source.transform is not None  # the transform may write to its input, so it gets a copy
        self._mean = in_step(context.topology)
        self.ring = ring_loader(context, samples, members, TensorContents(reader.collated), thread)

    async def more(self, step: int) -> bool:
        return True

    def epoch(self, step: int) -> int:
        return self._since.epoch + (step - self._since.step) // self._ring.steps

    def end(self, epochs: int) -> int | None:
        return self._since.step + max(0, epochs - self._since.epoch) * self._ring.steps

    def trained(self, step: int) -> int:
        ring, since = self._ring, self._since
        laps, more = divmod(step - since.step, ring.steps)
        whole = laps * sum(map(len, ring.parts))
        return since.trained + whole + sum(ring.samples_at(since.step + slot) for slot in range(more))

    def course(self) -> Course:
        return Course(self._ring.peers, self._ring.batch_size, self._since)

    def take_course(self, course: Course, step: int, *, left: bool) -> None:
        """With other groups or batches the ring is divided anew, so only between two laps."""
        since = course.begins
        if not course.divides_as(self.course()):
            assert self.samples is not None
            was = Ring.of(self.samples, course.groups, course.batch_size, self._seed[0])
            laps, more = divmod(step - since.step, was.steps)
            if more:
                raise CheckpointError(
                    f"the checkpoint was written within a lap of the sample ring, which is divided in another way among "
                    f"{course}: resume with these, or from a checkpoint after a lap (every {was.steps} steps since step "
                    f"{since.step})"
                )
            since = Since(step, since.epoch + laps, trained=since.trained + laps * self.samples)
        self._since, self._ring = since, replace(self._ring, since=since.step)
        self.ring.begin_at(since.step)

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: object) -> None:
        return None

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        block = await self.ring.block(step)

        def content() -> object:
            return TensorContents.copied(block.content) if self._keep else block.content

        return await self._thread.submit(lambda: self._fetch.finished(block.ids, content, (*self._seed, step)))

    def group_samples(self, step: int) -> float | None:
        return self.ring.group_samples(step, mean=self._mean)

    def own_group_samples(self, step: int) -> int | None:
        return int(self.ring.group_samples(step, mean=False))

    def used(self, step: int) -> None:
        self.ring.used(step)

    async def close(self, timeout_s: float) -> None:
        await self.ring.close(timeout_s)


class StreamBatches:
    """Implements `Batches` with `StreamLoader`.

    If the length of the run is given in epochs, an epoch ends for all workers as soon as it ends for one of them: before each step
    they tell each other whether they have another batch. If it is given in steps, each worker starts its stream again when it ends.
    """

    samples: int | None = None
    steps_per_epoch: int | None = None

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

    def take_course(self, course: Course, step: int, *, left: bool) -> None:
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


def make_batches(
    context: RoleContext,
    source: Source,
    partition: Partition | None,
    shares: Shares,
    members: Members,
    finish: Finish,
    thread: Background,
) -> Batches:
    """The batches that ``[data] shuffle`` and the source ask for. ``partition``: the order of a source that is not a stream.
    Raises `UsageError`."""
    # In virtual time no other thread may run, so the reading thread does this work itself; the batches are the same.
    processes = source.processes if isinstance(thread, BackgroundThread) else None
    if partition is None:
        return StreamBatches(context, source, shares, finish, thread, processes)
    if context.topology.data.shuffle == "ring":
        return RingBatches(context, source, partition.samples, members, finish, thread)
    if members.survives and context.topology.exchange.kind == "model_server":
        return SlottedBatches(context, source, partition, members, finish, thread, processes)
    if members.divides:
        return DividedBatches(context, source, partition, members, finish, thread, processes)
    return OrderedBatches(context, source, partition, shares, members, finish, thread, processes)


def ring_loader(context: RoleContext, samples: int, members: Members, contents: Contents, thread: Background) -> RingLoader:
    """This worker's place on the ring that connects the workers of its position in all groups. Raises `UsageError` if there are
    too few samples."""
    topology, placement, role = context.topology, context.placement, context.role
    compute = topology.compute
    column = tuple(placement.group_members(group)[role.position] for group in range(placement.groups))
    ring = Ring.of(samples, placement.groups, compute.batch_size, topology.job.seed)
    smallest = min(len(part) for part in ring.parts) // ring.steps
    if smallest < compute.columns:
        raise UsageError(
            f"a batch of the sample ring may have only {smallest} samples, which a group divides among {compute.columns} workers: "
            "lower group_size or groups, or provide more data"
        )
    first = {peer: group[0] for group in map(placement.group_members, range(placement.groups)) for peer in group}
    if members.splits:  # groups are on the ring, whoever of them is there
        column = tuple(dict.fromkeys(first.values()))

    def source() -> PeerId | None:
        """A worker that comes to groups of several asks the one with whose state it begins."""
        found = members.source((role.peer, members.own_incarnation))
        return None if found is None else found[0]

    loader = RingLoader(
        RingPlan(ring, column),
        contents,
        context.endpoint,
        name=first[role.peer] if members.splits else None,
        share=members.share if members.splits else lambda step: (compute.column_of(role.position), compute.columns),
        ask=source,
        seed=(topology.job.seed, same_samples(context)),
        survives=members.survives,
        late=members.late,
        travel=topology.data.ring == "tensors",
        thread=thread,
        timeout_s=context.timeouts.barrier_s,
        recorder=context.recorder,
    )

    def change(step: int, workers: tuple[PeerId, ...]) -> None:
        there = {first[peer] for peer in workers} if members.splits else set(workers)
        loader.change(step, tuple(peer for peer in column if peer in there))

    members.on_change(change)
    return loader
