"""What all codecs share: the envelope of a compressed payload, and elements that travel as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

from zmqtrain.errors import WireError
from zmqtrain.wire.dtypes import dtype_named, torch_dtype
from zmqtrain.wire.limits import DEFAULT_LIMITS
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

CodecName = Literal["none", "fp16", "bf16", "int8", "sign", "topk", "powersgd"]
CODECS: Final[tuple[CodecName, ...]] = get_args(CodecName)

#: A message stands for at most this many times its own elements, which limits how much memory a small one can make a receiver
#: allocate. Top-k sends at least one element in this many.
LARGEST_REDUCTION: Final = 10_000
#: The fields that every envelope has.
ENVELOPE: Final = frozenset({"codec", "dtype", "numel", "meta"})
#: The codec of elements that none can shrink.
RAW: Final = "raw"
_FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
_SHRINKS: Final = {
    "fp16": ("float64", "float32"),
    "bf16": ("float64", "float32"),
    "int8": _FLOATS,
    "sign": _FLOATS,
    "topk": _FLOATS,
    "powersgd": _FLOATS,
}


def shrinks(name: str, dtype: str) -> bool:
    """Whether there is such a codec, and it shrinks elements of this type."""
    return dtype in _SHRINKS.get(name, ())


def envelope_of(name: str, payload: Payload) -> dict[str, Value]:
    return {"codec": name, "dtype": payload.dtype, "numel": payload.numel, "meta": payload.meta}


def unchanged(payload: Payload) -> Payload:
    """The payload in an envelope. Raises `TypeError` if it has no elements."""
    if not payload.dtype:
        raise TypeError(f"{payload!r} has no elements to compress")
    return payload.part(0, payload.numel).with_meta(envelope_of(RAW, payload))


def open_unchanged(payload: Payload, dtype: str, numel: int, meta: Value) -> Payload:
    if (payload.dtype, payload.numel) != (dtype, numel):
        raise WireError(f"{payload!r} is not {numel} elements of {dtype}, as it claims")
    return payload.part(0, numel).with_meta(meta)


def require_room(payload: Payload, dtype: str, numel: int) -> None:
    """Raise `WireError` if ``payload`` stands for more than any message may have."""
    if numel * dtype_named(dtype).itemsize > DEFAULT_LIMITS.message_bytes:
        raise WireError(f"{payload!r} stands for {numel} elements, above the limit")


def aligned(flat: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its memory is not aligned for types of several bytes."""
    return flat.clone() if flat.numel() and flat.data_ptr() % 4 else flat


def to_half(flat: torch.Tensor, name: str) -> torch.Tensor:
    """The elements as ``name``, a type of two bytes. What is too large for it saturates; what is not finite stays so."""
    import torch

    half, flat = torch_dtype(name), aligned(flat)
    result = flat.to(half)
    if flat.numel():
        low, high = torch.aminmax(flat)
        limit = torch.finfo(half).max
        if not (low >= -limit and high <= limit):  # rare: too large, infinite, or NaN
            result = torch.where(flat.isfinite(), flat.clamp(-limit, limit), flat).to(half)
    return result


def as_type(flat: torch.Tensor, name: str) -> torch.Tensor:
    """The elements as ``name``, any float type; types of two bytes saturate."""
    return to_half(flat, name) if dtype_named(name).itemsize == 2 else flat.to(torch_dtype(name))


def blocks_of(flat: torch.Tensor, block: int) -> torch.Tensor:
    """The elements (at least one) as rows of ``block``, in single precision at least; the last row is filled up with zeros."""
    import torch

    flat = aligned(flat)
    if flat.dtype != torch.float64:
        flat = flat.float()
    if flat.numel() % block:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % block))
    return flat.view(-1, block)


def times_scales(signed: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiply each row of ``block`` elements (the last one may be shorter) by its scale, in place."""
    whole = signed.numel() - signed.numel() % block
    signed[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
    if whole != signed.numel():
        signed[whole:].mul_(scales[-1])
