"""torch's reduce operations as functions of two tensors, with what comes before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zmqtrain.host.sums import Combine

_COMBINE: dict[object, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduce operation."""

    combine: Combine
    before: Callable[[Tensor], Tensor] = lambda own: own
    """Makes of a rank's own tensor what is combined; may return the same one."""
    after: Callable[[Tensor], object] = lambda result: None
    """Applied to the result, in place."""


def reduction_of(operation: Any, dtype: torch.dtype, size: int) -> Reduction:
    """The reduction (`torch.distributed.ReduceOp`) over ``size`` ranks.

    Raises `TypeError` where the operation means nothing for the type.
    """
    kind = next((known for known in _COMBINE if operation == known), None)
    if kind is None:
        raise TypeError(f"the zmq backend knows no reduce operation {operation}")
    combine, exact = _COMBINE[kind], not (dtype.is_floating_point or dtype.is_complex)
    if combine in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor) and not exact:
        raise TypeError(f"{operation} is for whole numbers and truth values, not for {dtype}")
    if combine in (torch.minimum, torch.maximum) and dtype.is_complex:
        raise TypeError(f"{operation} has no meaning for {dtype}")
    if kind == dist.ReduceOp.AVG:
        if exact:
            raise TypeError(f"an average of {dtype} is no {dtype}: sum, and divide yourself")
        return Reduction(combine, after=lambda result: result.div_(size))
    if kind == dist.ReduceOp.PREMUL_SUM:
        state: Any = operation.__getstate__()  # the only place that says the factor
        return Reduction(combine, before=lambda own: own * state[1])
    return Reduction(combine)
