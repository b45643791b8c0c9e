"""Adaptive pooling on strips, and over the whole image: what becomes one row is summed by all, and whole on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Communicator, Label
from zmqtrain.parallel.domain.axes import FIRST
from zmqtrain.parallel.domain.layer import Block, DomainLayer
from zmqtrain.parallel.domain.traffic import Collective
from zmqtrain.parallel.geometry import Division, Range, Table, adaptive, adaptive_range, checked, length
from zmqtrain.parallel.halo import HEIGHT

_MEAN: dict[int, Callable[..., Tensor]] = {
    1: functional.adaptive_avg_pool1d,
    2: functional.adaptive_avg_pool2d,
    3: functional.adaptive_avg_pool3d,
}
_LARGEST: dict[int, Callable[..., Tensor]] = {
    1: functional.adaptive_max_pool1d,
    2: functional.adaptive_max_pool2d,
    3: functional.adaptive_max_pool3d,
}


class _Adaptive(DomainLayer):
    """What both have in common."""

    def configure(self, module: nn.Module) -> None:
        self.size = output_size(module)
        self.axes = len(self.size)
        if getattr(module, "return_indices", False):
            raise UsageError(f"{self.name}: pooling with return_indices cannot be divided: the indices are those of a strip")

    def reach(self, dim: int, rows: int) -> Table:
        size = self.size[dim - FIRST]
        return adaptive(rows, rows if size is None else size)

    def target(self, rows: Tensor, along: dict[int, int]) -> list[int]:
        """The sizes of an output with so many rows along divided dimensions."""
        own = [rows.shape[dim] if size is None else size for dim, size in enumerate(self.size, FIRST)]
        return [along.get(dim, size) for dim, size in enumerate(own, FIRST)]

    def even(self, dim: int) -> bool:
        """Whether all output rows are made of as many input rows, none of them twice; so are those of any piece then."""
        geometry = self.lines[dim].geometry
        return geometry.length % geometry.outputs == 0

    def parts(self, dim: int, outputs: Range) -> list[Range]:
        """The rows of each output row, counted from the first of the piece."""
        geometry = self.lines[dim].geometry
        first = geometry.needs(outputs)[0]
        ranges = [adaptive_range(geometry.length, geometry.outputs, row) for row in range(*outputs)]
        return [(start - first, stop - first) for start, stop in ranges]


class DomainAdaptiveAvgPool(_Adaptive):
    """`torch.nn.AdaptiveAvgPool2d` on a strip of the image, or another of its kind."""

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        along = {dim: length(each) if self.even(dim) else rows.shape[dim] for dim, each in outputs.items()}
        result = mean_of(rows, self.target(rows, along))
        for dim, each in outputs.items():
            if not self.even(dim):
                means = result.new_zeros(length(each), rows.shape[dim])
                for row, (start, stop) in enumerate(self.parts(dim, each)):
                    means[row, start:stop] = 1 / (stop - start)
                result = torch.matmul(result.movedim(dim, -1), means.T).movedim(-1, dim)
        return result


class DomainAdaptiveMaxPool(_Adaptive):
    """`torch.nn.AdaptiveMaxPool2d` on a strip of the image, or another of its kind."""

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        if all(self.even(dim) for dim in outputs):
            return largest_of(rows, self.target(rows, {dim: length(each) for dim, each in outputs.items()}))
        return self._one_by_one(rows, list(outputs.items()), self.target(rows, dict.fromkeys(outputs, 1)))

    def _one_by_one(self, rows: Tensor, outputs: list[tuple[int, Range]], target: list[int]) -> Tensor:
        """Each row of divided dimensions by itself, in one call for all of them: of equal numbers the first is torch's choice."""
        if not outputs:
            return largest_of(rows, target)
        dim, each = outputs[0]
        parts = [rows.narrow(dim, start, stop - start) for start, stop in self.parts(dim, each)]
        return torch.cat([self._one_by_one(part, outputs[1:], target) for part in parts], dim)


def mean_of(image: Tensor, sizes: Sequence[int]) -> Tensor:
    """Adaptive average pooling to these sizes."""
    return _MEAN[len(sizes)](image, sizes)


