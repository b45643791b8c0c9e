"""The graph of a model's forward, by `torch.fx`; and where it cannot be traced.

A forward is traced once, and the graph is computed in every step. So what a forward does besides calling torch on its inputs must
be in the graph, or the module that does it is not traced: random numbers, attributes that it changes, hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.unchanged import DrawnError, OnceOnlyError, unchanged

#: While it traces, torch.fx replaces methods of all modules of the process: workers that are threads of one take turns.
_TRACING = threading.Lock()
#: In `torch.fx.Node.meta`: the node is computed without gradients.
WITHOUT_GRADIENTS = "zmqtrain.without_gradients"


#: How often a forward is traced before it is said to draw: other roles' threads in the same process may have drawn meanwhile.
_DRAWS = 4


class _Tracer(fx.Tracer):
    """Stops at torch's own layers, and at modules that are to be left whole."""

    proxy_buffer_attributes = True  # what is computed from a buffer is not a constant: the buffer may change

    def __init__(self, whole: frozenset[str]) -> None:
        super().__init__()
        self._whole = whole
        self.thread = threading.get_ident()
        self._gradients = torch.is_grad_enabled()

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        hooked = bool(module._backward_hooks or module._backward_pre_hooks)  # which see tensors, but nothing that is traced
        return name in self._whole or hooked or super().is_leaf_module(module, name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if self._gradients and not torch.is_grad_enabled():
            node.meta[WITHOUT_GRADIENTS] = True
        return node

    # Modules that other threads call meanwhile come here, too, and are none of ours.

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
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
        return _graph(model, whole)
    except Exception as error:
        name, reason = _culprit(model, whole, error)
        where = f"its module {name!r} ({type(model.get_submodule(name)).__name__})" if name else "its forward"
        if isinstance(reason, OnceOnlyError):
            text = (
                f"{where} {reason}, which a graph of it would not do in every step. Do it in a module of its own within the "
                "model, which is not traced, or set merged_fc = false"
            )
        else:
            text = (
                f"torch.fx cannot trace {where}: {reason}. Branches and loops must not depend on values of tensors: rewrite it "
                "without, or put that into a module of its own within the model"
            )
        raise UsageError(text) from error


def _culprit(model: nn.Module, whole: frozenset[str], error: Exception) -> tuple[str, Exception]:
    """The innermost module that cannot be traced, and why."""
    for name, module in model.named_children():
        if name in whole or _is_layer(module):
            continue
        inner = frozenset(each.removeprefix(f"{name}.") for each in whole if each.startswith(f"{name}."))
        try:
            _graph(module, inner)
        except Exception as raised:  # noqa: BLE001 - whatever a forward does with values that are none
            found, reason = _culprit(module, inner, raised)
            return f"{name}.{found}" if found else name, reason
    return "", error


def _graph(module: nn.Module, whole: frozenset[str]) -> fx.Graph:
    """The graph of what the forward does with its inputs. Raises `OnceOnlyError` if it does anything else, which is undone."""
    if hooks := [name for name in _HOOKS if getattr(module, name)]:
        raise OnceOnlyError(f"is called with hooks of its own ({', '.join(name.strip('_') for name in hooks)})")
    for again in reversed(range(_DRAWS)):
        tracer = _Tracer(whole)
        try:
            with unchanged(module), _functions_in(tracer), _no_autocast(tracer), _Real(module):
                return tracer.trace(module)
        except DrawnError:
            if not again:
                raise
    raise AssertionError("unreachable")


#: Those of the module that is traced: its forward is traced, and not its call.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Real(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations that are carried out while a forward is traced, since none of their arguments follows from its inputs. Their
    results are constants of the graph."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        values = (value for each in module.modules() for value in vars(each).values())
        self._kept = {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise OnceOnlyError(f"draws random numbers ({func.overloadpacket.__name__}) that do not follow from its inputs")
        if func._schema.is_mutable:
            written = (value for value in args if isinstance(value, Tensor))
            if any(value.untyped_storage()._cdata in self._kept for value in written):
                raise OnceOnlyError("changes a tensor that a module keeps as an attribute")
        return func(*args, **(kwargs or {}))


@contextmanager
def _functions_in(tracer: _Tracer) -> Iterator[None]:
    """`torch.autograd.Function` calls are in the graph. (They would be traced into, and lose their backward.)"""
    original = vars(Function)["apply"]

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracer.thread or not any(isinstance(each, fx.Proxy) for each in args):
            return original.__get__(None, function)(*args, **kwargs)

        def call(*given: Any, **named: Any) -> Any:
            return function.apply(*given, **named)

        call.__name__ = function.__name__
        return tracer.create_proxy("call_function", call, args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _no_autocast(tracer: _Tracer) -> Iterator[None]:
    """A forward may not change the precision of some of its operations."""
    original = torch.autocast.__enter__

    def enter(context: torch.autocast) -> Any:
        if threading.get_ident() == tracer.thread:
            raise OnceOnlyError("uses torch.autocast")
        return original(context)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]


def _is_layer(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers, whose forward is no graph of others."""
    return type(module).__module__.startswith(torch.nn.__name__) and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )


def _one_layer() -> fx.Graph:
    raise UsageError("a single layer is not divided by itself: put it into an nn.Sequential")
