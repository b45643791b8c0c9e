"""A torch optimizer as plain data and back, so that a server can run the task's optimizer without the task's code.

Only classes of ``torch.optim`` are built, and only those whose update of an element depends on that element alone, since a server
holds flat pieces of parameters and does not know their shapes.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.parallel.turns import generators_kept
from zmqtrain.wire.message import pack_value, unpack_value
from zmqtrain.wire.payload import Value
from zmqtrain.words import typed

#: Options that choose how an update is computed on a device but do not change it; each side decides for itself.
_IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
#: Optimizers whose update of an element depends on other elements of its tensor, or on the closure: flat pieces are not enough.
_NOT_ELEMENTWISE = frozenset({"LBFGS", "Adafactor", "Muon", "SparseAdam"})
#: Optimizers whose update depends on all parameters at once.
_NOT_SEPARABLE = frozenset({"LBFGS"})


def describe_optimizer(optimizer: Optimizer) -> OptimizerSpec:
    """The optimizer's class and current hyperparameters.

    Raises `TaskError` if a hyperparameter is not a plain value (a number, string, boolean or list of them).
    """
    kind = type(optimizer)
    module = "torch.optim" if getattr(torch.optim, kind.__qualname__, None) is kind else kind.__module__
    name = f"{module}:{kind.__qualname__}"
    groups = tuple(
        {key: _plain(value, f"{kind.__qualname__}.{key}") for key, value in group.items() if key not in _IMPLEMENTATION}
        for group in optimizer.param_groups
    )
    return OptimizerSpec(name, groups)


def build_optimizer(spec: OptimizerSpec, groups: Sequence[Sequence[Tensor]], *, allow: Collection[str] = ()) -> Optimizer:
    """Build an optimizer with the hyperparameters of ``spec``. ``groups``: flat tensors for each of its parameter groups.

    ``allow`` names classes outside ``torch.optim`` (``module:Class``) that may be imported and built. Raises `TaskError` for a
    class that a server cannot run.
    """
    assert len(groups) == len(spec.groups), (len(groups), len(spec.groups))
    kind = _optimizer_class(spec.name, allow)
    accepted = inspect.signature(kind).parameters
    first = _hyperparameters(spec.groups[0])
    defaults = {key: value for key, value in first.items() if key in accepted}
    described = [{**_hyperparameters(group), "params": list(tensors)} for group, tensors in zip(spec.groups, groups, strict=True)]
    optimizer: Optimizer = kind(described, **defaults)
    return optimizer


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Value]]) -> None:
    """Give the parameter groups of a built optimizer the hyperparameters of a later ``OptimizerSpec.groups`` (of a schedule)."""
    assert len(groups) == len(optimizer.param_groups), (len(groups), len(optimizer.param_groups))
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        mine.update(_hyperparameters(theirs))


def require_state(optimizer: Optimizer, name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` unless ``state`` can be what the optimizer keeps for the parameter. For classes outside
    ``torch.optim`` it is not known what they keep."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__qualname__, None) is not kind or kind.__qualname__ in _NOT_ELEMENTWISE or not state:
        return
    missing = _keeps(optimizer, parameter) - state.keys()
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {min(missing)} of {name} for {kind.__qualname__}: it was written with another optimizer, or "
            "with settings that do not need it (another momentum, amsgrad, centered)"
        )
    for key, tensor in state.items():
        like = tensor.shape == parameter.shape and (tensor.dtype == parameter.dtype or key == "step")
        if not like and not (tensor.numel() == 1 and tensor.ndim == 0):
            raise CheckpointError(
                f"the checkpoint has {kind.__qualname__}'s {key} of {name} as {tensor.dtype} {list(tensor.shape)}, but the "
                f"parameter is {parameter.dtype} {list(parameter.shape)}: it was written with another model or optimizer"
            )


def _keeps(optimizer: Optimizer, parameter: Tensor) -> frozenset[str]:
    """The names of what the optimizer keeps for a parameter; empty if they cannot be determined."""
    spec = describe_optimizer(optimizer)
    owner = next((n for n, group in enumerate(optimizer.param_groups) if any(each is parameter for each in group["params"])), 0)
    return _keeps_with(spec.name, pack_value(dict(spec.groups[owner])), parameter.dtype)


@lru_cache(maxsize=64)
def _keeps_with(name: str, settings: bytes, dtype: torch.dtype) -> frozenset[str]:
    """The same for an optimizer with packed hyperparameters: determined by a step of a copy, once for all parameters."""
    tried = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    tried.grad = torch.zeros_like(tried)
    group: Any = unpack_value(settings)
    try:
        with generators_kept():
            like = build_optimizer(OptimizerSpec(name, (group,)), [[tried]])
            like.step()
    except (RuntimeError, TypeError, ValueError, TaskError):
        return frozenset()
    return frozenset(key for key, value in like.state.get(tried, {}).items() if value is not None)


def require_elementwise(spec: OptimizerSpec, *, allow: Collection[str] = ()) -> None:
    """Raise `TaskError` on the worker, before training, for an optimizer that the servers would refuse."""
    _optimizer_class(spec.name, allow)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether there are hooks that are called before or after the optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def require_no_step_hooks(optimizer: Optimizer) -> None:
    """Raise `TaskError` for hooks on the step of an optimizer that model servers run."""
    if has_step_hooks(optimizer):
        raise TaskError(
            'model servers run the optimizer, so hooks on its step would not be called: use [exchange] kind = "allreduce", '
            '"gossip" or "averaging"'
        )


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether it is known what a step does: update each parameter by its own gradient and state, without random draws. Of other
    classes, and of hooks, it is not known: they may count their calls, use a norm of all gradients, or draw noise."""
    kind = type(optimizer)
    return getattr(torch.optim, kind.__qualname__, None) is kind and not has_step_hooks(optimizer)


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The optimizer's step without what torch puts around it for its profiler, its compiler and for hooks, which takes as long as
    an update of some thousand elements. Call it where no gradients are recorded (`torch.no_grad`). Of other classes than torch's,
    their step as it is."""
    return MethodType(inspect.unwrap(type(optimizer).step), optimizer) if is_torchs_own(optimizer) else optimizer.step


def require_separable(optimizer: Optimizer) -> None:
    """Raise `TaskError` for an optimizer whose step needs the loss again."""
    if type(optimizer).__qualname__ in _NOT_SEPARABLE:
        raise TaskError(
            f"the task's optimizer is {type(optimizer).__qualname__}, which updates all parameters at once and calls the model "
            "itself (by a closure): use another one, or a loop of your own (docs/sessions.md)"
        )


def _optimizer_class(name: str, allow: Collection[str]) -> type[Any]:
    module, _, qualname = name.partition(":")
    if name not in allow:
        if module != "torch.optim" and not module.startswith("torch.optim."):
            raise TaskError(
                f"the task's optimizer is {name}, but model servers run only the optimizers of torch.optim. Use one of those, or "
                'an exchange in which the workers run the optimizer ([exchange] kind = "allreduce" or "averaging")'
            )
        if qualname in _NOT_ELEMENTWISE:
            raise TaskError(
                f"the task's optimizer is {qualname}, whose update needs whole tensors, but model servers hold flat pieces. Use "
                'another one, or an exchange in which the workers run it ([exchange] kind = "allreduce" or "averaging")'
            )
    found: object = getattr(import_module(module), qualname, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise TaskError(f"torch {torch.__version__} on this host has no optimizer {name}; install the same torch on all hosts")
    return found


def _hyperparameters(group: Mapping[str, Value]) -> dict[str, Any]:
    """Convert lists back to tuples (betas), which msgpack does not distinguish."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def _plain(value: object, where: str) -> Value:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        number: bool | int | float = value.item()
        return number
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    raise TaskError(f"the optimizer's hyperparameter {where} is {typed(value)}; it must be a number, string or list")
