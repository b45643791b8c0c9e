"""The product of an input with this process's part of the weights, whose backward hides communication behind arithmetic.

Each process computes what its weights contribute to the gradient of the input. Where they meet is the layer's only communication in
backward; it is begun first, the gradients of the weights are computed while it is on its way, and it is waited for at the end. A
layer whose input needs no gradient, the first of a model, sends nothing.

The gradients of the weights are those of this process's samples; they are summed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from zmqtrain.parallel.model.parts import gather_traffic, sum_traffic
from zmqtrain.parallel.model.precision import lowered
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Sent, reduce_scatter
from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placement import Divisions, Range
from zmqtrain.parallel.shard import Pieces

#: Waits for the gradient of the input.
Finish: TypeAlias = Callable[[], Tensor]


class Operation(Protocol):
    """What a layer computes, and its gradients one by one."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    def bias_gradient(self, gradient: Tensor) -> Tensor: ...


class Meeting(Protocol):
    """How the contributions of a column's processes become the gradient of the input that each was given."""

    def begin(self, contribution: Tensor) -> Finish: ...

    def sent(self, numel: int, itemsize: int) -> Sent:
        """What this process sends, where the dimension that the meeting is about is left out of ``numel``."""
        ...


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, operation: Operation, meeting: Meeting, given: Tensor | None = None
) -> Tensor:
    """``operation`` on ``x``; or on ``given``, without gradient: what ``x``, or the ``x`` of all rows, was made into.

    ``meeting`` makes the gradient of ``x`` of that of what was given.
    """
    weight, bias = lowered(weight), None if bias is None else lowered(bias)
    return cast(Tensor, _Product.apply(x, given, weight, bias, operation, meeting))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        operation: Operation,
        meeting: Meeting,
    ) -> Tensor:
        given = x if given is None else given
        ctx.save_for_backward(given, weight)
        ctx.operation, ctx.meeting = operation, meeting
        return operation.forward(given, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        operation, (for_input, _, for_weight, for_bias, *_) = ctx.operation, ctx.needs_input_grad
        finish = ctx.meeting.begin(operation.input_gradient(gradient, given, weight)) if for_input else None
        weights = operation.weight_gradient(gradient, given, weight) if for_weight else None
        biases = operation.bias_gradient(gradient) if for_bias else None
        return finish() if finish is not None else None, None, weights, biases, None, None


@dataclass(frozen=True, slots=True)
class Alone:
    """No other process contributes: the input was this process's own."""

    def begin(self, contribution: Tensor) -> Finish:
        return lambda: contribution

    def sent(self, numel: int, itemsize: int) -> Sent:
        return Sent()


@dataclass(frozen=True, slots=True)
class Summed:
    """The input is whole on the column: the contributions are summed, everybody gets the sum."""

    site: Site
    length: int
    dimension: int = -1
    held: Range | None = None
    """The range of ``dimension``, of ``length``, that this process contributes to; ``None``: all of it."""

    def begin(self, contribution: Tensor) -> Finish:
        if self.held is not None:
            shape = list(contribution.shape)
            shape[self.dimension] = self.length
            padded = contribution.new_zeros(shape)
            padded.narrow(self.dimension, self.held[0], self.held[1] - self.held[0]).copy_(contribution)
            contribution = padded
        if self.site.rows == 1:
            return lambda: contribution
        pending = self.site.column_group.all_reduce(contribution, self.site.label("dx", "backward"))
        return lambda: pending.wait()[0]

    def sent(self, numel: int, itemsize: int) -> Sent:
        return sum_traffic(numel * self.length, self.site, itemsize)


@dataclass(frozen=True, slots=True)
class Scattered:
    """The input came in parts, and was gathered: the contributions are summed, and everybody gets the sum for its part."""

    site: Site
    pieces: Pieces
    dimension: int = -1

    def begin(self, contribution: Tensor) -> Finish:
        if self.site.rows == 1:
            return lambda: contribution
        parts = [
            torch.cat([contribution.narrow(self.dimension, start, stop - start) for start, stop in ranges], self.dimension)
            if len(ranges) > 1
            else contribution.narrow(self.dimension, ranges[0][0], ranges[0][1] - ranges[0][0])
            for ranges in self.pieces
        ]
        pending = self.site.column_group.reduce_scatter(parts, self.site.label("dx", "backward"))
        return lambda: pending.wait()[0]

    def sent(self, numel: int, itemsize: int) -> Sent:
        sizes = [sum(stop - start for start, stop in ranges) * numel * itemsize for ranges in self.pieces]
        return reduce_scatter(sizes, self.site.row)


@dataclass(frozen=True, slots=True)
class Collected:
    """The input is whole on the column, and each process has used its own range of it: contributions lie one after the other."""

    site: Site
    divisions: Divisions
    dimension: int

    def begin(self, contribution: Tensor) -> Finish:
        if self.site.rows == 1:
            return lambda: contribution
        shapes = []
        for start, stop in self.divisions:
            shape = list(contribution.shape)
            shape[self.dimension] = stop - start
            shapes.append(tuple(shape))
        pending = self.site.column_group.all_gather(contribution, shapes, self.site.label("dx", "backward"))
        return lambda: torch.cat(pending.wait(), self.dimension)

    def sent(self, numel: int, itemsize: int) -> Sent:
        return gather_traffic(numel, self.divisions, self.site, itemsize)
