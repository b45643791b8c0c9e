"""Runs plain torch code on placed tensors, on ranks that are threads, and compares values and gradients with plain tensors'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zmqtrain.collectives.group import bounds
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed import Placed, World, from_local
from zmqtrain.parallel.placement import Placement
from zmqtrain.testing.threads import run_ranks


@dataclass(frozen=True)
class Given:
    """A tensor, and how it lies: over which dimension samples go, and which one is divided over the rows."""

    tensor: Tensor
    samples: int | None = 0
    divided: int | None = None
    over: str = "columns"

    @property
    def across(self) -> int | None:
        """The last dimension that may be divided beside ``divided``."""
        taken = (self.samples, self.divided)
        return next((each for each in range(self.tensor.dim() - 1, -1, -1) if each not in taken), None)

    def placement(self, grid: Grid, *, both: bool = False) -> Placement:
        """Where it lies on a grid. ``both``: with another dimension in two parts, if there is one."""
        across = self.across
        if both and across is not None and self.divided is not None:
            ranges = bounds(self.tensor.shape[self.divided], grid.rows // 2)
            beside = bounds(self.tensor.shape[across], 2)
            return Placement(grid, "columns", self.divided, ranges, self.samples, across=across, across_divisions=beside)
        ranges = () if self.divided is None else bounds(self.tensor.shape[self.divided], grid.rows)
        return Placement(grid, self.over, self.divided, ranges, self.samples)  # type: ignore[arg-type]


def everywhere(values: Any, world: World) -> list[Tensor]:
    """All tensors of a result, whole."""
    found = [values] if isinstance(values, Tensor) else list(values)
    return [world.whole(each.detach()) if isinstance(each, Placed) else each.detach() for each in found]


def check(
    function: Callable[..., Any],
    given: Sequence[Given | Tensor],
    grid: str = "2x2",
    *,
    gradients: bool = True,
    both: bool = False,
) -> World:
    """``function`` of placed tensors gives on all ranks what it gives of plain ones, and the same gradients. Returns a world.

    ``both``: tensors that are divided over the rows are divided along a second dimension, too.
    """
    wanted = Grid.parse(grid)
    tensors = [each.tensor if isinstance(each, Given) else each for each in given]
    inputs = [each.clone().requires_grad_(each.is_floating_point() and gradients) for each in tensors]
    expected = function(*inputs)
    outputs = [each for each in ([expected] if isinstance(expected, Tensor) else expected) if isinstance(each, Tensor)]
    generator = torch.Generator().manual_seed(7)
    ways = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in outputs]
    back = [(each, way.to(each.dtype)) for each, way in zip(outputs, ways, strict=True) if each.requires_grad]
    if back:
        torch.autograd.backward([each for each, _ in back], [way for _, way in back])

    def run(fabric: Fabric) -> Any:
        world = World(fabric, wanted)
        leaves, placed = [], []
        for each, tensor in zip(given, tensors, strict=True):
            if not isinstance(each, Given):
                leaf = tensor.clone().requires_grad_(tensor.is_floating_point() and gradients)
                leaves.append(leaf)
                placed.append(from_local(leaf, world.whole_of(wanted), leaf.shape, world) if leaf.requires_grad else leaf)
                continue
            placement = each.placement(wanted, both=both)
            leaf = world.cut(tensor, placement).clone().requires_grad_(tensor.is_floating_point() and gradients)
            leaves.append(leaf)
            placed.append(from_local(leaf, placement, tensor.shape, world))
        found = function(*placed)
        results = [each for each in ([found] if isinstance(found, Tensor) else found) if isinstance(each, Tensor)]
        pairs = [(each, way.to(each.dtype)) for each, way in zip(results, ways, strict=True) if each.requires_grad]
        whole = everywhere(results, world)
        if pairs:
            torch.autograd.backward(
                [each for each, _ in pairs],
                [
                    Placed(way, world.whole_of(wanted), tuple(way.shape), world) if isinstance(each, Placed) else way
                    for each, way in pairs
                ],
            )
        parts = [
            None
            if leaf.grad is None
            else (leaf.grad, each.placement(wanted, both=both) if isinstance(each, Given) else world.whole_of(wanted))
            for leaf, each in zip(leaves, given, strict=True)
        ]
        return whole, parts, [tuple(each.shape) for each in results], world

    results, _ = run_ranks(wanted.size, run)
    for whole, parts, shapes, world in results:
        assert shapes == [tuple(each.shape) for each in outputs]
        for one, other in zip(whole, outputs, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-11, atol=1e-12, equal_nan=True)
        for part, each in zip(parts, inputs, strict=True):
            assert (part is None) == (each.grad is None), "one has a gradient and the other has none"
            if part is not None and each.grad is not None:
                torch.testing.assert_close(part[0], world.cut(each.grad, part[1]), rtol=1e-10, atol=1e-12)
    return results[0][-1]
