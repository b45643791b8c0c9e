"""The elements with the largest magnitudes, with their indices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zmqtrain.errors import WireError
from zmqtrain.wire.compress.envelope import LARGEST_REDUCTION, CodecName, aligned, as_type, require_room
from zmqtrain.wire.dtypes import dtype_named, torch_dtype
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

_MAX_INDEX: Final = 2**31 - 1


class TopKCodec:
    """Implements `zmqtrain.wire.compress.codecs.Codec`: the share ``ratio`` of the elements is sent."""

    name: CodecName = "topk"

    def __init__(self, ratio: float, *, times: int = 1) -> None:
        """``times``: the factor on the number of elements that are sent. All are sent where indices would take more than zeros."""
        if not 1 / LARGEST_REDUCTION <= ratio <= 1:
            raise ValueError(f"top-k sends a share of {1 / LARGEST_REDUCTION:g} to 1 of the elements, not {ratio}")
        self.ratio, self._times = ratio, times

    def form(self, numel: int, dtype: str) -> tuple[str, int, dict[str, Value]] | None:
        if not numel or (self._times > 1 and 2 * self._count(numel) >= numel):
            return None
        if numel > _MAX_INDEX:
            raise ValueError(f"top-k indices have 32 bits: {numel} elements are too many for one payload")
        count = self._count(numel)
        return "uint8", count * (4 + dtype_named(dtype).itemsize), {"count": count}

    def pack(self, flat: torch.Tensor, dtype: str) -> torch.Tensor:
        """Indices (int32) and values of the largest elements, as uint8."""
        import torch

        flat = aligned(flat)
        flat = flat if flat.dtype == torch.float64 else flat.float()  # numpy does not know bfloat16
        indices = _largest(flat, self._count(flat.numel()))
        return torch.cat((indices.to(torch.int32).view(torch.uint8), as_type(flat[indices], dtype).view(torch.uint8)))

    def unpack(self, packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
        return _scattered(packed, dtype, numel, self._count(numel))

    def of_mean(self, count: int) -> TopKCodec:
        """All that is not zero in the mean, so that nothing is left out twice."""
        return TopKCodec(self.ratio, times=count)

    def _count(self, numel: int) -> int:
        return min(numel, self._times * math.ceil(numel * self.ratio))


def open_topk(payload: Payload, dtype: str, numel: int, count: Value, meta: Value) -> Payload:
    info = dtype_named(dtype)
    if type(count) is not int or not 0 < count <= numel <= min(count * LARGEST_REDUCTION, _MAX_INDEX):
        raise WireError(f"{payload!r} cannot be the largest {count!r:.40} of {numel} elements")
    if payload.dtype != "uint8" or payload.numel != count * (4 + info.itemsize):
        raise WireError(f"{payload!r} is not {count} indices and values of {dtype}")
    require_room(payload, dtype, numel)
    return payload.mapped(dtype, numel, lambda packed: _scattered(packed, dtype, numel, count), meta)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices, in ascending order, of the ``count`` elements with the largest magnitudes; those that are not finite come first."""
    import torch

    magnitudes = values.abs()
    if values.device.type != "cpu":
        return torch.topk(magnitudes, count, sorted=False).indices.sort().values
    sizes: np.ndarray[Any, Any] = magnitudes.numpy()
    rest = sizes.size - count
    selected = np.partition(sizes, rest)[rest:]  # ten times faster than torch.topk; NaN counts as largest
    if np.isnan(selected).any():
        np.nan_to_num(sizes, copy=False, nan=np.inf, posinf=np.inf)
        selected[np.isnan(selected)] = np.inf
    threshold = selected.min()
    indices = np.flatnonzero(sizes >= threshold)
    if indices.size > count:  # more elements equal the threshold than there is room for: take the first ones
        ties = np.flatnonzero(sizes == threshold)[count - indices.size :]
        indices = np.setdiff1d(indices, ties, assume_unique=True)
    return torch.from_numpy(indices)


def _scattered(packed: torch.Tensor, dtype: str, numel: int, count: int) -> torch.Tensor:
    """The ``numel`` elements of ``dtype`` of which ``packed`` (uint8) has ``count`` indices and values; the others are 0."""
    import torch

    info, packed = dtype_named(dtype), aligned(packed)
    indices = packed[: count * 4].view(torch.int32)
    if int(indices[0]) < 0 or int(indices[-1]) >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise WireError(f"the indices of a top-k payload are not in ascending order from 0 to below {numel}")
    values = packed[count * 4 :]
    if info.itemsize > 4 and count % 2:
        values = values.clone()  # the indices end at a multiple of 4 bytes, not necessarily of 8
    result = torch.zeros(numel, dtype=torch_dtype(dtype), device=packed.device)
    result[indices.long()] = values.view(result.dtype)
    return result
