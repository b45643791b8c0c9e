"""The state that a stream returns, as bytes for a checkpoint. No pickle: plain values, tensors and arrays only."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import torch

from zmqtrain.errors import CheckpointError
from zmqtrain.words import typed

#: A state is a position, not the data: a larger one, in bytes, is not kept.
LARGEST_BYTES = 16 << 20
_TUPLE, _ARRAY, _TENSOR, _LARGE = 1, 2, 3, 4
_KINDS = "biufc"


def pack_state(state: Any) -> bytes | None:
    """The state as bytes; ``None`` if it contains something that cannot be kept, or is too large."""
    try:
        packed: bytes = msgpack.packb(state, default=_extended, strict_types=True)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return packed if len(packed) <= LARGEST_BYTES else None


def unpack_state(packed: Any) -> Any:
    """Return the value that was given to `pack_state`. Raises `CheckpointError` for other bytes."""
    try:
        return msgpack.unpackb(packed, ext_hook=_restored, strict_map_key=False)
    except (TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise CheckpointError(f"the checkpoint's state of the data cannot be read ({error}): use an earlier checkpoint") from error


def _extended(value: Any) -> Any:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _packed(list(value)))
    if type(value) is int:  # beyond 64 bits, as in the states of numpy's generators
        return msgpack.ExtType(_LARGE, str(value).encode())
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.dtype is not torch.bfloat16:
        array = value.detach().numpy()
        return msgpack.ExtType(_TENSOR, _packed([array.dtype.str, list(array.shape), array.tobytes()]))
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if type(value) is np.ndarray and value.dtype.kind in _KINDS:
        return msgpack.ExtType(_ARRAY, _packed([value.dtype.str, list(value.shape), value.tobytes()]))
    raise TypeError(f"{typed(value)} cannot be stored")


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_extended, strict_types=True)
    return packed


def _restored(kind: int, data: bytes) -> Any:
    if kind == _LARGE:
        return int(data.decode())
    value = msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)
    if kind == _TUPLE:
        return tuple(value)
    dtype, shape, content = value
    if kind not in (_ARRAY, _TENSOR) or np.dtype(dtype).kind not in _KINDS:
        raise ValueError(f"there is no kind {kind} of {dtype}")
    array = np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
    return torch.from_numpy(array) if kind == _TENSOR else array
