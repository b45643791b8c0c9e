"""Linear layers that make several activations at once, as attention's queries, keys and values, each divided over the rows.

A process has a part of each, and these parts are no range of all of them together. So the layer's output is given as their
`Placed` parts, which a forward that takes it apart again finds as they are (``split``, ``chunk``, after any ``view`` of what comes
before the features). Whatever else is done to it is done to the whole output, which is gathered then: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.tensor import Placed, World, in_backward
from zmqtrain.parallel.placed.views import completed
from zmqtrain.parallel.shard import Shard


def packs_of(shard: Shard, outputs: int) -> int:
    """How many activations a layer makes whose weight has its outputs along this dimension; 1 for an ordinary one."""
    packs, width = len(shard.pieces[0]), shard.shape[outputs]
    if shard.dimension != outputs or packs == 1 or width % packs:
        return 1
    each = width // packs
    alike = all(
        ranges == tuple((ranges[0][0] + number * each, ranges[0][1] + number * each) for number in range(packs))
        for ranges in shard.pieces
    )
    return packs if alike else 1


def pack(parts: Sequence[Placed]) -> Placed:
    """Activations that lie alike, one after another along their last dimension."""
    found: Placed = _Pack.apply(*parts)  # type: ignore[no-untyped-call]
    found.parts = tuple(parts)
    return found


def _parts(value: Any) -> tuple[Placed, ...]:
    """Those that a tensor is made of; none where it has been gathered, and so may have been changed."""
    return value.parts if isinstance(value, Placed) and not isinstance(value._local, Tensor) else ()


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Placed) -> Placed:
        first = parts[0]
        ctx.place, ctx.world, ctx.shape, ctx.packs = first.placement, first.world, tuple(first.shape), len(parts)
        own = [each.local.detach() for each in parts]
        whole = first.placement.whole()
        shape = (*first.shape[:-1], first.shape[-1] * len(parts))
        return Placed(lambda: _gathered(own, ctx), whole, shape, first.world, like=own[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        world: World = ctx.world
        with in_backward(world):
            if not isinstance(gradient, Placed):
                gradient = Placed(gradient, world.whole_of(ctx.place.grid), tuple(gradient.shape), world)
            found = []
            for part in gradient.chunk(ctx.packs, -1):
                assert isinstance(part, Placed)
                found.append(world.placed(world.relaid(part, ctx.place), ctx.place, ctx.shape))
            return tuple(found)


def _gathered(own: Sequence[Tensor], ctx: Any) -> Tensor:
    world: World = ctx.world
    whole = [world.whole_features(world.placed(each, ctx.place, ctx.shape)) for each in own]
    return torch.cat(whole, -1)


@function(Tensor.view, Tensor.reshape, torch.reshape, both=True)
def viewed(value: Tensor, *shape: Any) -> Any:
    """Of what comes before the features. (``both``: tensors with two divided dimensions stay as they are, so that a change in place
    of a view is a change of them.)"""
    parts = _parts(value)
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if not parts or not all(isinstance(each, int) for each in sizes):
        return NotImplemented
    sizes = completed(sizes, value.numel())
    if len(sizes) < 2 or sizes[-1] != value.shape[-1]:
        return NotImplemented
    found = pack([part.view(*sizes[:-1], part.shape[-1]) for part in parts])  # type: ignore[misc]
    assert isinstance(value, Placed)
    value.kin.parted = True  # a change of one is none of the other
    found.kin = value.kin
    value.kin.count += 1
    return found


@function(Tensor.split, torch.split, both=True)
def split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0, **named: Any) -> Any:
    """Into the activations that it is made of."""
    parts = _parts(tensor)
    size = named.get("split_size", split_size_or_sections)
    if not parts or dim % tensor.dim() != tensor.dim() - 1:
        return NotImplemented
    each = parts[0].shape[-1]
    return parts if size == each or (isinstance(size, list | tuple) and list(size) == [each] * len(parts)) else NotImplemented


@function(Tensor.chunk, torch.chunk, both=True)
def chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    """Into the activations that it is made of."""
    parts = _parts(input)
    return parts if parts and chunks == len(parts) and dim % input.dim() == input.dim() - 1 else NotImplemented
