"""Where branches of a model are added up: what is added goes to where the first summand lies, and its gradient back as it came.

So an activation and its gradient always lie alike, and it is known before anything runs what a residual block sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.tensor import Placed, from_local, to_local, unchanged


def _sum(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        """`torch.add` and `torch.sub` of two activations of one shape."""
        if len(args) < 2 or not all(isinstance(each, Placed) for each in args[:2]) or kwargs.get("out") is not None:
            return NotImplemented
        first, other = args[:2]
        there, source = first.placement, other.placement
        if there is source or first.shape != other.shape or {there.summands, source.summands} != {"none"}:
            return NotImplemented
        if there.sample_dimension is None or there.sample_dimension != source.sample_dimension:
            return NotImplemented  # parameters, positions
        if unchanged(source, there, first.shape):
            return NotImplemented
        world = first.world
        moved = from_local(to_local(other, there, world, moved=True), there, other.shape, world)
        with torch._C.DisableTorchFunctionSubclass():
            return operator(first, moved, *args[2:], **kwargs)

    return run


_SUMS: tuple[Callable[..., Any], ...] = (torch.add, Tensor.add, Tensor.add_, torch.sub, Tensor.sub, Tensor.sub_)
for _operator in _SUMS:
    function(_operator, both=True)(_sum(_operator))
