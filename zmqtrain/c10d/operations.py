"""torch's reduce operations as functions of two tensors, with the steps before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zmqtrain.c10d.errors import UnsupportedError
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
    """A reduce operation of torch.distributed, as a function of two tensors and what is done before and after it."""

    name: str
    """The operation's name in torch, without its factor."""
    combine: Combine
    before: Callable[[Tensor], Tensor] = lambda own: own
    """Converts a rank's own tensor to what is combined; may return the tensor itself."""
    after: Callable[[Tensor], object] = lambda result: None
    """Applied to the result, in place."""


def reduction_of(operation: Any, dtype: torch.dtype, size: int) -> Reduction:
    """The reduction for a `torch.distributed.ReduceOp` over ``size`` ranks.

    Raises `UnsupportedError` if the operation is not defined for the type.
    """
    for kind in _COMBINE:
        if operation == kind:
            break
    else:
        raise UnsupportedError(f"the zmq backend does not support the reduce operation {operation}")
    if kind == dist.ReduceOp.PREMUL_SUM:
        state: Any = operation.__getstate__()  # the only access to the factor
        return replace(_reduction(kind, dtype, size), before=lambda own: own * state[1])
    return _reduction(kind, dtype, size)


@cache
def _reduction(kind: Any, dtype: torch.dtype, size: int) -> Reduction:
    combine, exact = _COMBINE[kind], not (dtype.is_floating_point or dtype.is_complex)
    if combine in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor) and not exact:
        raise UnsupportedError(f"{kind} is defined for integers and booleans, not for {dtype}")
    if combine in (torch.minimum, torch.maximum) and dtype.is_complex:
        raise UnsupportedError(f"{kind} is not defined for {dtype}")
    if not _computes(combine, dtype):
        raise UnsupportedError(f"torch does not compute {kind} of {dtype} on processors: convert the tensor to another type before")
    if kind == dist.ReduceOp.AVG:
        if dtype is torch.bool:
            raise UnsupportedError("the average of booleans is not a boolean: use SUM of an integer tensor, and divide the result")
        if exact:  # as NCCL: the quotient without its fraction
            return Reduction(str(kind), combine, after=lambda result: result.div_(size, rounding_mode="trunc"))
        return Reduction(str(kind), combine, after=lambda result: result.div_(size))
    return Reduction(str(kind), combine)


@cache
def _computes(combine: Combine, dtype: torch.dtype) -> bool:
    """Whether torch has this function for this type: it stores more types than it computes with."""
    one = torch.empty(1, dtype=dtype, device="cpu")
    try:
        combine(one, one, out=torch.empty_like(one))
    except RuntimeError:
        return False
    return True
