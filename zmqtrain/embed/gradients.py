"""Tensors for a parameter's ``grad`` that are not ordinary gradients.

A gradient that is on its way to other workers is a `GoneGradient`: reading or changing it would come too late, so any use of it
raises an error at the line that used it. One that is not summed over the workers yet is a `PartGradient`, for which the same holds,
but that it may be dropped. A `WatchedGradient` is the gradient itself, and remembers that it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zmqtrain.errors import TaskError

#: Attributes of a gradient that are available without its elements.
HARMLESS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_sparse", "is_cuda", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "is_cpu", "is_meta")),
        *(Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.is_floating_point),
    }
)

#: Methods by which ``model.to(...)``, ``model.double()`` and the like convert gradients along with parameters.
CONVERSIONS = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
)  # fmt: skip
#: What ``model.to(...)`` asks of a gradient and its conversion, and what it does with the two.
TAKES = frozenset({torch._has_compatible_shallow_copy_type, Tensor.data.__set__})  # type: ignore[attr-defined]

CONVERTED = (
    "the model was converted (model.to(), float(), double(), cpu() ...) between backward() and the next optimizer.zero_grad(). "
    "That converts gradients, too, which are on their way to the other workers. Call optimizer.zero_grad() before it, or "
    "session.replicate(model, optimizer, overlap=False)"
)
MIXED = (
    "the backward passes of this step are of batches that the group has divided differently, and their gradients have been added "
    "up: take the batches of a step from one session.batches()"
)
GONE = (
    "this gradient is on its way to the other workers since backward() returned, and is only this worker's part. To read or "
    "change gradients between backward() and optimizer.step(), call session.replicate(model, optimizer, overlap=False): gradients "
    "are then the same on all workers, and whole, as soon as backward() returns. If it is the step() of an optimizer that was not "
    "given to session.replicate(): only the one that was given may make steps, in the whole session (its settings, in "
    "optimizer.param_groups, may change)"
)
PART = (
    "this gradient is of batches within session.accumulating(), and is only this worker's part: gradients can be read and changed "
    "after the last backward() of a step, which is outside of accumulating(). optimizer.zero_grad() drops it"
)


class GoneGradient(Tensor):
    """Has the shape of a gradient, and no elements."""

    why = GONE

    @staticmethod
    def __new__(cls, like: Tensor) -> GoneGradient:
        gone: GoneGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        return gone

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if func in CONVERSIONS:
            gone = args[0]
            how = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}  # there is nothing to lay out
            like = func(torch.empty(0, dtype=gone.dtype, device=gone.device), *args[1:], **how)
            if (like.dtype, like.device) == (gone.dtype, gone.device):
                return gone  # it stays as it is
            raise TaskError(CONVERTED)
        if func in TAKES and args[1] is args[0]:
            return True
        raise TaskError(cls.why)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TaskError(cls.why)

    def __repr__(self) -> str:  # type: ignore[override]
        return "<a gradient that is on its way to the other workers>"


class PartGradient(GoneGradient):
    """Stands for a gradient that is being added up on each worker by itself."""

    why = PART

    def __repr__(self) -> str:  # type: ignore[override]
        return "<a gradient that is not summed over the workers yet>"


class Watch:
    """Whether a watched gradient was used."""

    used = False


class WatchedGradient(Tensor):
    """The same elements as the tensor it is made of."""

    watch: Watch

    @classmethod
    def of(cls, gradient: Tensor, watch: Watch) -> WatchedGradient:
        watched: WatchedGradient = Tensor._make_subclass(cls, gradient)
        watched.watch = watch
        return watched

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS:
            for watched in _watched((*args, *(kwargs or {}).values())):
                watched.watch.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def plain(gradient: Tensor) -> Tensor:
    """The gradient as an ordinary tensor, without noting a use."""
    if not isinstance(gradient, WatchedGradient):
        return gradient
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(Tensor)


def _watched(arguments: Iterable[Any]) -> Iterable[WatchedGradient]:
    for argument in arguments:
        if isinstance(argument, WatchedGradient):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _watched(argument)
