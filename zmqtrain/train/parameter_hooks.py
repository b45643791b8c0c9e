"""Hooks of the task's own on parameters, where a parameter's gradient is the sum of several parts.

A hook of ``register_hook`` is called with each part, so only a linear one (a mask, a factor) gives what it would give in one
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.errors import TaskError
from zmqtrain.train.hooks import OwnHook
from zmqtrain.train.task import user_code


def require_linear_hooks(model: nn.Module) -> None:
    """Raise `TaskError` for hooks on parameters that do not commute with the sum of a gradient's parts. Each is tried three times,
    on random gradients."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise TaskError(
                f"the parameter {name!r} has a hook of register_post_accumulate_grad_hook(), which would see only this worker's "
                "part of the gradient: let the optimizer do its work"
            )
        hooks = [hook for hook in (parameter._backward_hooks or {}).values() if not isinstance(hook, OwnHook)]
        if hooks and not _linear(hooks, parameter):
            raise TaskError(
                f"a hook on the parameter {name!r} (register_hook) is not linear: it would be called with this worker's part of "
                "the gradient, and the sum of its results is not what it makes of the whole one. Clip with [optimizer] clip_norm, "
                "let the optimizer change gradients in its step(), or use a loop of your own (docs/sessions.md)"
            )


def _linear(hooks: list[Callable[[Tensor], Any]], parameter: nn.Parameter) -> bool:
    def called(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for hook in hooks:
            with user_code("a hook on a parameter"):
                changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.device, parameter.dtype)
        for _ in range(2)
    )
    with torch.no_grad():
        apart, together = called(first) + called(2.0 * second), called(first + 2.0 * second)
    eps = torch.finfo(parameter.dtype).eps
    return bool(torch.allclose(apart, together, rtol=64 * eps, atol=64 * eps))
