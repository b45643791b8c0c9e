"""Batches of a shuffled order of all samples, of which each worker has its share."""

from __future__ import annotations

from dataclasses import replace

from zmqtrain.data.background import Background
from zmqtrain.data.batch import Batch
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Fetch, Finish, Loader
from zmqtrain.data.partition import Partition, even_bounds
from zmqtrain.data.processes import Processes
from zmqtrain.data.source import Source
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.batches.base import OTHER_DATA, Counted
from zmqtrain.train.batches.reading import reader_of, same_samples
from zmqtrain.train.batches.slotted import since_slot
from zmqtrain.train.course import Course
from zmqtrain.train.shares import Shares


class OrderedBatches(Counted):
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
        self._after_slots = False  # the run before had `zmqtrain.data.slots`, of which the first ones are trained, and no others

        def bounds(step: int) -> tuple[int, int]:
            if not members.splits:
                return shares.bounds(step)
            index, count = members.share(step)
            start, stop = even_bounds(partition.batch_size, count, index)
            return group * partition.batch_size + start, group * partition.batch_size + stop

        super().__init__(partition, Promise.of_dataset(source, partition))
        self._in_slots = context.topology.exchange.kind in ("gossip", "averaging")  # if a checkpoint says what is left
        self._loader = Loader(
            Fetch(reader_of(source), finish),
            lambda step: self._partition.run(step, *bounds(step)),
            (seed, same_samples(context)),
            thread,
            processes=processes,
            epoch_steps=partition.steps_per_epoch,
        )

    def take_course(self, course: Course, step: int, state: object) -> None:
        match state:
            case {"first": int(first), "left": []} if self._in_slots:
                mine, self._after_slots = self._partition, True
                was = replace(mine, groups=course.groups, batch_size=course.batch_size, group_size=1, since=course.begins)
                self._partition = replace(mine, since=since_slot(was, step, first))
            case _:
                super().take_course(course, step, state)

    def load_state_dict(self, state: object) -> None:
        if state is not None and not self._after_slots:
            raise CheckpointError(f"the checkpoint was written when workers had been lost, and {OTHER_DATA}")

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        return await self._loader.batch(step, ahead=ahead, era=self._members.changed if self._members.splits else None)

    def used(self, step: int) -> None:
        return None

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)
