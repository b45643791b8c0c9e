"""The graph of a model's forward, by `torch.fx`; and where it cannot be traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from zmqtrain.errors import UsageError

#: While it traces, torch.fx replaces methods of all modules of the process: workers that are threads of one take turns.
_TRACING = threading.Lock()


class _Tracer(fx.Tracer):
    """Stops at torch's own layers, and at modules that are to be left whole."""

    def __init__(self, whole: frozenset[str]) -> None:
        super().__init__()
        self._whole = whole
        self._thread = threading.get_ident()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name in self._whole or super().is_leaf_module(module, name)

    # Modules that other threads call meanwhile come here, too, and are none of ours.

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def traced(model: nn.Module, whole: Iterable[str] = ()) -> fx.Graph:
    """The graph of ``model.forward``; modules in ``whole`` are calls in it.

    Raises `UsageError` that names the innermost module which cannot be traced, and says what to do.
    """
    if _is_layer(model):
        return _one_layer()
    with _TRACING:
        return _traced(model, frozenset(whole))


def _traced(model: nn.Module, whole: frozenset[str]) -> fx.Graph:
    try:
        return _Tracer(whole).trace(model)
    except Exception as error:
        name, reason = _culprit(model, whole, error)
        where = f"its module {name!r} ({type(model.get_submodule(name)).__name__})" if name else "its forward"
        raise UsageError(
            f"torch.fx cannot trace {where}: {reason}. Branches and loops must not depend on values of tensors: rewrite it without"
        ) from error


def _culprit(model: nn.Module, whole: frozenset[str], error: Exception) -> tuple[str, Exception]:
    """The innermost module that cannot be traced, and why."""
    for name, module in model.named_children():
        if name in whole or _is_layer(module):
            continue
        inner = frozenset(each.removeprefix(f"{name}.") for each in whole if each.startswith(f"{name}."))
        try:
            _Tracer(inner).trace(module)
        except Exception as raised:  # noqa: BLE001 - whatever a forward does with values that are none
            found, reason = _culprit(module, inner, raised)
            return f"{name}.{found}" if found else name, reason
    return "", error


def _is_layer(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers, whose forward is no graph of others."""
    return type(module).__module__.startswith(torch.nn.__name__) and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )


def _one_layer() -> fx.Graph:
    raise UsageError("a single layer is not divided by itself: put it into an nn.Sequential")
