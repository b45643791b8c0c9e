"""Softmax of logits that are divided over the rows.

The logits are never gathered. Each row tells the others, for each vector, its largest logit and the sum of exponentials relative to
it: one small all-gather.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.parts import sum_traffic
from zmqtrain.parallel.model.precision import raised
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total


def combined(x: Tensor, site: Site, *more: Tensor) -> tuple[Tensor, ...]:
    """Of (vectors, this row's classes): the largest of all classes, the sum of exponentials relative to it, the sums of ``more``.

    Each is (vectors). Without gradient; blocks.
    """
    largest = x.amax(-1)
    # A row whose logits are all minus infinity has a sum of 0, and not of infinity minus infinity.
    base = largest.masked_fill(largest == -math.inf, 0.0)
    own = torch.stack((largest, (x - base.unsqueeze(-1)).exp().sum(-1), *more))
    found = own.unsqueeze(0)
    if site.rows > 1:
        shapes = [tuple(own.shape)] * site.rows
        found = torch.stack(site.column_group.all_gather(own, shapes, site.label("statistics")).wait())
    highest = found[:, 0].amax(0)
    summed = (found[:, 1] * (found[:, 0] - highest).exp()).sum(0)
    return highest, summed, *found[:, 2:].sum(0)


class _Softmax(torch.autograd.Function):
    """Of (..., this row's classes), or its logarithm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, logarithm: bool, site: Site) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        highest, summed = (each.unsqueeze(-1) for each in combined(flat, site))
        found = (flat - highest) - summed.log() if logarithm else (flat - highest).exp() / summed
        result = found.reshape(x.shape)
        ctx.save_for_backward(result)
        ctx.logarithm, ctx.site = logarithm, site
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        summed = (gradient if ctx.logarithm else gradient * result).sum(-1, keepdim=True)
        if ctx.site.rows > 1:
            (summed,) = ctx.site.column_group.all_reduce(summed, ctx.site.label("statistics", "backward")).wait()
        return (gradient - result.exp() * summed if ctx.logarithm else result * (gradient - summed)), None, None


class Softmax(Divided):
    """`torch.nn.Softmax` or ``LogSoftmax`` along a dimension that is divided over the rows. Backward sums a number a vector."""

    def __init__(self, original: nn.Softmax | nn.LogSoftmax, site: Site) -> None:
        super().__init__(original, site)
        if original.dim is None:
            raise UsageError(f"layer {site.layer}: a divided softmax must say along which dimension it is")
        self.dim, self.logarithm = original.dim, isinstance(original, nn.LogSoftmax)

    def forward(self, x: Tensor) -> Tensor:
        """This row's part of the logits to its part of the probabilities, or their logarithms."""
        moved = raised(x).movedim(self.dim, -1)
        found = cast(Tensor, _Softmax.apply(moved, self.logarithm, self.site))  # type: ignore[no-untyped-call]
        return found.movedim(-1, self.dim).to(x.dtype)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        vectors = math.prod(shape) // shape[self.dim]
        return vector_traffic(self.site, vectors, itemsize, 2, backward=input_gradient)


def vector_traffic(site: Site, vectors: int, itemsize: int, numbers: int, *, backward: bool) -> Traffic:
    """What this process sends for some numbers of each vector, gathered in forward, and for one that is summed in backward."""
    parts = [{site.label("statistics"): traffic.all_gather([numbers * vectors * itemsize] * site.rows, site.row)}]
    if backward:
        parts.append({site.label("statistics", "backward"): sum_traffic(vectors, site, itemsize)})
    return total(parts)
