"""Parameters and buffers of a divided model, as its forward sees them: whole tensors, of which this process holds a part.

What autograd finds for one is brought to the form that the runtime sums: of this process what it contributes. See
`zmqtrain.parallel.shard.Shard.summed_over`, and `contribution`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placed.tensor import Placed, World, in_backward
from zmqtrain.parallel.placement import Placement, changed, laid
from zmqtrain.parallel.plan import Choice, Strips
from zmqtrain.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class Use:
    """What a layer's code needs to know of a parameter that it is given."""

    layer: str
    name: str
    choice: Choice
    grid: Grid
    leaf: Tensor
    """This process's part, whose gradient is its contribution."""
    shard: Shard
    strips: Strips | None = None
    """How images are divided, if the layer divides them."""

    def __str__(self) -> str:
        return f"layer {self.layer or 'of the model'}: its {self.name!r}"

    def write(self, whole: Placed) -> None:
        """Let the parameter or buffer have this content, in the memory that it has. All processes must call it."""
        world, shard = whole.world, self.shard
        placement = _placement(self, world)
        if placement is None:
            part = shard.cut(world.whole(whole), shard.members.index(world.rank))
        else:
            part = world.relaid(whole, placement)
        with torch.no_grad():
            self.leaf.copy_(part)

    def held(self, world: World) -> tuple[Tensor | Callable[[], Tensor], Placement]:
        """This process's part, or what gathers the whole when it is asked for, and where it lies."""
        local, placement = self.leaf.detach(), _placement(self, world)
        if placement is not None:
            return local, placement
        # Layers take the part itself, and all else gets it gathered.
        return lambda: _gathered(local, self, world), world.whole_of(self.grid)


def use_of(value: Any) -> Use | None:
    """Of a parameter that is as its module has it; ``None`` for whatever was made of one."""
    return value.use if isinstance(value, Placed) else None


def wrapped(use: Use, world: World) -> Placed:
    """The whole parameter, for a forward."""
    leaf, shard = use.leaf, use.shard
    if leaf.requires_grad and torch.is_grad_enabled():
        found = cast(Placed, _Parameter.apply(leaf, use, world))  # type: ignore[no-untyped-call]
        # Autograd runs what was made last first, and this before all layers: at the end of backward, when nothing would be left to
        # compute while sums of gradients travel. So it is to run as soon as its gradient is there, as leaves do.
        found.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[union-attr]
    else:
        found = _placed(use, world)
    found.use = use
    found._is_param = isinstance(leaf, nn.Parameter)  # so that torch takes it for one
    assert tuple(found.shape) == shard.shape
    return found


def _placed(use: Use, world: World) -> Placed:
    local, placement = use.held(world)
    return Placed(local, placement, use.shard.shape, world, like=use.leaf)


def _placement(use: Use, world: World) -> Placement | None:
    """Where the parts lie; ``None`` where one consists of several ranges, as the gates of an LSTM."""
    shard, grid = use.shard, use.grid
    if shard.dimension is None:
        return world.whole_of(grid)
    if all(len(ranges) == 1 for ranges in shard.pieces):
        return laid(grid, "columns", shard.dimension, tuple(ranges[0] for ranges in shard.pieces), None)
    return None


def settle(value: Placed) -> None:
    """A tensor was changed in place. If it is a parameter or buffer, or a view of one, and had been gathered: bring the change to
    the part that this process holds, with which layers compute."""
    held = value.world.held.get(id(value.kin))
    if held is not None and isinstance(held._local, Tensor) and not held._local.is_meta:
        leaf: Tensor = held.use.leaf
        if held._local.data_ptr() != leaf.data_ptr():
            held.use.write(held)


def _gathered(local: Tensor, use: Use, world: World) -> Tensor:
    shard = use.shard
    shapes = [shard.local_shape(row) for row in range(len(shard.members))]
    parts = (
        world.fabric.among(shard.members).all_gather(local.detach(), shapes, world.label("redistribute", layer=use.layer)).wait()
    )
    return shard.join(parts)


#: Of what autograd runs first of all that is ready.
_FIRST = (1 << 63) - 1


class _Parameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, use: Use, world: World) -> Placed:
        ctx.use, ctx.world = use, world
        return _placed(use, world)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        use, world = ctx.use, ctx.world
        with in_backward(world):
            if not isinstance(gradient, Placed):
                gradient = Placed(gradient, world.whole_of(use.grid), tuple(gradient.shape), world)
            return contribution(world, gradient, use), None, None


def contribution(world: World, gradient: Placed, use: Use) -> Tensor:
    """What this process adds to the gradient of its part, so that the sum over `Shard.summed_over` is the gradient."""
    shard, label = use.shard, world.label("dw", "backward", use.layer)
    ranks, grid = shard.summed_over, gradient.placement.grid
    summands = gradient.placement.summands
    every = len(ranks) == grid.size
    counts = True
    if not _fits(summands, ranks, grid, world.rank):
        gradient = Placed(world.relaid(gradient, changed(gradient.placement, summands="none"), label),
                          changed(gradient.placement, summands="none"), tuple(gradient.shape), world)  # fmt: skip
        summands = "none"
    row, column = grid.place(world.rank)
    divided = gradient.placement.divided
    own = None if shard.dimension is None else [ranges[0] for ranges in shard.pieces]
    if divided is not None and shard.dimension is None and every:
        # Each row has some of it: the others contribute zeros there.
        counts = summands in ("row", "all") or column == 0
        whole = gradient.local.new_zeros(shard.shape)
        if counts:
            world.cut(whole, gradient.placement).copy_(gradient.local)
        return whole
    same = (
        own is not None and divided == shard.dimension and gradient.placement.grid == use.grid
        and gradient.placement.divisions == tuple(own) and all(len(ranges) == 1 for ranges in shard.pieces)
    )  # fmt: skip
    if divided is not None and not same:
        plain = changed(gradient.placement, summands="none")
        local = world.relaid(gradient, plain, label)
        gradient, summands = Placed(local, plain, tuple(gradient.shape), world), "none"
        gradient = Placed(world.whole(gradient), world.whole_of(grid), tuple(gradient.shape), world)
    local = gradient.local
    if shard.dimension is not None and not same:
        local = shard.cut(local, shard.members.index(world.rank))
    if summands == "none":
        counts = world.rank == ranks[0]
    elif every and summands == "row":
        counts = row == 0
    elif every and summands == "column":
        counts = column == 0
    return local if counts else torch.zeros_like(local)


def _fits(summands: str, ranks: Sequence[int], grid: Grid, rank: int) -> bool:
    """Whether a sum over these ranks is the sum of the summands, where some may count as nothing."""
    if summands == "none" or len(ranks) == grid.size:
        return True
    return summands == "row" and tuple(ranks) == grid.row(rank)


def hooked(parameter: nn.Parameter) -> bool:
    """Whether a person's hooks wait for its gradient: they would see a part of it."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
