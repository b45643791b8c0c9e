"""Batches that groups take by turns, so that others train what a lost one has left."""

from __future__ import annotations

from typing import Any

from zmqtrain.data.background import Background
from zmqtrain.data.batch import Batch
from zmqtrain.data.ledger import Promise
from zmqtrain.data.loader import Fetch, Finish, Loader
from zmqtrain.data.partition import Indices, Partition, Since, even_bounds
from zmqtrain.data.processes import Processes
from zmqtrain.data.source import Source
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.batches.base import OTHER_DATA, Counted
from zmqtrain.train.batches.reading import reader_of
from zmqtrain.train.course import Course


def since_slot(was: Partition, step: int, first: int) -> Since:
    """Where another partition begins with ``step``, if all before the slot ``first`` of the one that ``was`` have been trained."""
    at, group = divmod(first, was.groups)
    epoch, offset = was.place(at)
    return Since(step, epoch, offset + group * was.batch_size, was.trained(at) + group * was.batch_size)


class SlottedBatches(Counted):
    """Implements `Batches` with `Partition` and `zmqtrain.data.slots`: each worker has a whole group's batch, or its share of
    one if it has a team, and which one depends on who was lost."""

    common = True

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
        compute = context.topology.compute
        column = compute.column_of(context.role.position), compute.columns  # which has the same samples on all of its workers
        self._share = members.share if members.splits else lambda step: column
        self._next = 0
        self._begins_anew = False  # with other batches than those in which a checkpoint counts
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
        index, count = self._share(step)
        return self._place(step) if count == 1 else (*self._place(step), index)

    def _place(self, step: int) -> tuple[int, int]:
        """The group and the step to which the batch belongs as long as nobody is lost. Called in the loader's thread, too."""
        slot = self._members.turn(step)
        assert slot is not None, f"this worker does not train step {step}"
        of, group = slot.place(self._partition.groups)
        return group, of

    def _indices(self, step: int) -> Indices:
        group, of = self._place(step)
        index, count = self._share(step)
        start, stop = even_bounds(self._partition.batch_size, count, index)
        before = group * self._partition.batch_size
        return self._partition.run(of, before + start, before + stop)

    async def more(self, step: int) -> bool:
        return self._members.slot(step) is not None

    def epoch(self, step: int) -> int:
        return self._partition.place(self._place(step)[1])[0]

    async def batch(self, step: int, *, ahead: bool) -> Batch:
        members, plan = self._members, self._members.slots
        assert plan is not None
        # Groups that take turns divide a batch anew as soon as they know of a change, and train others from a later step on.
        era: object = members.changed if members.splits and members.takes_turns else plan.at(step)
        return await self._loader.batch(step, ahead=ahead, era=era)

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

    def _going_on(self, was: Partition, course: Course, step: int, state: object) -> Since:
        match state:
            case {"first": int(first), "left": []}:  # the others have trained all that lost ones had left
                self._begins_anew = True
                return since_slot(was, step, first)
        return super()._going_on(was, course, step, state)

    def load_state_dict(self, state: object) -> None:
        match None if self._begins_anew else state:
            case None:
                return
            case {"step": int(step), "first": int(first), "left": [*left]} if all(isinstance(number, int) for number in left):
                self._members.begin_slots(step, first, left)
            case _:
                raise CheckpointError(f"the checkpoint holds {state!r:.100} where it {OTHER_DATA}")

    async def close(self, timeout_s: float) -> None:
        await self._loader.close(timeout_s)
