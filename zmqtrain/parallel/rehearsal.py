"""What a divided model will send, found out by its own code: each process's step is run alone, on tensors without content.

Nothing travels and nothing is computed, so it takes milliseconds, and is exact for whatever `parallelize` divides: uneven shares,
strips and their halos, branches, statistics, the real ways from one placement to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zmqtrain.parallel.communicator import Communicator, Expected, Label, Pending, Ready
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.traffic import Sent, Traffic
from zmqtrain.parallel.modelled import without_content
from zmqtrain.parallel.placed.model import ParallelModel, Statistics, map_tensors, parallelize
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.sums import sum_gradients

#: What each rank sends in a step, by label.
Rehearsed: TypeAlias = tuple[Traffic, ...]


class RehearsalFabric:
    """One rank's `zmqtrain.parallel.communicator.Fabric` without others: what is due is there at once, on the meta device."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.traffic: Traffic = {}
        """What this rank would have sent, in the order of the first message of each label."""
        self._communicators: dict[tuple[int, ...], _Alone] = {}

    def among(self, members: tuple[int, ...]) -> Communicator:
        if members not in self._communicators:
            self._communicators[members] = _Alone(self, members.index(self.rank), len(members))
        return self._communicators[members]

    def count(self, label: Label, sent: Sent) -> None:
        """This would have been sent."""
        if sent:
            self.traffic[label] = self.traffic.get(label, Sent()) + sent


class _Alone:
    """Implements `Communicator`."""

    def __init__(self, fabric: RehearsalFabric, rank: int, size: int) -> None:
        self.rank, self.size, self._fabric = rank, size, fabric

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Expected], label: Label) -> Pending:
        self._fabric.count(label, traffic.messages(tensor.nbytes for _, tensor in sends))
        return Ready([_empty(due.shape, due.dtype) for due in receives])

    def all_gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]], label: Label) -> Pending:
        assert tuple(part.shape) == tuple(shapes[self.rank])
        sizes = [math.prod(shape) * part.element_size() for shape in shapes]
        self._fabric.count(label, traffic.all_gather(sizes, self.rank))
        return Ready([_empty(shape, part.dtype) for shape in shapes])

    def all_reduce(self, tensor: Tensor, label: Label) -> Pending:
        self._fabric.count(label, traffic.all_reduce(tensor.numel(), tensor.element_size(), self.size, self.rank))
        return Ready([_empty(tuple(tensor.shape), tensor.dtype)])

    def reduce_scatter(self, parts: Sequence[Tensor], label: Label) -> Pending:
        self._fabric.count(label, traffic.reduce_scatter([part.nbytes for part in parts], self.rank))
        return Ready([_empty(tuple(parts[self.rank].shape), parts[self.rank].dtype)])


def rehearse(
    model: nn.Module,
    inputs: Sequence[Any],
    grid: Grid,
    plan: Plan | None,
    batch: int,
    *,
    statistics: Statistics = "whole",
    whole: Sequence[str] = (),
    sums: bool = True,
) -> Rehearsed:
    """What each rank sends in a training step of ``parallelize(model, grid, plan)`` with ``batch`` samples. Changes nothing.

    Arguments:
        inputs: of a few samples, which come first; their shapes and types count.
        sums: whether the sums of weight gradients (`zmqtrain.parallel.sums.sum_gradients`) count, too.

    Raises `UsageError` as `parallelize` does.
    """
    found = []
    for rank in range(grid.size):
        fabric = RehearsalFabric(rank, grid.size)
        parallel = parallelize(without_content(model), grid, plan, fabric=fabric, statistics=statistics, whole=whole)
        parallel.batch.size = batch
        train_step(parallel, inputs)
        if sums:
            sum_gradients(parallel, fabric, parallel.shards_by_name())
        found.append(fabric.traffic)
    return tuple(found)


def train_step(model: ParallelModel, inputs: Sequence[Any]) -> None:
    """Forward and backward of a divided model without content, with gradients of all its outputs. ``inputs`` as for `rehearse`."""
    model.train()
    start, stop = model.samples(model.batch.size)

    def given(tensor: Tensor) -> Tensor:
        return _empty((stop - start, *tensor.shape[1:]), tensor.dtype) if tensor.dim() else tensor

    outputs: list[Tensor] = []
    map_tensors(model(*[map_tensors(each, given) for each in inputs]), outputs.append)
    outputs = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
