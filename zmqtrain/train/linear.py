"""Linear layers whose backward writes the gradient of the weight directly into its bucket.

Autograd would compute each gradient in newly mapped memory, from which it is then copied into the bucket. Linear layers hold most
parameters of most models, so this is a large part of the memory traffic of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Below this size, in elements, a gradient in new memory costs almost nothing.
SMALLEST_BYTES = 1 << 20


class WeightSlot:
    """Where the gradient of one weight goes. It belongs to this one parameter: copies of the layer have no slot."""

    def __init__(self, weight: Tensor, memory: Callable[[], Tensor | None]) -> None:
        """``memory()`` is called when a gradient is computed. It returns the tensor to write to, of the weight's shape and dtype
        and not used elsewhere, or None if autograd is to allocate it."""
        self.weight, self.memory = weight, memory

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (type(None), ())


class SlottedLinear(nn.Linear):
    """The class that `write_gradients_to` gives a layer."""

    slot: WeightSlot | None

    def forward(self, input: Tensor) -> Tensor:
        slot, weight = self.__dict__.get("slot"), self.weight
        if (
            torch.compiler.is_compiling()
            or slot is None
            or slot.weight is not weight
            or not torch.is_grad_enabled()
            or not weight.requires_grad
            or torch.is_autocast_enabled(input.device.type)
        ):
            return super().forward(input)
        result: Tensor = _Linear.apply(input, weight, self.bias, slot.memory)  # type: ignore[no-untyped-call]
        return result

    def _get_name(self) -> str:
        return "Linear"


def write_gradients_to(module: nn.Linear, memory: Callable[[], Tensor | None]) -> Callable[[], None]:
    """Let ``module`` ask for memory whenever the gradient of its weight is computed (see `WeightSlot`).

    Returns a function that undoes it.

    The layer's results stay the same to the bit. If the gradient itself is to be differentiated, types are cast automatically or
    the code is compiled, the layer works as before.
    """
    module.__class__ = SlottedLinear
    module.__dict__["slot"] = WeightSlot(module.weight, memory)

    def undo() -> None:
        module.__dict__.pop("slot", None)
        module.__class__ = nn.Linear

    return undo


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, memory: Callable[[], Tensor | None]) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.memory = memory
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        of_inputs = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            # With gradients enabled, this backward is itself recorded, to be differentiated again.
            memory = None if torch.is_grad_enabled() else ctx.memory()
            of_weight = torch.mm(rows.t(), inputs.reshape(-1, inputs.shape[-1]), out=memory)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias, None
