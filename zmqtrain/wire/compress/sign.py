"""One bit for each element: its sign, times the mean magnitude of its block (EF-SignSGD; Karimireddy et al. 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from zmqtrain.errors import WireError
from zmqtrain.wire.compress.dense import DenseCodec
from zmqtrain.wire.compress.envelope import CodecName, aligned, as_type, blocks_of, require_room, times_scales
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch

#: Elements that share a scale: few enough that layers of unlike gradients rarely share one, enough that scales add only 3 %.
SIGN_BLOCK: Final = 1024


class SignCodec:
    """Implements `zmqtrain.wire.compress.codecs.Codec`.

    Only with error feedback does training converge: alone, the sign of a gradient may point the wrong way for ever. A block with an
    element that is not finite arrives as NaN, as a bit has no room for it."""

    name: CodecName = "sign"

    def form(self, numel: int, dtype: str) -> tuple[str, int, dict[str, Value]]:
        return "uint8", _wire_bytes(numel), {}

    def pack(self, flat: torch.Tensor, dtype: str) -> torch.Tensor:
        import torch

        numel = flat.numel()
        blocks = -(-numel // SIGN_BLOCK)
        packed = torch.empty(_wire_bytes(numel), dtype=torch.uint8, device=flat.device)
        if not numel:
            return packed
        rows = blocks_of(flat, SIGN_BLOCK)
        sums = rows.abs().sum(1, dtype=torch.float64)  # the sum of elements near the largest of 32 bits has no room in 32
        counts = torch.full_like(sums, SIGN_BLOCK)
        counts[-1] = numel - (blocks - 1) * SIGN_BLOCK
        scales = sums / counts
        if not bool(sums.isfinite().all()):  # rare: a run that diverges, or elements near the largest of 64 bits
            scales = (rows.abs() / counts.unsqueeze(1)).sum(1, dtype=torch.float64)
            scales.masked_fill_(~rows.isfinite().all(1), math.nan)
        scales = scales.clamp_max(torch.finfo(torch.float32).max)
        packed[: blocks * 4].view(torch.float32).copy_(scales)
        packed[blocks * 4 :].copy_(_bits(rows.view(-1)[:numel] >= 0))
        return packed

    def unpack(self, packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
        return _from_signs(packed, dtype, numel)

    def of_mean(self, count: int) -> DenseCodec:
        """8 bits, which tell the few values apart that the mean of signs has: a mean of one bit would lose most of it once more."""
        return DenseCodec("int8")


def open_sign(payload: Payload, dtype: str, numel: int, meta: Value) -> Payload:
    if payload.dtype != "uint8" or payload.numel != _wire_bytes(numel):
        raise WireError(f"{payload!r} cannot be {numel} elements compressed with sign")
    require_room(payload, dtype, numel)
    return payload.mapped(dtype, numel, lambda packed: _from_signs(packed, dtype, numel), meta)


def _wire_bytes(numel: int) -> int:
    return 4 * -(-numel // SIGN_BLOCK) + -(-numel // 8)


def _from_signs(packed: torch.Tensor, dtype: str, numel: int) -> torch.Tensor:
    import torch

    packed, blocks = aligned(packed), -(-numel // SIGN_BLOCK)
    if not numel:
        return torch.empty(0, dtype=torch_dtype(dtype), device=packed.device)
    positive = _from_bits(packed[blocks * 4 :], numel)
    result = positive.to(torch.float64 if dtype == "float64" else torch.float32).mul_(2).sub_(1)
    times_scales(result, packed[: blocks * 4].view(torch.float32).to(result.dtype), SIGN_BLOCK)
    return as_type(result, dtype)


def _bits(flags: torch.Tensor) -> torch.Tensor:
    """The flags, eight in a byte, the first one highest."""
    import torch

    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy()))
    whole = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(-1, 8).to(torch.int32)
    return (whole << _places(flags)).sum(1).to(torch.uint8)


def _from_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """The inverse of `_bits`, as zeros and ones."""
    import torch

    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel))
    return ((packed.to(torch.int32).unsqueeze(1) >> _places(packed)) & 1).view(-1)[:numel]


def _places(like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.arange(7, -1, -1, dtype=torch.int32, device=like.device)
