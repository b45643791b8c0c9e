"""Modelled compute of models by their own code: operators take the time of their arithmetic, on tensors without content.

A model on torch's meta device computes shapes alone. Within `ModelledCompute` each operator that runs in this thread, in forward
and backward, takes its operations divided by the device's rate. So a divided model's interior, rims and products take their own
shares of the time, and what overlaps in the real model overlaps here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zmqtrain.errors import UsageError
from zmqtrain.parallel.copying import ITSELF, refers_to_itself
from zmqtrain.parallel.placed.tensor import Placed

#: An operator's operations, of its arguments and its result.
Formula = Callable[..., int]


#: These write nothing.
_ALLOCATIONS = frozenset((
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
))  # fmt: skip


class ModelledCompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operators take time: products and convolutions by their operations, all others by what they write.

    Of this thread alone; a backward belongs to it, too.
    """

    def __init__(self, spend: Callable[[float], None], flops_per_s: float, bytes_per_s: float = 0.0) -> None:
        """Arguments:
        spend: lets this number of seconds pass.
        flops_per_s: multiplications and additions a second.
        bytes_per_s: bytes a second that other operators write; 0: these take no time.
        """
        # Imported here, because it imports triton where there is one, which takes every process a tenth of a second.
        from torch.utils.flop_counter import flop_registry

        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas: Mapping[Any, Formula] = flop_registry
        self.flops = 0
        """Multiplications and additions so far."""
        self.spent_s = 0.0
        """The time that they, and all else, have taken."""
        self._spend, self._flop_s = spend, 1 / flops_per_s
        self._byte_s = 1 / bytes_per_s if bytes_per_s else 0.0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, Placed) for each in types):
            return NotImplemented  # the divided tensor's rule runs, and what it does on this process's part comes here
        result = func(*args, **kwargs)
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self.flops += flops
            self._take(flops * self._flop_s)
        elif self._byte_s and not func.is_view and func.overloadpacket not in _ALLOCATIONS:
            self._take(_written(result) * self._byte_s)
        return result

    def _take(self, seconds: float) -> None:
        self.spent_s += seconds
        self._spend(seconds)


def _written(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(_written(each) for each in result) if isinstance(result, list | tuple) else 0


def without_content(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on the meta device. What modules share they share in the copy, too.

    Raises `UsageError` for a model that has no copy of its own."""
    if refers_to_itself(model):
        raise UsageError(f"{type(model).__name__} cannot be copied: {ITSELF}")
    return emptied(model)


def emptied(model: nn.Module) -> nn.Module:
    """The same for a model that is known to have a copy of its own."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
