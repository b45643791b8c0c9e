"""Copies of a model that share nothing with it.

Python copies objects, but not functions: a hook that is a ``lambda`` has in the copy the modules, tensors and dictionaries of the
model that it was made for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from zmqtrain.parallel.kept import entries

#: Why a model has no copy of its own.
ITSELF = (
    "a hook, or a function that it keeps, refers to its modules or tensors, and a copy of it would use these (write it as a method)"
)


def copied(model: nn.Module) -> nn.Module | None:
    """A model like it; ``None`` where there is none: tensors that have been computed cannot be copied, nor locks and the like, nor
    functions that refer to the model."""
    if refers_to_itself(model):
        return None
    with suppress(RuntimeError, TypeError, NotImplementedError):
        return copy.deepcopy(model)
    return None


def refers_to_itself(model: nn.Module) -> bool:
    """Whether a hook of a module, or a function in what it keeps, has modules, tensors or containers of the model itself."""
    own = {id(each) for module in model.modules() for each in (module, *module._parameters.values(), *module._buffers.values())}
    own |= {
        id(each) for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor | list | dict | set)
    }
    own.discard(id(None))  # what is registered may be None
    seen: set[int] = set()
    functions = [function for module in model.modules() for function in _functions(module)]
    return any(_refers(each, own, seen) for each in functions)


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """Those that a copy of the module has as they are, wherever Python code may have put them."""
    left: list[Any] = list(vars(module).values())
    seen: set[int] = set()
    while left:
        each = left.pop()
        if isinstance(each, FunctionType):
            yield each
        elif id(each) not in seen and not isinstance(each, nn.Module):
            seen.add(id(each))
            left += (held for _, held, _ in entries(each))


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
        else:
            left += (held for _, held, _ in entries(each))
    return False
