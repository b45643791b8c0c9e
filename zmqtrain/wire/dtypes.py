"""Element types in messages: their names, sizes and counterparts in numpy and torch.

Names are torch's own, so ``getattr(torch, name)`` is the torch type. Elements are sent little-endian, as they are in memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

Kind = Literal["bool", "int", "float", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type that payloads may have."""

    name: str
    itemsize: int
    kind: Kind
    #: The numpy type of the elements; `uint8` with `raw` set if numpy has no such type.
    storage: np.dtype[Any]
    #: numpy has no such type: arrays hold bytes, `itemsize` of them for each element.
    raw: bool
    #: Whether numpy's arithmetic on the type is correct and fast (it is neither for 16-bit floats).
    numpy_arithmetic: bool


def _native(name: str, kind: Kind, *, arithmetic: bool = True) -> DType:
    storage = np.dtype(name)
    return DType(name, storage.itemsize, kind, storage, raw=False, numpy_arithmetic=arithmetic)


def _raw(name: str, itemsize: int) -> DType:
    return DType(name, itemsize, "float", np.dtype("uint8"), raw=True, numpy_arithmetic=False)


#: All element types that can be sent, by name.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        _native("float64", "float"),
        _native("float32", "float"),
        _native("float16", "float", arithmetic=False),
        _raw("bfloat16", 2),
        _raw("float8_e4m3fn", 1),
        _raw("float8_e5m2", 1),
        _native("int64", "int"),
        _native("int32", "int"),
        _native("int16", "int"),
        _native("int8", "int"),
        _native("uint64", "int"),
        _native("uint32", "int"),
        _native("uint16", "int"),
        _native("uint8", "int"),
        _native("bool", "bool"),
        _native("complex64", "complex"),
        _native("complex128", "complex"),
    )
}

_BY_NUMPY: dict[np.dtype[Any], DType] = {dtype.storage: dtype for dtype in DTYPES.values() if not dtype.raw}


def dtype_named(name: str) -> DType:
    """The element type called ``name``. Raises `ValueError` for one that cannot be sent."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"element type {name!r} cannot be sent; choose one of {', '.join(DTYPES)}") from None


def dtype_of_numpy(dtype: np.dtype[Any]) -> DType:
    """The element type of a numpy array. Raises `ValueError` for foreign byte order, objects, strings and records."""
    try:
        return _BY_NUMPY[dtype]
    except KeyError:
        raise ValueError(f"numpy dtype {dtype.str!r} cannot be sent; choose one of {', '.join(DTYPES)}") from None


@functools.cache
def dtype_of_torch(dtype: torch.dtype) -> DType:
    """The element type of a torch tensor. Raises `ValueError` for quantized and other types that cannot be sent."""
    return dtype_named(str(dtype).removeprefix("torch."))


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch type that messages call ``name``."""
    import torch

    found = getattr(torch, dtype_named(name).name)
    assert isinstance(found, torch.dtype)
    return found
