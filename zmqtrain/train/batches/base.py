"""The batches of one worker, and what the classes of batches have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from zmqtrain.data.batch import Batch
from zmqtrain.data.ledger import Promise
from zmqtrain.data.partition import Partition, Since
from zmqtrain.errors import CheckpointError
from zmqtrain.train.course import Course

OTHER_DATA = "says what these have left to train: resume with the same data, in a run that may lose workers ([job] elastic)"


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

    common: bool
    """Whether the `state_dict` of one worker is that of all."""

    def state_dict(self) -> dict[str, Any] | None:
        """How far the worker has got in its data, if that does not follow from the step alone; otherwise ``None``."""
        ...

    def load_state_dict(self, state: object) -> None:
        """Continue from ``state``, a result of `state_dict`. Raises `CheckpointError` if it belongs to other data."""

    def course(self) -> Course:
        """Which samples a step takes: what `take_course` needs, also in a run with other groups or batches."""
        ...

    def take_course(self, course: Course, step: int, state: object) -> None:
        """Go on with ``step`` where the run was whose `course` this is, and whose `state_dict` was ``state``. Call it before
        `load_state_dict`. Raises `CheckpointError` if this run's steps cannot begin there."""

    async def close(self, timeout_s: float) -> None: ...


class Counted:
    """What batches from a known number of samples have in common."""

    common = False

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

    def take_course(self, course: Course, step: int, state: object) -> None:
        mine, since = self._partition, course.begins
        if course.divides_as(self.course()):
            self._partition = replace(mine, since=since)
            return
        was = replace(mine, groups=course.groups, batch_size=course.batch_size, group_size=1, since=since)
        self._partition = replace(mine, since=self._going_on(was, course, step, state))

    def _going_on(self, was: Partition, course: Course, step: int, state: object) -> Since:
        """Where ``step`` begins after a run with other batches, which ``was`` says."""
        if state is not None:
            raise CheckpointError(
                f"the checkpoint was written when workers had been lost, and what these had left is counted in the batches of "
                f"{course}: resume with these, or from an earlier checkpoint"
            )
        return was.going_on(step)

    def group_samples(self, step: int) -> float | None:
        return None

    def own_group_samples(self, step: int) -> int | None:
        return None

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: object) -> None:
        return None
