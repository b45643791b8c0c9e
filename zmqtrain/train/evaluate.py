"""Evaluation, divided over workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, broadcast
from zmqtrain.data.loader import Fetch
from zmqtrain.data.partition import even_bounds
from zmqtrain.train.device.base import Device
from zmqtrain.train.metrics import Metrics, Sums
from zmqtrain.train.replica import TorchReplica
from zmqtrain.train.step import Precision, autocast
from zmqtrain.train.task import Task, user_code
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """How much at once, and in which arithmetic."""

    batch_size: int
    precision: Precision = "float32"


class Evaluation:
    """Evaluates the replica's model on the task's ``eval_data``, or on a worker's share of it."""

    def __init__(self, task: Task, replica: TorchReplica, device: Device, settings: EvaluationSettings) -> None:
        assert task.eval_data is not None
        self._samples = len(task.eval_data)
        self._fetch = Fetch(task.eval_data, collate=task.collate)
        self._metrics = Metrics(task)
        self._replica, self._device, self._settings = replica, device, settings

    async def run(self, group: Group, tag: str) -> dict[str, float]:
        """Every member of ``group`` calls it, with equal parameters; all get the same result.

        Statistics that layers keep (batch norm) differ from worker to worker, so those of the group's first member are taken.
        """
        async with first_buffers(self._replica.model, group, tag):
            start, stop = even_bounds(self._samples, group.size, group.rank)
            sums = await self._device.run(lambda: self._sums(start, stop))
        await all_reduce(group, TensorPayload.of(sums), (tag, "sums"))
        return self._metrics.means(sums)

    def _sums(self, start: int, stop: int) -> Sums:
        """In the compute thread."""
        model, settings = self._replica.model, self._settings
        device = self._device.torch_device
        sums = self._metrics.zeros()
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(device, settings.precision):
                for first in range(start, stop, settings.batch_size):
                    batch = self._fetch(np.arange(first, min(first + settings.batch_size, stop))).to(device)
                    with user_code("the model's forward, in evaluation"):
                        output = model(*batch.inputs)
                    self._metrics.add(sums, output, batch.target, batch.samples)
        finally:
            model.train(training)
        return sums


@asynccontextmanager
async def first_buffers(model: nn.Module, group: Group, tag: str) -> AsyncIterator[None]:
    """For a while, all members have the buffers of the group's first one; afterwards each has its own again."""
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
    """Give all members the parameters of the first one. Returns the largest difference of any of this worker's from it."""
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
