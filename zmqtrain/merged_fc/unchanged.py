"""What a forward changes besides its outputs, noticed and undone: a graph of it would do that once, and not in every step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from zmqtrain.data.draws import not_drawing

#: Containers that have more are data, and not what a forward counts in; to compare them would take longer than to trace.
_MOST = 4096


class OnceOnlyError(Exception):
    """A forward does something that its graph would not do in every step."""


class DrawnError(OnceOnlyError):
    """Somebody has drawn from Python's or numpy's random numbers meanwhile."""


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards modules are as they were, and so are the generators of random numbers.

    Raises `OnceOnlyError` where something that was there has become another one: a number, a string or a tensor that is an
    attribute of a module or of its class, or that lies in a list, a dictionary, a set or an object of the user's which is one.
    (What was ``None``, or is new, is a cache or a record.)
    """
    seen: set[int] = set()
    before = [each for module in model.modules() for each in _kept(module, seen)]
    with not_drawing():
        numbers = random.getstate(), np.random.get_state()
        try:
            yield
            changed = next((said for each in before if (said := each.change())), None)
        finally:
            drawn = random.getstate() != numbers[0] or not all(map(np.array_equal, np.random.get_state(), numbers[1]))
            if drawn:
                random.setstate(numbers[0])
                np.random.set_state(numbers[1])
            for each in before:
                each.put_back()
    if drawn:
        raise DrawnError("draws from Python's or numpy's random numbers")
    if changed is not None:
        raise OnceOnlyError(changed)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a container had."""

    container: Any
    had: Mapping[Any, Any]
    verb: str
    name: str
    """Of the attribute in which the container lies; empty if the container's own keys are the names."""

    def change(self) -> str | None:
        """What a forward has done to it, if it has."""
        now = _entries(self.container)
        key = next((key for key, value in self.had.items() if _other(value, now.get(key))), None)
        return None if key is None else f"{self.verb} {self.name or key!r}"

    def put_back(self) -> None:
        held = self.container
        if isinstance(held, type):
            for name, value in self.had.items():
                if vars(held).get(name) is not value:
                    setattr(held, name, value)
        elif isinstance(held, set):
            held.intersection_update(self.had)
            held.update(self.had)
        elif isinstance(held, list | deque):
            if [*map(id, held)] != [*map(id, self.had.values())]:  # tensors are not compared by their values
                held.clear()
                held.extend(self.had.values())
        else:
            now = _entries(held)
            for key in [key for key, value in now.items() if key not in self.had and isinstance(value, fx.Proxy)]:
                del now[key]
            now.update(self.had)


def _kept(module: nn.Module, seen: set[int]) -> Iterator[_Kept]:
    """The module's attributes and those of its class, and what lies in them; without what has been ``seen``."""
    yield _Kept(module._parameters, dict(module._parameters), "assigns the parameter", "")
    yield _Kept(module._buffers, dict(module._buffers), "assigns the buffer", "")
    classes = [kind for kind in type(module).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))]
    for holder in (module, *classes):
        if id(holder) not in seen:
            seen.add(id(holder))
            had = {name: each for name, each in _entries(holder).items() if not name.startswith("__") and name not in _APART}
            yield _Kept(holder, had, "changes the attribute", "")
            for name, value in had.items():
                yield from _inside(value, name, type(module).__module__, seen)


#: The parts of a module that `_kept` looks at by themselves.
_APART = ("_parameters", "_buffers", "_modules")


def _inside(value: Any, name: str, home: str, seen: set[int]) -> Iterator[_Kept]:
    """What ``value`` contains if it is a container that a forward may count in, and what lies in that."""
    if not _holds_values(value, home) or id(value) in seen:
        return
    entries = _entries(value)
    if len(entries) > _MOST:
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield _Kept(value, dict(entries), "changes the attribute", name)
    for each in list(entries.values()):
        yield from _inside(each, name, home, seen)


def _holds_values(value: Any, home: str) -> bool:
    """Whether it is a container, or an object of a class that was written in the Python module ``home``, beside the model's."""
    if isinstance(value, list | tuple | deque | set | dict | SimpleNamespace):
        return True
    return type(value).__module__ == home and hasattr(value, "__dict__") and not isinstance(value, nn.Module)


def _entries(container: Any) -> dict[Any, Any]:
    """What is in it, by its place, key or name."""
    if isinstance(container, list | tuple | deque):
        return dict(enumerate(container))
    if isinstance(container, set):
        return dict.fromkeys(container, True)
    if isinstance(container, dict):
        return container
    return dict(vars(container)) if isinstance(container, type) else vars(container)


def _other(before: Any, now: Any) -> bool:
    """Whether a value has become another one that a step would see."""
    if before is now:
        return False
    if isinstance(before, list | tuple | dict):  # another container: it may say the same
        if type(before) is not type(now) or len(before) > _MOST:
            return True
        inner = _entries(now)
        return any(_other(value, inner.get(key)) for key, value in _entries(before).items())
    if isinstance(before, Tensor):
        return True
    return isinstance(before, int | float | str) and (type(before) is not type(now) or before != now)
