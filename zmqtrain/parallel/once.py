"""Gradients that a divided model does not have: what needs one says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from zmqtrain.errors import UsageError

_TWICE = (
    b"a gradient of a gradient (create_graph = True) goes through a divided model, which has none: train it without a grid, or "
    b"take such gradients of what is computed outside the model"
)
_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def once_differentiable(backward: _Backward) -> _Backward:
    """A ``backward`` that cannot be differentiated itself: an attempt raises an error.

    Torch's decorator of this name takes gradients for constants if what comes into the backward needs none. But they depend on the
    weights, too: a penalty on the gradient of a last layer would count for nothing, silently."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        outputs = found if isinstance(found, tuple) else (found,)
        places = [number for number, each in enumerate(outputs) if isinstance(each, Tensor) and _has_gradients(each)]
        failing: dict[int, Tensor] = {}
        if places:
            made = torch._C._functions.DelayedError(_TWICE, len(places))(
                *(outputs[each].detach().requires_grad_() for each in places)
            )
            failing = dict(zip(places, made if isinstance(made, tuple) else (made,), strict=True))
        result = tuple(failing.get(number, each) for number, each in enumerate(outputs))
        return result if isinstance(found, tuple) else result[0]

    return run  # type: ignore[return-value]


def no_forward_mode(ctx: Any, *grad_inputs: Any, **_: Any) -> Any:
    """Raise `UsageError`: the ``jvp`` of what computes on parts, and the rule of what makes dual tensors."""
    raise UsageError(
        "derivatives by dual tensors (torch.autograd.forward_ad) go through a divided model, which has none of these: write them "
        "with torch.func.jvp or jacfwd within the forward, which see whole layers, or train the model without a grid"
    )


def _has_gradients(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
