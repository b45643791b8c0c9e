"""Tensors in nested structures: tuples, lists, mappings, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zmqtrain.errors import TaskError
from zmqtrain.words import typed

#: A single value of these types belongs to the whole batch; a list of them, as long as the batch, has one for each sample.
PLAIN = (str, bytes, bool, int, float, complex, np.number, np.bool_, type(None))


def mapped(part: Any, function: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The same structure with ``function`` applied to each tensor in it, and ``other`` to every other leaf."""
    if isinstance(part, Tensor):
        return function(part)
    children = _children(part)
    return other(part) if children is None else _rebuilt(part, [mapped(child, function, other) for child in children])


def leaves(part: Any) -> Iterator[Any]:
    """Yield the structure's leaves, tensors and others, in a fixed order."""
    children = None if isinstance(part, Tensor) else _children(part)
    if children is None:
        yield part
    else:
        for child in children:
            yield from leaves(child)


def moved(part: Any, device: torch.device) -> Any:
    """The structure in the device's memory: its tensors, and objects that have a method ``to``."""
    return mapped(part, lambda tensor: tensor.to(device, non_blocking=True), lambda leaf: _to(leaf, device))


def rows(part: Any, which: slice | list[int], samples: int, *, fields: bool = False, lenient: bool = False) -> Any:
    """Some samples of a structure that holds ``samples`` samples; tensors are views, of a slice.

    Tensors and arrays are divided along their first dimension, and so are lists with one entry per sample. Numbers and strings
    belong to the whole batch. Raises `TaskError` for anything else, of which it is not known what belongs to which sample.
    ``fields``: a tuple that might have one entry per sample has fields of all samples. ``lenient``: what is not known to be
    divided by samples stays whole.
    """
    if isinstance(part, PLAIN):
        return part
    if isinstance(part, Tensor | np.ndarray):
        if part.ndim and part.shape[0] != samples:
            if lenient:
                return part
            raise _uncertain(f"a {_kind(part)} of shape {list(part.shape)}", samples)
        return part[which] if part.ndim else part
    children = _children(part)
    if children is None:
        if lenient:
            return part
        raise _uncertain(typed(part), samples)
    if isinstance(part, tuple | list) and not hasattr(part, "_fields") and len(part) == samples:
        arrays = [leaf for leaf in leaves(part) if isinstance(leaf, Tensor | np.ndarray)]
        if not all(leaf.ndim and leaf.shape[0] == samples for leaf in arrays) or not arrays:
            return part[which] if isinstance(which, slice) else type(part)(part[each] for each in which)  # one entry per sample
        if samples > 1 and not (fields and isinstance(part, tuple)):
            raise _uncertain(f"{typed(part)} of {samples} entries, which may be one per sample, or fields of all samples", samples)
    return _rebuilt(part, [rows(child, which, samples, fields=fields, lenient=lenient) for child in children])


def _uncertain(what: str, samples: int) -> TaskError:
    return TaskError(
        f"a batch of {samples} samples must be divided ([compute] accumulate, or a grid that divides the model), but it contains "
        f"{what}: it is not known which part of it belongs to which sample. Let the collate function stack samples in the first "
        "dimension, or use neither accumulate nor a grid"
    )


def _kind(part: Tensor | np.ndarray[Any, Any]) -> str:
    return "tensor" if isinstance(part, Tensor) else "numpy array"


def _to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if not isinstance(leaf, PLAIN) and callable(getattr(leaf, "to", None)) else leaf


def _children(part: Any) -> list[Any] | None:
    """The direct children; ``None`` for a leaf, or an object with its own method ``to`` (packed sequences, graphs)."""
    if isinstance(part, Mapping):
        return list(part.values())
    if callable(getattr(part, "to", None)):
        return None
    if isinstance(part, tuple | list):
        return list(part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, field.name) for field in dataclasses.fields(part) if field.init]
    return None


def _rebuilt(part: Any, children: list[Any]) -> Any:
    """An object like ``part`` with other children."""
    if isinstance(part, Mapping):
        return _mapping(part, dict(zip(part, children, strict=True)))
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*children)
    if isinstance(part, tuple | list):
        return type(part)(children)
    names = [field.name for field in dataclasses.fields(part) if field.init]
    return dataclasses.replace(part, **dict(zip(names, children, strict=True)))


def _mapping(part: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(part) is dict or not isinstance(part, MutableMapping):
        return items
    alike = copy.copy(part)  # keeps what its class has besides the items
    for key, value in items.items():  # outputs of transformers' models have no update()
        alike[key] = value
    return alike
