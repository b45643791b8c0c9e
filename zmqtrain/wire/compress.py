"""Compression of gradients on the wire.

A compressed payload is an ordinary payload whose ``meta`` is an envelope that says how to decompress it. So networks carry it like
any other, and `decompress` needs nothing but the message::

    sender    compressor.encode(key, payload)  ->  payload on the wire  ->  decompress(payload)    receiver

====== ====================================== ================================ =====================================
name   in the message                         size relative to float32         loss
====== ====================================== ================================ =====================================
none   the payload itself                     1                                nothing
fp16   float16                                1/2                              precision beyond 11 bits; saturates
bf16   bfloat16                               1/2                              precision beyond 8 bits
int8   float32 scale per block, int8 elements 1/4                              at most half a step of each block's scale
topk   int32 indices, their values            2 * ratio                        nothing in the end: the rest is sent later
====== ====================================== ================================ =====================================

Elements that are not finite stay so (int8 makes them NaN), since zeros would hide that a run diverges. Types that a codec cannot
shrink (integers, and float16 with fp16) pass unchanged. Phantoms shrink as tensors would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy as np

from zmqtrain.errors import WireError
from zmqtrain.wire.dtypes import DTYPES, dtype_named, torch_dtype
from zmqtrain.wire.limits import DEFAULT_LIMITS
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

CodecName = Literal["none", "fp16", "bf16", "int8", "topk"]
CODECS: Final[tuple[CodecName, ...]] = get_args(CodecName)

#: Elements that share a scale in int8: few enough that an outlier affects few others, enough that scales add only 0.4 %.
BLOCK: Final = 1024
#: Top-k sends at least one of this many elements, which limits how much memory a small message can make a receiver allocate.
LARGEST_REDUCTION: Final = 10_000
#: The code for "not finite" among int8 elements, which otherwise are -127 to 127.
_NOT_FINITE: Final = -128
#: The envelope of elements that a codec cannot shrink.
_RAW: Final = "raw"


class Compressor(Protocol):
    """A sender's side of a codec. What it keeps between steps (top-k only) belongs in checkpoints."""

    name: CodecName

    def encode(self, key: str, payload: Payload) -> Payload:
        """The payload to send for ``payload``. ``key`` identifies the stream of which it is one step: the same bucket or piece in
        each step, always of the same size. The result may alias ``payload`` (if nothing shrinks), which must not change until it is
        sent."""
        ...

    def decode(self, payload: Payload) -> Payload:
        """The flat payload that ``encode`` was given, with the sender's element type and ``meta``, as far as the codec preserves
        it.

        May alias what was received. Raises `WireError` for a payload that ``encode`` of this codec cannot have made.
        """
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What has not been sent yet, by key; empty for codecs that keep nothing. Tensors alias the compressor's own."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None: ...


def make_compressor(name: str, ratio: float = 0.01) -> Compressor:
    """The compressor called ``name``. ``ratio``: the share of elements that top-k sends. Raises `ValueError`."""
    match name:
        case "none":
            return NoCompressor()
        case "fp16" | "bf16" | "int8":
            return DenseCompressor(name)
        case "topk":
            return TopKCompressor(ratio)
    raise ValueError(f"there is no compression {name!r}; choose one of {', '.join(CODECS)}")


class NoCompressor:
    """Sends payloads unchanged."""

    name: CodecName = "none"

    def encode(self, key: str, payload: Payload) -> Payload:
        return payload

    def decode(self, payload: Payload) -> Payload:
        return payload

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        return None


