"""fp16, bf16 and int8: every element is sent, in fewer bits."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from zmqtrain.errors import WireError
from zmqtrain.wire.compress.envelope import CodecName, aligned, as_type, blocks_of, times_scales, to_half
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

#: Elements that share a scale in int8: few enough that an outlier affects few others, enough that scales add only 0.4 %.
BLOCK: Final = 1024
#: The code for "not finite" among int8 elements, which otherwise are -127 to 127.
_NOT_FINITE: Final = -128
_HALVES: Final = {"fp16": "float16", "bf16": "bfloat16"}


class DenseCodec:
    """Implements `zmqtrain.wire.compress.codecs.Codec`."""

    def __init__(self, name: Literal["fp16", "bf16", "int8"]) -> None:
        self.name: CodecName = name

    def form(self, numel: int, dtype: str) -> tuple[str, int, dict[str, Value]]:
        return (*_wire_form(self.name, numel), {})

    def pack(self, flat: torch.Tensor, dtype: str) -> torch.Tensor:
        return _to_int8(flat) if self.name == "int8" else to_half(flat, _HALVES[self.name])

    def unpack(self, packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
        return (_from_int8 if self.name == "int8" else _from_half)(packed, numel, dtype)

    def of_mean(self, count: int) -> DenseCodec:
        return self


def open_dense(name: str, payload: Payload, dtype: str, numel: int, meta: Value) -> Payload:
    if (payload.dtype, payload.numel) != _wire_form(name, numel):
        raise WireError(f"{payload!r} cannot be {numel} elements compressed with {name}")
    return payload.mapped(dtype, numel, partial(_from_int8 if name == "int8" else _from_half, numel=numel, dtype=dtype), meta)


def _wire_form(name: str, numel: int) -> tuple[str, int]:
    """Element type and number of elements of the result."""
    return ("uint8", numel + 4 * -(-numel // BLOCK)) if name == "int8" else (_HALVES[name], numel)


def _to_int8(flat: torch.Tensor) -> torch.Tensor:
    import torch

    numel = flat.numel()
    blocks = -(-numel // BLOCK)
    packed = torch.empty(blocks * 4 + numel, dtype=torch.uint8, device=flat.device)
    if not numel:
        return packed
    rows = blocks_of(flat, BLOCK)
    peaks = rows.abs().amax(1, keepdim=True)
    lost = None
    if not bool(peaks.isfinite().all()):  # rare: a run that diverges
        lost = ~rows.isfinite()
        rows = rows.masked_fill(lost, 0.0)
        peaks = rows.abs().amax(1, keepdim=True)
    largest = torch.finfo(torch.float32).max  # of the scale or, if elements have 32 bits, of 127 times the scale
    scales = (peaks / 127).clamp_max_(largest if rows.dtype == torch.float64 else largest / 127 * (1 - 1e-6)).to(torch.float32)
    scales.masked_fill_(scales == 0, 1.0)  # only zeros, or values so small that the scale itself is zero
    codes = (rows / scales).round_().clamp_(-127, 127).to(torch.int8)
    if lost is not None:
        codes.masked_fill_(lost, _NOT_FINITE)
    packed[: blocks * 4].view(torch.float32).copy_(scales.view(-1))
    packed[blocks * 4 :].copy_(codes.view(-1)[:numel].view(torch.uint8))
    return packed


def _from_half(packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
    assert packed.numel() == numel
    return aligned(packed).to(torch_dtype(dtype))


def _from_int8(packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
    import torch

    packed, blocks = aligned(packed), -(-numel // BLOCK)
    target = torch_dtype(dtype)
    if not numel:
        return torch.empty(0, dtype=target, device=packed.device)
    scales = packed[: blocks * 4].view(torch.float32)
    codes = packed[blocks * 4 :].view(torch.int8)
    result = codes.to(torch.float64 if target == torch.float64 else torch.float32)
    times_scales(result, scales, BLOCK)
    if int(codes.min()) == _NOT_FINITE:
        result.masked_fill_(codes == _NOT_FINITE, math.nan)
    return as_type(result, dtype)
