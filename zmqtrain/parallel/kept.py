"""What a module keeps besides its parameters, buffers and modules: tensors in attributes, and in whatever these hold.

Attributes, and hooks of forwards, are looked into as far as they are Python: lists, tuples, sets, dictionaries, objects with
attributes of their own (dataclasses, helpers, modules that are not registered), and functions with what they have been given
(`functools.partial`, methods, defaults, variables of the function around them), in one another.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

#: What modules have of torch: parameters, modules, hooks; and a recurrent layer's list of its parameters.
_TORCHS = (frozenset(vars(nn.Module())) | {"_flat_weights"}) - {"_forward_hooks", "_forward_pre_hooks"}
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
        container, key = self.container, self.key
        if isinstance(container, list | deque):
            there = key < len(container)
        else:
            there = key in container if isinstance(container, dict) else hasattr(container, key)
        if not there:
            return
        items = isinstance(container, dict | list | deque)
        found = container[key] if items else getattr(container, key)
        other = _replaced(found, others)
        if other is found:
            return
        if items:
            container[key] = other
        elif isinstance(container, partial):
            container.__setstate__((container.func, other, container.keywords, vars(container)))  # type: ignore[attr-defined]
        else:
            object.__setattr__(container, key, other)  # a frozen dataclass, too


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
                for suffix, each, within in entries(value)
            ]
            if inside:
                seen.add(id(value))
                left += reversed(inside)


def entries(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """What an object holds: the name's ending, what is there, and its key, which is ``None`` where nothing can be put in its place
    but by another ``value``."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each, key) for key, each in value.items())
    elif isinstance(value, _SEQUENCES):
        fixed = not isinstance(value, list | deque)
        yield from ((f"[{number}]", each, None if fixed else number) for number, each in enumerate(value))
    elif isinstance(value, partial):
        yield from ((f".{name}", getattr(value, name), name) for name in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield from ((f".{name}", getattr(value, name), name) for name in ("__self__", "__func__"))
    elif isinstance(value, FunctionType):
        if _is_persons(value.__module__ or ""):
            yield from ((f".{name}", getattr(value, name), name) for name in ("__defaults__", "__kwdefaults__"))
            names = value.__code__.co_freevars
            yield from ((f".<{name}>", cell, None) for name, cell in zip(names, value.__closure__ or (), strict=True))
    elif isinstance(value, CellType):
        with suppress(ValueError):  # an empty one
            yield "", value.cell_contents, "cell_contents"
    elif _is_open(value):
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        named = [*slots, *attributes]
        yield from ((f".{name}", getattr(value, name) if name in slots else attributes[name], name) for name in named)


def _is_open(value: Any) -> bool:
    """Whether an object's attributes are looked into."""
    if isinstance(value, nn.Module | SimpleNamespace):
        return True
    return _is_persons(type(value).__module__) and not isinstance(value, type)


def _is_persons(module: str) -> bool:
    """Whether what is of this module of Python is not of a library that is left alone."""
    return module.partition(".")[0] not in _CLOSED


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
