"""Evaluation, divided over workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_reduce, broadcast
from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.loader import Finish
from zmqtrain.data.partition import even_bounds
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.events import Recorder
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.train.device.base import Device
from zmqtrain.train.divided import share_of_model
from zmqtrain.train.evaluation_data import EvaluationData
from zmqtrain.train.metrics import Metrics, Sums
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.step import Precision, autocast
from zmqtrain.train.task import Task, user_code
from zmqtrain.train.work import Outcome
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.words import counted

LEFT_OUT = (
    "{name} is left out, because it is not a mean over samples: evaluations are divided over workers and batches, and the mean of "
    "the parts' values would be another figure. Let the loss or the metric return a mean, or the pair (sum, weight)"
)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """How many samples are evaluated at once, and in which arithmetic."""

    batch_size: int
    precision: Precision = "float32"
    channels_last: bool = False
    groups: int = 1
    """Compute groups that share the samples, at most."""


class Evaluation:
    """Evaluates the replica's model on the task's ``eval_data``, or on a worker's share of it."""

    def __init__(
        self,
        task: Task,
        replica: TorchReplica,
        device: Device,
        settings: EvaluationSettings,
        recorder: Recorder,
        *,
        aligned: Callable[[str, Group], Awaitable[None]] | None = None,
    ) -> None:
        """``aligned``: called before the workers of a grid compute together (`zmqtrain.exchange.members.Members.aligned`)."""
        source = task.evaluating()
        assert source is not None
        self._data = EvaluationData(source, Finish(partial(batch_of, forward=task.forward), channels_last=settings.channels_last))
        self._metrics = Metrics(task)
        self._replica, self._device, self._settings = replica, device, settings
        self._recorder, self._aligned = recorder, aligned
        self._left_out: set[str] = set()
        if isinstance(replica.model, ParallelModel):
            self._require_enough(replica.model.grid.columns)

    def _require_enough(self, columns: int) -> None:
        """Raise `UsageError`, before anything is trained, if a grid of so many columns cannot divide the samples."""
        if self._data.stream:
            raise UsageError(
                "Task.eval_data is a stream, and the workers of a grid cannot tell beforehand who has which of its samples: give a "
                "dataset with a length, such as a list of the samples"
            )
        fewest = self._data.samples // self._settings.groups
        if fewest < columns:
            raise UsageError(
                f"each group gets {counted(fewest, 'sample')} of the task's eval_data, too few for the {columns} columns "
                "of its grid: provide more samples, or use a grid with fewer columns"
            )

    async def run(self, group: Group, tag: str) -> Outcome:
        """Evaluate the model. Every member of ``group`` calls it, with equal parameters; all get the same result, by metric.

        Statistics that layers keep (batch norm) differ between workers, so those of the group's first member are used.

        If the task's data, model, loss or metric fails on this worker, the error is returned, and the other members get ``None``,
        so that all can go on to what they do together after an evaluation.

        Raises:
            TaskError, UsageError: the data or the forward of a divided model failed. The group's other workers, which compute it
                together with this one, cannot go on.
        """
        model = self._replica.model
        alone = self._data.single(self._settings.batch_size)
        # A divided model's statistics are divided like its parameters, and equal within a group.
        alike = group if not isinstance(model, ParallelModel) else same_position(model, group)
        failure: TaskError | UsageError | None = None
        async with first_buffers(model, alike, tag):
            if isinstance(model, ParallelModel):
                if self._aligned is not None:
                    await self._aligned(tag, group)
                sums, failure = await self._device.run(lambda: self._divided_sums(model, group))
            else:
                try:
                    sums = await self._device.run(
                        lambda: self._sums(self._data.share(group.size, group.rank, self._settings.batch_size), alone)
                    )
                except (TaskError, UsageError) as error:
                    failure, sums = error, self._metrics.zeros()
        told = np.append(sums, float(failure is not None))  # and on how many members the evaluation failed
        await all_reduce(group, TensorPayload.of(told), (tag, "sums"))
        if failure is not None:
            return failure
        sums, failed = told[:-1], bool(told[-1])
        if failed:
            return None
        if group.rank == 0:
            self._say_what_is_left_out(sums)
        return self._metrics.means(sums)

    def _say_what_is_left_out(self, sums: Sums) -> None:
        for name in self._metrics.left_out(sums):
            if name not in self._left_out:
                self._left_out.add(name)
                self._recorder.event("warning", text=LEFT_OUT.format(name=name))

    def _sums(self, batches: Iterator[Batch], alone: bool) -> Sums:
        """The sums over this worker's batches; ``alone``: there is but one in all. In the compute thread."""
        sums = self._metrics.zeros()
        with self._evaluating():
            for batch, output in self._outputs(batches):
                self._metrics.add(sums, output, batch.target, batch.samples, alone=alone)
        return sums

    def _divided_sums(self, model: ParallelModel, group: Group) -> tuple[Sums, TaskError | UsageError | None]:
        """The sums over the compute group's share, which all its workers compute together. In the compute thread.

        Only some workers compute the loss and the metrics. Where one of these fails, its worker goes on to compute the model, as
        the others do, and the error is returned."""
        size, columns = model.fabric.size, model.grid.columns
        start, stop = even_bounds(self._data.samples, group.size // size, group.rank // size)
        share, sums = share_of_model(model, 0), self._metrics.zeros()
        failure: TaskError | UsageError | None = None
        chunks = -(-(stop - start) // (columns * self._settings.batch_size))
        with self._evaluating():
            for first, last in bounds(stop - start, chunks):
                model.batch.size = last - first
                own_first, own_last = model.samples(last - first)
                ((batch, output),) = self._outputs(iter([self._data.batch(start + first + own_first, start + first + own_last)]))
                batch = share.of_output(batch)
                if failure is None and share.counts and batch.samples:
                    try:
                        with _explaining_gradients():
                            self._metrics.add(sums, output, batch.target, batch.samples)
                    except (TaskError, UsageError) as error:
                        failure, sums = error, self._metrics.zeros()
        return sums, failure

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        model = self._replica.model
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(self._device.torch_device, self._settings.precision), _explaining_gradients():
                yield
        finally:
            model.train(training)

    def _outputs(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Any]]:
        for batch in batches:
            here = batch.to(self._device.torch_device)
            with user_code("the model's forward, in evaluation"):
                output = here.output(self._replica.model)
            yield here, output


@contextmanager
def _explaining_gradients() -> Iterator[None]:
    """Raises a `TaskError` that says how to compute gradients in an evaluation, for one that is about a lack of them."""
    try:
        yield
    except TaskError as error:
        if isinstance(error.__cause__, RuntimeError) and "does not require grad" in str(error.__cause__):
            raise TaskError(
                f"{error}. Evaluations compute without gradients; a model or a loss that needs them computes them within "
                "torch.enable_grad()"
            ) from error.__cause__
        raise


def same_position(model: ParallelModel, group: Group) -> Group:
    """The members of ``group`` (one or several compute groups) at this worker's position in their grids."""
    size = model.fabric.size
    return group.part(tuple(range(group.rank % size, group.size, size)))


@asynccontextmanager
async def first_buffers(model: nn.Module, group: Group, tag: str) -> AsyncIterator[None]:
    """A context in which all members have the buffers of the group's first member; afterwards each has its own again."""
    buffers = list(model.buffers())
    if not buffers or group.size == 1:
        yield
        return
    own = [buffer.detach().clone() for buffer in buffers]
    try:
        for place, buffer in enumerate(buffers):
            await _spread(buffer, group, (tag, "buffer", place))
        yield
    finally:
        for buffer, mine in zip(buffers, own, strict=True):
            buffer.data.copy_(mine)


async def _spread(buffer: Tensor, group: Group, tag: tuple[str | int, ...]) -> None:
    host = buffer.detach().to("cpu", copy=True).contiguous()
    await broadcast(group, TensorPayload.of(host), tag)
    buffer.data.copy_(host)


async def spread_of_replicas(replica: TorchReplica, group: Group, tag: str) -> float:
    """Give all members the first member's parameters. Returns the largest difference between this worker's own and these."""
    largest = 0.0
    for bucket in replica.buckets:
        payload = bucket.parameters
        assert isinstance(payload, TensorPayload)
        first = payload.empty_like()
        first.copy_(payload)
        await broadcast(bucket.sharers(group), first, (tag, "spread", bucket.index))
        largest = max(largest, float((payload.tensor - first.tensor).abs().max()))
        payload.copy_(first)
        replica.parameters_ready(bucket)
    return largest
