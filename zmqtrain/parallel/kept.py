"""What a module keeps besides its parameters, buffers and modules: tensors in attributes, and in whatever these hold.

Attributes are looked into as far as they are Python: lists, tuples, sets, dictionaries, and objects with attributes of their own
(dataclasses, helpers, modules that are not registered), in one another.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

#: What modules have of torch: parameters, modules, hooks; and a recurrent layer's list of its parameters.
_TORCHS = frozenset(vars(nn.Module())) | {"_flat_weights"}
_SEQUENCES = (list, tuple, deque, set, frozenset)
#: Objects of these libraries are not looked into: loggers, threads, generators, arrays. They lead everywhere. Nor are those of this
#: package, which know a parameter by its identity (`zmqtrain.train.linear.WeightSlot`).
_CLOSED = sys.stdlib_module_names | {"torch", "numpy", "zmqtrain"}


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a module of a model keeps."""

    name: str
    """As one would write it: ``encoder.cache[0]['keys']``."""
    tensor: Tensor
    container: Any
    """Where it is: the innermost dictionary, list or deque, or an object, that can be given something else."""
    key: Any
    """In the container: what is there is the tensor, or a tuple that has it."""

    def replace(self, others: Mapping[int, Tensor]) -> None:
        """Keep other tensors there, by the ids of those that are found."""
        if isinstance(self.container, dict):
            there = self.key in self.container
        elif isinstance(self.container, list | deque):
            there = self.key < len(self.container)
        else:
            there = hasattr(self.container, self.key)
        if not there:
            return
        mine = isinstance(self.container, dict | list | deque)
        found = self.container[self.key] if mine else getattr(self.container, self.key)
        other = _replaced(found, others)
        if other is found:
            return
        if mine:
            self.container[self.key] = other
        else:
            object.__setattr__(self.container, self.key, other)  # a frozen dataclass, too


def kept_by(model: nn.Module) -> Iterator[Kept]:
    """All tensors that modules of a model keep besides torch's own places, in a fixed order; several times if at several places."""
    registered = {id(module) for module in model.modules()}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        seen = {id(module)} | registered
        for key, value in vars(module).items():
            if key not in _TORCHS and f"{key}_orig" not in module._parameters:  # what the old spectral_norm and pruning compute
                yield from _within(f"{prefix}.{key}" if prefix else key, value, vars(module), key, seen)


def links_of(model: nn.Module) -> list[Kept]:
    """All places where modules of a model keep its own parameters and buffers, but for those where torch has them."""
    own = {id(each) for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values())}
    return [kept for kept in kept_by(model) if id(kept.tensor) in own]


def _within(name: str, value: Any, container: Any, key: Any, seen: set[int]) -> Iterator[Kept]:
    """``value`` is what is in the ``container`` at ``key``, or in tuples there."""
    left = [(name, value, container, key)]
    while left:
        name, value, container, key = left.pop()
        if isinstance(value, Tensor):
            yield Kept(name, value, container, key)
        elif id(value) not in seen:
            inside = [
                (name + suffix, each, container if within is None else value, key if within is None else within)
                for suffix, each, within in _entries(value)
            ]
            if inside:
                seen.add(id(value))
                left += reversed(inside)


def _entries(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name's ending, what is there, and its key, which is ``None`` where nothing can be put in its place but by another
    ``value``."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each, key) for key, each in value.items())
    elif isinstance(value, _SEQUENCES):
        fixed = not isinstance(value, list | deque)
        yield from ((f"[{number}]", each, None if fixed else number) for number, each in enumerate(value))
    elif _is_open(value):
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        named = [*slots, *attributes]
        yield from ((f".{name}", getattr(value, name) if name in slots else attributes[name], name) for name in named)


def _is_open(value: Any) -> bool:
    """Whether an object's attributes are looked into."""
    closed = type(value).__module__.partition(".")[0] in _CLOSED or isinstance(value, type)
    return isinstance(value, nn.Module | SimpleNamespace) or not closed


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    return tuple(name for name in ((found,) if isinstance(found, str) else found) if not name.startswith("__"))


def _replaced(value: Any, others: Mapping[int, Tensor]) -> Any:
    """The same, or another tensor, or another tuple of tensors."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if not isinstance(value, tuple | set | frozenset):
        return value
    entries = [_replaced(each, others) for each in value]
    if all(one is other for one, other in zip(entries, value, strict=True)):
        return value
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