def largest_of(image: Tensor, sizes: Sequence[int]) -> Tensor:
    """Adaptive max pooling to these sizes."""
    return _LARGEST[len(sizes)](image, sizes)


class DomainGlobalPool(nn.Module):
    """Adaptive pooling to one row: every member has the whole output, and must have the whole gradient of it, the same on all.

    Forward sends a number for each channel and column; backward nothing, since each member's rows have their own part in it.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: Communicator,
        division: Division,
        *,
        dim: int = HEIGHT,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self.name, self.communicator, self.dim = name, communicator, dim
        self.recorder: Recorder = recorder if recorder is not None else NullRecorder()
        self.mean, self.size = "Avg" in type(module).__name__, output_size(module)
        if self.size[dim - FIRST] != 1 or not (self.mean or dim == FIRST):
            raise UsageError(f"{name}: pooling to {self.size} is not over the whole image, member after member")
        if getattr(module, "return_indices", False):
            raise UsageError(f"{name}: pooling with return_indices cannot be divided: the indices are those of a strip")
        self.divide(division)

    #: The output is whole on every member.
    out_division: Division | None = None

    def divide(self, division: Division) -> None:
        """Use this division of the input from now on."""
        self.division = checked(division)
        if len(division) != self.communicator.size:
            raise UsageError(f"{self.name}: the image has {len(division)} strips for {self.communicator.size} processes")

    def forward(self, own: Tensor) -> Tensor:
        """The whole output, from this member's strip of the input (samples, channels, height, width)."""
        expected = length(self.division[self.communicator.rank])
        if own.dim() - FIRST != len(self.size) or own.shape[self.dim] != expected:
            raise UsageError(f"{self.name}: a strip of {expected} rows was due here, not the shape {tuple(own.shape)}")
        label = Label(self.name, "statistics")
        target = [own.shape[dim] if size is None else size for dim, size in enumerate(self.size, FIRST)]
        with self.recorder.span(f"pooling of {self.name}", "compute"):
            if self.mean:
                total = own.sum(self.dim, keepdim=True) / self.division[-1][1]
                part = mean_of(total, target)
            elif expected:
                part = largest_of(own, target)
            else:
                part = own.sum(self.dim, keepdim=True) - float("inf")
                part = mean_of(part, target)
        combine = _Sum if self.mean else _Max
        result: Tensor = combine.apply(part, self.communicator, label)  # type: ignore[no-untyped-call]
        return result

    def collectives(self, shape: Sequence[int], element_size: int, input_gradient: bool) -> list[Collective]:
        """What it sends on images of the whole shape ``shape``."""
        sizes = [shape[dim] if size is None else size for dim, size in enumerate(self.size, FIRST)]
        numbers = shape[0] * shape[1] * math.prod(sizes)
        return [Collective("all_reduce" if self.mean else "all_gather", numbers, element_size, "forward")]


def mean_of_parts(own: Tensor, places: int, communicator: Communicator, name: str) -> Tensor:
    """The mean over all places of an image of which each member has a block: what `DomainGlobalPool` is to strips."""
    part = own.sum(tuple(range(FIRST, own.dim())), keepdim=True) / places
    found: Tensor = _Sum.apply(part, communicator, Label(name, "statistics"))  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    """The sum over all members. Each has the gradient of the sum already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, communicator: Communicator, label: Label) -> Tensor:
        (total,) = communicator.all_reduce(part.detach().contiguous(), label).wait()
        return total.to(part.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Max(torch.autograd.Function):
    """The largest over all members; the first who has it gets the gradient, as the first row does in torch."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, communicator: Communicator, label: Label) -> Tensor:
        shapes = [tuple(part.shape)] * communicator.size
        parts = communicator.all_gather(part.detach().contiguous(), shapes, label).wait()
        largest, winner = torch.stack([each.to(part.device) for each in parts]).max(0)
        ctx.mine = winner == communicator.rank
        return largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.mine, None, None


def output_size(module: nn.Module) -> tuple[int | None, ...]:
    """The sizes that an adaptive pooling makes, by axis; ``None`` for as it is."""
    size: Any = module.output_size
    axes = int(type(module).__name__[-2])
    return (size,) * axes if isinstance(size, int) or size is None else tuple(size)
