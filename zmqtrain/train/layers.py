"""Which layer needs which buckets: forward hooks that take a bucket only when the forward reaches the layer.

Most layers are called, and a hook before the call takes the buckets of the layer's own parameters. But a parent may use a child's
weights without calling the child, as ``nn.MultiheadAttention`` does. The first forward, for which all parameters are present
anyway, shows which layers are called. The parameters of the others are taken by the nearest ancestor that is called, or at the
beginning.

Compiled code (``torch.compile(module)``, ``module.compile()``) stays whole: it gets no hooks inside, which would break its graph,
and its parameters are taken at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zmqtrain.train.hooks import OwnHook


class Layers:
    """Calls ``take(bucket)`` before a layer is called that uses the bucket's parameters. Everything runs in the compute thread."""

    def __init__(self, model: nn.Module, bucket_of: Mapping[int, int], take: Callable[[int], None]) -> None:
        """``bucket_of``: the bucket of each parameter, by the parameter's ``id``."""
        self._model, self._take = model, take
        self._needs = {
            name: sorted({bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of}, reverse=True)
            for name, module in model.named_modules()
        }
        self._called: set[str] = set()
        self._compiled = _compiled(model)
        self._first: list[int] = sorted({bucket for needs in self._needs.values() for bucket in needs}, reverse=True)
        self._watches: list[RemovableHandle] = [
            module.register_forward_pre_hook(OwnHook(self._watch(name)))
            for name, module in model.named_modules()
            if name not in self._compiled
        ]
        self._takers: list[RemovableHandle] = []

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for hook in (*self._watches, *self._takers):
            hook.remove()
        self._watches, self._takers = [], []

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
                taker = None if name in self._compiled else self._nearest_called(name)
                (first if taker is None else taken_by.setdefault(taker, set())).update(needs)
        modules = dict(self._model.named_modules())
        for name, buckets in taken_by.items():
            hook = OwnHook(self._taker(sorted(buckets, reverse=True)))
            self._takers.append(modules[name].register_forward_pre_hook(hook))
        self._first = sorted(first, reverse=True)

    def _nearest_called(self, name: str) -> str | None:
        while name not in self._called:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def _watch(self, name: str) -> Callable[[nn.Module, Any], None]:
        def watch(module: nn.Module, arguments: Any) -> None:
            self._called.add(name)

        return watch

    def _taker(self, buckets: list[int]) -> Callable[[nn.Module, Any], None]:
        def take(module: nn.Module, arguments: Any) -> None:
            for bucket in buckets:
                self._take(bucket)

        return take


def _compiled(model: nn.Module) -> set[str]:
    """The names of all modules that may be called within compiled code, as far as the modules reveal it."""
    inside: set[int] = set()
    for module in model.modules():
        original = module._modules.get("_orig_mod")  # made by torch.compile(module), which calls its own hooks outside the graph
        if original is not None:
            inside.update(map(id, original.modules()))
        elif module._compiled_call_impl is not None:
            inside.update(map(id, module.modules()))
    return {name for name, module in model.named_modules() if id(module) in inside}
