"""Parts of an activation come together, one after the other or as a sum, and come apart.

The gradient of an activation that is whole on a column is whole on it too, and the same on every process. So what an all-gather
brought together needs no message to go back: each process takes its own part of the gradient; and the gradient of a sum is that of
each summand.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placement import Divisions, Range
from zmqtrain.parallel.shard import Pieces


def gathered(part: Tensor, dimension: int, divisions: Divisions, site: Site, label: Label) -> Tensor:
    """The whole of what the column's processes have parts of along ``dimension``. Without gradient; blocks."""
    if site.rows == 1:
        return part
    dimension %= part.dim()
    before, after = tuple(part.shape[:dimension]), tuple(part.shape[dimension + 1 :])
    shapes = [(*before, stop - start, *after) for start, stop in divisions]
    return torch.cat(site.column_group.all_gather(part, shapes, label).wait(), dimension)


def gather(part: Tensor, dimension: int, divisions: Divisions, site: Site) -> Tensor:
    """The same with its gradient, which needs no message."""
    return part if site.rows == 1 else cast(Tensor, _Gather.apply(part, dimension, divisions, site))  # type: ignore[no-untyped-call]


def taken(part: Tensor, whole: Tensor, dimension: int, pieces: Pieces, site: Site) -> Tensor:
    """``whole``, which has been gathered without gradient, with that of the parts it was gathered from: again without a message."""
    return cast(Tensor, _Taken.apply(part, whole, dimension, pieces[site.row]))  # type: ignore[no-untyped-call]


def split(whole: Tensor, dimension: int, divisions: Divisions, site: Site) -> Tensor:
    """This process's part of what is whole on the column. The parts of its gradient are gathered in backward."""
    return whole if site.rows == 1 else cast(Tensor, _Split.apply(whole, dimension, divisions, site))  # type: ignore[no-untyped-call]


def add_up(summand: Tensor, site: Site) -> Tensor:
    """The sum over the column, with its gradient, which needs no message. Blocks."""
    return summand if site.rows == 1 else cast(Tensor, _AddUp.apply(summand, site))  # type: ignore[no-untyped-call]


def gather_traffic(numel: int, divisions: Divisions, site: Site, itemsize: int) -> traffic.Sent:
    """What this process sends to gather: ``numel`` elements for each that the divisions count."""
    sizes = [numel * (stop - start) * itemsize for start, stop in divisions]
    return traffic.all_gather(sizes, site.row)


def sum_traffic(numel: int, site: Site, itemsize: int) -> traffic.Sent:
    """What this process sends to sum ``numel`` elements over the column."""
    return traffic.all_reduce(numel, itemsize, site.rows, site.row)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dimension: int, divisions: Divisions, site: Site) -> Tensor:
        ctx.dimension, ctx.own = dimension, divisions[site.row]
        return gathered(part, dimension, divisions, site, site.label("all_gather"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start, stop = ctx.own
        return gradient.narrow(ctx.dimension, start, stop - start), None, None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, dimension: int, ranges: tuple[Range, ...]) -> Tensor:
        ctx.dimension, ctx.ranges = dimension, ranges
        return whole.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own = [gradient.narrow(ctx.dimension, start, stop - start) for start, stop in ctx.ranges]
        return torch.cat(own, ctx.dimension), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dimension: int, divisions: Divisions, site: Site) -> Tensor:
        ctx.dimension, ctx.divisions, ctx.site = dimension, divisions, site
        start, stop = divisions[site.row]
        return whole.narrow(dimension, start, stop - start).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        label = ctx.site.label("dx", "backward")
        return gathered(gradient, ctx.dimension, ctx.divisions, ctx.site, label), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, site: Site) -> Tensor:
        (total,) = site.column_group.all_reduce(summand, site.label("all_gather")).wait()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