class DenseCompressor:
    """fp16, bf16 and int8: every element is sent, in fewer bits. Nothing is kept between steps."""

    def __init__(self, name: Literal["fp16", "bf16", "int8"]) -> None:
        self.name: CodecName = name

    def encode(self, key: str, payload: Payload) -> Payload:
        if not _shrinks(self.name, payload.dtype):
            return _unchanged(payload)
        envelope = _envelope(self.name, payload)
        dtype, numel = _wire_form(self.name, payload.numel)
        return payload.mapped(dtype, numel, _to_int8 if self.name == "int8" else partial(_to_half, name=dtype), envelope)

    def decode(self, payload: Payload) -> Payload:
        return decompress(payload, self.name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        return None


class TopKCompressor:
    """Sends the share ``ratio`` of elements with the largest magnitudes; adds the others to those of the next step (error
    feedback).

    So over all steps, what was sent plus what is kept equals what was given. Needs memory for one residual per key (float32, or
    float64 for float64).
    """

    name: CodecName = "topk"

    def __init__(self, ratio: float) -> None:
        if not 1 / LARGEST_REDUCTION <= ratio <= 1:
            raise ValueError(f"top-k sends a share of {1 / LARGEST_REDUCTION:g} to 1 of the elements, not {ratio}")
        self.ratio = ratio
        self._residuals: dict[str, torch.Tensor] = {}

    def encode(self, key: str, payload: Payload) -> Payload:
        if not _shrinks(self.name, payload.dtype) or not payload.numel:
            return _unchanged(payload)
        if payload.numel > _MAX_INDEX:
            raise ValueError(f"top-k indices have 32 bits: {payload.numel} elements are too many for one payload")
        count = math.ceil(payload.numel * self.ratio)
        envelope = {**_envelope(self.name, payload), "count": count}
        nbytes = count * (4 + dtype_named(payload.dtype).itemsize)
        return payload.mapped("uint8", nbytes, lambda gradient: self._largest(key, gradient, payload.dtype, count), envelope)

    def _largest(self, key: str, gradient: torch.Tensor, dtype: str, count: int) -> torch.Tensor:
        """Indices (int32) and values of the ``count`` largest elements of residual and gradient, as uint8; keeps the rest."""
        import torch

        gradient = _aligned(gradient)
        residual = self._residuals.get(key)
        if residual is None:
            residual = self._residuals[key] = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        if residual.shape != gradient.shape:
            raise ValueError(f"{key!r} had {residual.numel()} elements before and has {gradient.numel()} now")
        residual.add_(gradient)
        indices = _largest(residual, count)
        exact = residual[indices]
        values = _to_half(exact, dtype) if gradient.itemsize == 2 else exact
        residual[indices] = (exact - values).nan_to_num_(0.0, 0.0, 0.0)  # keeps rounding errors; what is not finite was sent
        return torch.cat((indices.to(torch.int32).view(torch.uint8), values.view(torch.uint8)))

    def decode(self, payload: Payload) -> Payload:
        return decompress(payload, self.name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._residuals = {key: residual.clone() for key, residual in state.items()}


def decompress(payload: Payload, codec: str | None = None) -> Payload:
    """Undo a compressor's ``encode`` (of ``codec``, if given). Raises `WireError` if the payload is not the result of one."""
    envelope = payload.meta
    if type(envelope) is not dict or not envelope.keys() >= _ENVELOPE:
        raise WireError(f"{payload!r} is not compressed")
    name, dtype, numel, meta = (envelope[field] for field in ("codec", "dtype", "numel", "meta"))
    if type(name) is not str or (codec is not None and name not in (codec, _RAW)):
        raise WireError(f"{payload!r} is compressed with {name!r}, but {codec or 'a codec'} was expected")
    if type(dtype) is not str or dtype not in DTYPES or type(numel) is not int or numel < 0:
        raise WireError(f"{payload!r} stands for {numel!r:.40} elements of type {dtype!r:.40}")
    if name == _RAW:
        return _open_unchanged(payload, dtype, numel, meta)
    if not _shrinks(name, dtype):
        raise WireError(f"{payload!r} is compressed with {name!r} from {dtype!r}, which no codec does")
    if name == "topk":
        return _open_topk(payload, dtype, numel, envelope.get("count"), meta)
    if (payload.dtype, payload.numel) != _wire_form(name, numel):
        raise WireError(f"{payload!r} cannot be {numel} elements compressed with {name}")
    return payload.mapped(dtype, numel, partial(_from_int8 if name == "int8" else _from_half, numel=numel, dtype=dtype), meta)


_ENVELOPE: Final = frozenset({"codec", "dtype", "numel", "meta"})
_SHRINKS: Final = {
    "fp16": ("float64", "float32"),
    "bf16": ("float64", "float32"),
    "int8": ("float64", "float32", "float16", "bfloat16"),
    "topk": ("float64", "float32", "float16", "bfloat16"),
}
_HALVES: Final = {"fp16": "float16", "bf16": "bfloat16"}
_MAX_INDEX: Final = 2**31 - 1


def _envelope(name: str, payload: Payload) -> dict[str, Value]:
    return {"codec": name, "dtype": payload.dtype, "numel": payload.numel, "meta": payload.meta}


def _shrinks(name: str, dtype: str) -> bool:
    """Whether there is such a codec, and it shrinks elements of this type."""
    return name in _SHRINKS and dtype in _SHRINKS[name]


def _wire_form(name: str, numel: int) -> tuple[str, int]:
    """Element type and number of elements of a dense codec's result."""
    return ("uint8", numel + 4 * -(-numel // BLOCK)) if name == "int8" else (_HALVES[name], numel)


def _aligned(flat: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its memory is not aligned for types of several bytes."""
    return flat.clone() if flat.numel() and flat.data_ptr() % 4 else flat


def _unchanged(payload: Payload) -> Payload:
    if not payload.dtype:
        raise TypeError(f"{payload!r} has no elements to compress")
    return payload.part(0, payload.numel).with_meta(_envelope(_RAW, payload))


def _open_unchanged(payload: Payload, dtype: str, numel: int, meta: Value) -> Payload:
    if (payload.dtype, payload.numel) != (dtype, numel):
        raise WireError(f"{payload!r} is not {numel} elements of {dtype}, as it claims")
    return payload.part(0, numel).with_meta(meta)


def _to_half(flat: torch.Tensor, name: str) -> torch.Tensor:
    import torch

    half, flat = torch_dtype(name), _aligned(flat)
    result = flat.to(half)
    if flat.numel():
        low, high = torch.aminmax(flat)
        limit = torch.finfo(half).max
        if not (low >= -limit and high <= limit):  # rare: too large, infinite, or NaN
            result = torch.where(flat.isfinite(), flat.clamp(-limit, limit), flat).to(half)
    return result


def _to_int8(flat: torch.Tensor) -> torch.Tensor:
    import torch

    flat = _aligned(flat)
    numel = flat.numel()
    blocks = -(-numel // BLOCK)
    packed = torch.empty(blocks * 4 + numel, dtype=torch.uint8, device=flat.device)
    if not numel:
        return packed
    if flat.dtype != torch.float64:
        flat = flat.float()
    if numel % BLOCK:
        flat = torch.nn.functional.pad(flat, (0, blocks * BLOCK - numel))
    rows = flat.view(blocks, BLOCK)
    peaks = rows.abs().amax(1, keepdim=True)
    lost = None
    if not bool(peaks.isfinite().all()):  # rare: a run that diverges
        lost = ~rows.isfinite()
        rows = rows.masked_fill(lost, 0.0)
        peaks = rows.abs().amax(1, keepdim=True)
    largest = torch.finfo(torch.float32).max  # of the scale or, if elements have 32 bits, of 127 times the scale
    scales = (peaks / 127).clamp_max_(largest if flat.dtype == torch.float64 else largest / 127 * (1 - 1e-6)).to(torch.float32)
    scales.masked_fill_(scales == 0, 1.0)  # only zeros, or values so small that the scale itself is zero
    codes = (rows / scales).round_().clamp_(-127, 127).to(torch.int8)
    if lost is not None:
        codes.masked_fill_(lost, _NOT_FINITE)
    packed[: blocks * 4].view(torch.float32).copy_(scales.view(-1))
    packed[blocks * 4 :].copy_(codes.view(-1)[:numel].view(torch.uint8))
    return packed


def _from_half(packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
    assert packed.numel() == numel
    return _aligned(packed).to(torch_dtype(dtype))


def _from_int8(packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
    import torch

    packed, blocks = _aligned(packed), -(-numel // BLOCK)
    target = torch_dtype(dtype)
    if not numel:
        return torch.empty(0, dtype=target, device=packed.device)
    scales = packed[: blocks * 4].view(torch.float32)
    codes = packed[blocks * 4 :].view(torch.int8)
    result = codes.to(torch.float64 if target == torch.float64 else torch.float32)
    whole = numel - numel % BLOCK
    result[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK].unsqueeze(1))
    if whole != numel:
        result[whole:].mul_(scales[-1])
    if int(codes.min()) == _NOT_FINITE:
        result.masked_fill_(codes == _NOT_FINITE, math.nan)
    return _to_half(result, dtype) if target.itemsize == 2 else result


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


def _open_topk(payload: Payload, dtype: str, numel: int, count: Value, meta: Value) -> Payload:
    info = dtype_named(dtype)
    if type(count) is not int or not 0 < count <= numel <= min(count * LARGEST_REDUCTION, _MAX_INDEX):
        raise WireError(f"{payload!r} cannot be the largest {count!r:.40} of {numel} elements")
    if payload.dtype != "uint8" or payload.numel != count * (4 + info.itemsize):
        raise WireError(f"{payload!r} is not {count} indices and values of {dtype}")
    if numel * info.itemsize > DEFAULT_LIMITS.message_bytes:
        raise WireError(f"{payload!r} stands for {numel} elements, above the limit")
    return payload.mapped(dtype, numel, lambda packed: _scattered(packed, dtype, numel, count), meta)


def _scattered(packed: torch.Tensor, dtype: str, numel: int, count: int) -> torch.Tensor:
    """The ``numel`` elements of ``dtype`` of which ``packed`` (uint8) has ``count`` indices and values; the others are 0."""
    import torch

    info, packed = dtype_named(dtype), _aligned(packed)
    indices = packed[: count * 4].view(torch.int32)
    if int(indices[0]) < 0 or int(indices[-1]) >= numel or not bool((indices[1:] > indices[:-1]).all()):
        raise WireError(f"the indices of a top-k payload are not in ascending order from 0 to below {numel}")
    values = packed[count * 4 :]
    if info.itemsize > 4 and count % 2:
        values = values.clone()  # the indices end at a multiple of 4 bytes, not necessarily of 8
    result = torch.zeros(numel, dtype=torch_dtype(dtype), device=packed.device)
    result[indices.long()] = values.view(result.dtype)
    return result
