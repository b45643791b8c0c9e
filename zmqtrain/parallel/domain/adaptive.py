"""Adaptive pooling on strips, and over the whole image: what becomes one row is summed by all, and whole on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Communicator, Label
from zmqtrain.parallel.domain.axes import sizes
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.domain.traffic import Collective
from zmqtrain.parallel.geometry import Division, Range, Table, adaptive, adaptive_range, checked, length
from zmqtrain.parallel.halo import HEIGHT, WIDTH


class _Adaptive(DomainLayer):
    """What both have in common."""

    def configure(self, module: nn.Module) -> None:
        self.size = output_size(module)
        if getattr(module, "return_indices", False):
            raise UsageError(f"{self.name}: pooling with return_indices cannot be divided: the indices are those of a strip")

    def reach(self, rows: int) -> Table:
        size = self.size[self.dim - HEIGHT]
        return adaptive(rows, rows if size is None else size)

    def target(self, rows: Tensor, along: int) -> tuple[int, int]:
        """The (height, width) of what so many output rows are."""
        axis = self.dim - HEIGHT
        other = self.size[1 - axis]
        return sizes(axis, along, rows.shape[HEIGHT + 1 - axis] if other is None else other)

    @property
    def even(self) -> bool:
        """Whether all output rows are made of as many input rows, none of them twice; so are those of any piece then."""
        return self.geometry.length % self.geometry.outputs == 0

    def parts(self, outputs: Range) -> list[Range]:
        """The rows of each output row, counted from the first of the piece."""
        first = self.geometry.needs(outputs)[0]
        ranges = [adaptive_range(self.geometry.length, self.geometry.outputs, row) for row in range(*outputs)]
        return [(start - first, stop - first) for start, stop in ranges]


class DomainAdaptiveAvgPool2d(_Adaptive):
    """`torch.nn.AdaptiveAvgPool2d` on a strip of the image."""

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        if self.even:
            return functional.adaptive_avg_pool2d(rows, self.target(rows, length(outputs)))
        narrow = functional.adaptive_avg_pool2d(rows, self.target(rows, rows.shape[self.dim]))
        means = rows.new_zeros(length(outputs), rows.shape[self.dim])
        for row, (start, stop) in enumerate(self.parts(outputs)):
            means[row, start:stop] = 1 / (stop - start)
        return torch.matmul(means, narrow) if self.dim == HEIGHT else torch.matmul(narrow, means.T)


class DomainAdaptiveMaxPool2d(_Adaptive):
    """`torch.nn.AdaptiveMaxPool2d` on a strip of the image."""

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        if self.even:
            return _max(rows, self.target(rows, length(outputs)))
        one = self.target(rows, 1)
        parts = [rows.narrow(self.dim, start, stop - start) for start, stop in self.parts(outputs)]
        return torch.cat([_max(part, one) for part in parts], self.dim)


class DomainGlobalPool2d(nn.Module):
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
        assert isinstance(module, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d)
        self.name, self.communicator, self.dim = name, communicator, dim
        self.recorder: Recorder = recorder if recorder is not None else NullRecorder()
        self.mean, self.size = isinstance(module, nn.AdaptiveAvgPool2d), output_size(module)
        if self.size[dim - HEIGHT] != 1:
            raise UsageError(f"{name}: pooling to {self.size} is not over the whole image")
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
        if own.dim() != 4 or own.shape[self.dim] != expected:
            raise UsageError(f"{self.name}: a strip of {expected} rows was due here, not the shape {tuple(own.shape)}")
        axis, label = self.dim - HEIGHT, Label(self.name, "statistics")
        target = sizes(axis, 1, own.shape[HEIGHT + 1 - axis] if self.size[1 - axis] is None else self.size[1 - axis] or 1)
        with self.recorder.span(f"pooling of {self.name}", "compute"):
            if self.mean:
                total = own.sum(self.dim, keepdim=True) / self.division[-1][1]
                part = functional.adaptive_avg_pool2d(total, target)
            elif expected:
                part = _max(own, target)
            else:
                part = own.sum(self.dim, keepdim=True) - float("inf")
                part = functional.adaptive_avg_pool2d(part, target)
        combine = _Sum if self.mean else _Max
        result: Tensor = combine.apply(part, self.communicator, label)  # type: ignore[no-untyped-call]
        return result

    def collectives(self, shape: Sequence[int], element_size: int, input_gradient: bool) -> list[Collective]:
        """What it sends on images of the whole shape ``shape``."""
        other = self.size[WIDTH - self.dim]
        numbers = shape[0] * shape[1] * (shape[HEIGHT + WIDTH - self.dim] if other is None else other)
        return [Collective("all_reduce" if self.mean else "all_gather", numbers, element_size, "forward")]


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


def output_size(module: nn.Module) -> tuple[int | None, int | None]:
    """The (height, width) that an adaptive pooling makes; ``None`` for as it is."""
    size: Any = module.output_size
    return (size, size) if isinstance(size, int) or size is None else (size[0], size[1])


def _max(rows: Tensor, target: tuple[int, int]) -> Tensor:
    return functional.adaptive_max_pool2d(rows, target)
