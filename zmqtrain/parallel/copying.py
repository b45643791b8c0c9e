"""Copies of a model that share nothing with it.

Python copies objects, but not functions: a hook that is a ``lambda`` has in the copy the modules, tensors and dictionaries of the
model that it was made for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

#: Where modules have hooks, by number.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def copied(model: nn.Module) -> nn.Module | None:
    """A model like it; ``None`` where there is none: tensors that have been computed cannot be copied, nor locks and the like, nor
    functions that refer to the model."""
    if refers_to_itself(model):
        return None
    with suppress(RuntimeError, TypeError, NotImplementedError):
        return copy.deepcopy(model)
    return None


def refers_to_itself(model: nn.Module) -> bool:
    """Whether a hook of a module, or a function in an attribute, has modules, tensors or containers of the model itself."""
    own = {id(each) for module in model.modules() for each in (module, *module._parameters.values(), *module._buffers.values())}
    own |= {
        id(each) for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor | list | dict | set)
    }
    own.discard(id(None))  # what is registered may be None
    seen: set[int] = set()
    functions = [function for module in model.modules() for function in _functions(module)]
    return any(_refers(each, own, seen) for each in functions)


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """Those that a copy of the module has as they are."""
    given = [*vars(module).values(), *(hook for name in _HOOKS for hook in vars(module).get(name, {}).values())]
    for each in given:
        while isinstance(each, partial):  # copied, but for the function
            each = each.func
        if isinstance(each, FunctionType):
            yield each


def _refers(value: Any, own: set[int], seen: set[int]) -> bool:
    """Whether a function, or what it has, is or has something of the model."""
    left = [value]
    while left:
        each = left.pop()
        if id(each) in own:
            return True
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            left += each.__defaults__ or ()
            left += (each.__kwdefaults__ or {}).values()
            for cell in each.__closure__ or ():
                with suppress(ValueError):  # an empty one
                    left.append(cell.cell_contents)
        elif isinstance(each, MethodType):
            left += each.__self__, each.__func__
        elif isinstance(each, partial):
            left += each.func, *each.args, *each.keywords.values()
        elif isinstance(each, tuple | list | set):
            left += each
        elif isinstance(each, dict):
            left += each.values()
    return False
