"""Which layer needs which buckets: forward hooks that take a bucket only when the forward reaches the layer.

Most layers are called, and a hook before the call takes the buckets of the layer's own parameters. But a parent may use a child's
weights without calling the child, as ``nn.MultiheadAttention`` does. The first forward, for which all parameters are present
anyway, shows which layers are called. The parameters of the others are taken by the nearest ancestor that is called, or at the
beginning; so are those that are read before their layer is called, as by a penalty that the model adds up itself. A layer's
parameters are taken before the layer's own hooks, which may compute weights from them (``torch.nn.utils.prune``).

Compiled code (``torch.compile(module)``, ``module.compile()``, ``torch.jit.script(module)``) stays whole: it gets no hooks inside,
which would break its graph, and its parameters are taken at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zmqtrain.train.hooks import OwnHook


class Layers:
    """Calls ``take(bucket)`` before a layer is called that uses the bucket's parameters. Everything runs in the compute thread."""

    def __init__(
        self, model: nn.Module, bucket_of: Mapping[int, int], take: Callable[[int], None], *, overlap: bool = True
    ) -> None:
        """``bucket_of``: the bucket of each parameter, by the parameter's ``id``. Without ``overlap`` all are taken at the
        beginning."""
        self._model, self._take = model, take
        self._needs = {
            name: sorted({bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of}, reverse=True)
            for name, module in model.named_modules()
        }
        self._called: set[str] = set()
        self._read_early: dict[str, str | None] = {}  # by layer: the nearest ancestor that had been called when it was read
        self._owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(name)
        self._compiled = _compiled(model)
        self._first: list[int] = sorted({bucket for needs in self._needs.values() for bucket in needs}, reverse=True)
        self._watches: list[RemovableHandle] = [
            module.register_forward_pre_hook(OwnHook(self._watch(name)), prepend=True)
            for name, module in model.named_modules()
            if overlap and name not in self._compiled
        ]
        self._takers: list[RemovableHandle] = []

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for hook in (*self._watches, *self._takers):
            hook.remove()
        self._watches, self._takers = [], []

    def watching(self) -> AbstractContextManager[object]:
        """A context for a forward: the first one is watched for parameters that are read before their layer is called. Compiled
        code is left alone, since it would be compiled for the watch."""
        return _Reads(self._on_read) if self._watches and not self._compiled else nullcontext()

    def begin_forward(self) -> None:
        """Take the buckets that no layer would take in time."""
        for bucket in self._first:
            self._take(bucket)

    def end_forward(self) -> None:
        """A forward has ended: after the first one, it is known which layers are called."""
        if not self._watches:
            return
        for watch in self._watches:
            watch.remove()
        self._watches = []
        first: set[int] = set()
        taken_by: dict[str, set[int]] = {}
        for name, needs in self._needs.items():
            if needs:
                early = name in self._read_early
                taker = None if name in self._compiled else self._read_early[name] if early else self._nearest_called(name)
                (first if taker is None else taken_by.setdefault(taker, set())).update(needs)
        modules = dict(self._model.named_modules())
        for name, buckets in taken_by.items():
            hook = OwnHook(self._taker(sorted(buckets, reverse=True)))
            self._takers.append(modules[name].register_forward_pre_hook(hook, prepend=True))
        self._first = sorted(first, reverse=True)

    def _nearest_called(self, name: str) -> str | None:
        while name not in self._called:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def _on_read(self, tensor: Tensor) -> None:
        owners = self._owners.get(id(tensor), ())
        if owners and self._called.isdisjoint(owners):
            for name in owners:
                self._read_early.setdefault(name, self._nearest_called(name))

    def _watch(self, name: str) -> Callable[[nn.Module, Any], None]:
        def watch(module: nn.Module, arguments: Any) -> None:
            self._called.add(name)

        return watch

    def _taker(self, buckets: list[int]) -> Callable[[nn.Module, Any], None]:
        def take(module: nn.Module, arguments: Any) -> None:
            with _outside_transforms():  # of `torch.func`, which would have the optimizer change what it captures
                for bucket in buckets:
                    self._take(bucket)

        return take


def _outside_transforms() -> AbstractContextManager[Any]:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _compiled(model: nn.Module) -> set[str]:
    """The names of all modules that may be called within compiled code, as far as the modules reveal it."""
    inside: set[int] = set()
    for module in model.modules():
        original = getattr(module, "_orig_mod", None)  # made by torch.compile(module), which calls its own hooks outside the graph
        if isinstance(original, nn.Module):
            inside.update(map(id, original.modules()))
        elif isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
            inside.update(map(id, module.modules()))
    return {name for name, module in model.named_modules() if id(module) in inside}


class _Reads(TorchFunctionMode):
    """Calls ``on_read`` with each tensor that a torch function is given, except by those that only look at its properties."""

    def __init__(self, on_read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) or getattr(func, "__name__", "") not in _PROPERTIES:
            for tensor in _tensors((*args, *kwargs.values())):
                self._on_read(tensor)
        return result


#: Names of what tells something about a tensor without reading its elements.
_PROPERTIES = frozenset({"__get__", "size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point"})


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
