"""Divided layers put together by hand, without `zmqtrain.parallelize`: what brings activations from one to the next, and how the
tensors of modules that know it of themselves are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.redistribute import Route, carry, route
from zmqtrain.parallel.shard import Shard


def redistribute(local: Tensor, source: Placement, target: Placement, shape: Sequence[int], fabric: Fabric, layer: str) -> Tensor:
    """This process's block in ``target`` of an activation of whole ``shape`` that lies as ``source`` says, with its gradient.

    All processes of the group must call it. ``layer`` names the layer that needs it, in labels.
    """
    way = route(source, target, tuple(shape))
    expected = source.local_shape(shape, fabric.rank)
    if tuple(local.shape) != expected:
        raise UsageError(f"{layer}: rank {fabric.rank} has a part of shape {tuple(local.shape)}, and its placement {expected}")
    if source == target or way.unchanged:
        return local
    return cast(Tensor, _Redistribute.apply(local, way, fabric, layer))  # type: ignore[no-untyped-call]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, way: Route, fabric: Fabric, layer: str) -> Tensor:
        ctx.way, ctx.fabric, ctx.layer = way, fabric, layer
        return carry(local, way, fabric, Label(layer, "redistribute"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        back = route(ctx.way.target, ctx.way.source, ctx.way.shape)
        return carry(gradient, back, ctx.fabric, Label(ctx.layer, "redistribute", "backward")), None, None, None


@runtime_checkable
class HasShards(Protocol):
    """A module whose own parameters and buffers (not those of its children) are divided."""

    def shards(self) -> Mapping[str, Shard]:
        """By the names of parameters and buffers in this module."""
        ...


def shards_of(
    model: nn.Module, grid: Grid, rank: int, summed_over: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Shard]:
    """The shards of all parameters and buffers of a model, by their names in its state dict.

    Modules without shards of their own are whole, and sum over the row; ``summed_over`` names those that sum over other ranks (all
    of them, for batch- and domain-parallel layers): parameters, or modules that they are in.
    """
    found: dict[str, Shard] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = module.shards() if isinstance(module, HasShards) else {}
        for kind in (module.named_parameters, module.named_buffers):
            for each, tensor in kind(recurse=False):
                ranks = _nearest(prefix + each, summed_over or {}, grid.row(rank))
                found[prefix + each] = own.get(each) or Shard(name, tuple(tensor.shape), grid.column(rank), ranks)
    return found


def _nearest(name: str, named: Mapping[str, tuple[int, ...]], otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """What is said of a parameter, or of the nearest module around it."""
    while name:
        if name in named:
            return named[name]
        name = name.rpartition(".")[0]
    return named.get("", otherwise)
