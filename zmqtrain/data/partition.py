"""Which samples each worker takes at each step: pure, and the same on every machine and with every numpy release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from zmqtrain.errors import UsageError
from zmqtrain.words import counted

Indices = npt.NDArray[np.int64]


def even_bounds(count: int, parts: int, part: int) -> tuple[int, int]:
    """First and last (exclusive) of part number ``part`` of ``count`` in ``parts`` even parts; the first parts may be larger by
    one."""
    each, more = divmod(count, parts)
    start = part * each + min(part, more)
    return start, start + each + (part < more)


@dataclass(frozen=True, slots=True)
class Since:
    """Where a run begins, or goes on with other groups or batches: ``step`` takes the samples from ``offset`` of ``epoch`` on."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    trained: int = 0
    """The samples of all steps before."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The training samples, divided over steps, groups and the workers of a group.

    Each epoch takes each sample at most once. Samples that do not fill a step of all groups are left out (with ``shuffle =
    "global"`` different ones in each epoch). The samples of one step of all groups are contiguous in the epoch's order, so that a
    synchronous step of g groups equals one process's step on g times the batch.
    """

    samples: int
    groups: int
    group_size: int
    batch_size: int
    """Samples of a group in a step."""
    seed: int
    shuffle: Literal["global", "none"] = "global"
    order: Callable[[int], Indices] | None = None
    """All samples of an epoch in order, if something other than ``shuffle`` determines it."""
    since: Since = Since()
    """Earlier steps are not this partition's."""

    def __post_init__(self) -> None:
        if self.batch_size < self.group_size:
            raise UsageError(
                f"[compute] batch_size = {self.batch_size} is smaller than group_size = {self.group_size}, so some workers would "
                "have no samples. Raise batch_size or lower group_size"
            )
        if self.samples < self.step_samples:
            raise UsageError(
                f"the training data has {counted(self.samples, 'sample')}, but one step of {counted(self.groups, 'group')} with "
                f"batch_size = {self.batch_size} takes {self.step_samples:,}. "
                "Lower [compute] batch_size or groups, or provide more data"
            )

    @property
    def step_samples(self) -> int:
        """The number of samples of all groups in a step."""
        return self.groups * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch that begins with its first sample."""
        return self.samples // self.step_samples

    @property
    def _steps_first(self) -> int:
        """The number of steps in what is left of the epoch with which it begins."""
        return (self.samples - self.since.offset) // self.step_samples

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of ``step``, and how many samples of its order come before this step's."""
        since = self.since
        done = step - since.step
        if done < self._steps_first:
            return since.epoch, since.offset + done * self.step_samples
        epochs, steps = divmod(done - self._steps_first, self.steps_per_epoch)
        return since.epoch + 1 + epochs, steps * self.step_samples

    def end(self, epochs: int) -> int:
        """The step before which so many epochs end."""
        more = epochs - self.since.epoch - 1
        return self.since.step + (self._steps_first + more * self.steps_per_epoch if more >= 0 else 0)

    def trained(self, step: int) -> int:
        """The number of samples of all steps before ``step``."""
        return self.since.trained + (step - self.since.step) * self.step_samples

    def going_on(self, step: int) -> Since:
        """Where another partition of the same samples begins with ``step``, to go on where this one was."""
        return Since(step, *self.place(step), self.trained(step))

    def indices(self, step: int, group: int, position: int) -> Indices:
        """The samples that the worker takes at ``step``, which counts from 0 over all epochs, if all parts are even."""
        start, stop = even_bounds(self.batch_size, self.group_size, position)
        return self.run(step, group * self.batch_size + start, group * self.batch_size + stop)

    def of_spans(self, spans: Sequence[tuple[int, int]]) -> Indices:
        """Of all steps' samples of all groups, one after another, those at these positions."""
        found, each = [np.zeros(0, np.int64)], self.step_samples
        for start, stop in spans:
            steps = range(start // each, -(-stop // each))
            found += [self.run(step, max(0, start - step * each), min(each, stop - step * each)) for step in steps]
        return np.concatenate(found)

    def run(self, step: int, start: int, stop: int) -> Indices:
        """Of the samples that all groups take at ``step``, those from ``start`` up to ``stop`` (at most `step_samples`)."""
        epoch, begin = self.place(step)
        order = _order(self.samples, self.seed, epoch, self.shuffle) if self.order is None else self.order(epoch)
        return order[begin + start : begin + stop]


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int, shuffle: Literal["global", "none"]) -> Indices:
    """The epoch's order of all samples."""
    return np.arange(samples) if shuffle == "none" else shuffled(samples, seed, epoch)


def shuffled(samples: int, seed: int, number: int) -> Indices:
    """All samples in a random order that depends on seed and number."""
    # numpy guarantees a bit generator's raw stream for all releases, but not the results of `permutation`.
    keys = np.random.Philox(key=seed, counter=[0, 0, number, 0]).random_raw(samples)
    order: Indices = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
