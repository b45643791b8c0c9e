"""PowerSGD for one worker alone, as model servers get it: each sends the factors of its own gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from zmqtrain.wire.compress.decompress import decompress
from zmqtrain.wire.compress.envelope import CodecName, as_type, envelope_of, shrinks, unchanged
from zmqtrain.wire.compress.factors import (
    LARGEST_RANK,
    Layout,
    Matrix,
    lefts_of,
    orthonormal,
    rights_of,
    unpacked_factors,
)
from zmqtrain.wire.compress.feedback import kept_of, with_kept
from zmqtrain.wire.payload import Payload

if TYPE_CHECKING:
    import torch

#: What the names of Q in a compressor's state end in.
RIGHTS: Final = "/q"


class PowerSgdCompressor:
    """Implements `zmqtrain.wire.compress.codecs.Compressor`. Needs memory for one residual per key (float32, or float64 for
    float64), and for Q."""

    name: CodecName = "powersgd"

    def __init__(self, rank: int) -> None:
        if not 1 <= rank <= LARGEST_RANK:
            raise ValueError(f"the rank of PowerSGD is 1 to {LARGEST_RANK}, not {rank}")
        self.rank = rank
        self._residuals: dict[str, torch.Tensor] = {}
        self._rights: dict[str, torch.Tensor] = {}

    def encode(self, key: str, payload: Payload, matrices: Sequence[Matrix] = ()) -> Payload:
        layout = Layout.of(payload.numel, self.rank, matrices)
        if not shrinks(self.name, payload.dtype) or not layout.matrices:
            return unchanged(payload)
        listed = [size for matrix in layout.matrices for size in (matrix.start, matrix.rows, matrix.columns)]
        envelope = {**envelope_of(self.name, payload), "rank": self.rank, "matrices": listed}
        numel = layout.rest_numel + layout.left_numel + layout.right_numel
        return payload.mapped(payload.dtype, numel, lambda gradient: self._packed(key, gradient, payload.dtype, layout), envelope)

    def _packed(self, key: str, gradient: torch.Tensor, dtype: str, layout: Layout) -> torch.Tensor:
        import torch

        whole = with_kept(self._residuals, key, gradient)
        first = layout.first_rights(key, whole)
        before = self._rights.get(key, first)
        lefts = orthonormal(layout, lefts_of(layout, whole, before))
        rights = rights_of(layout, whole, lefts)
        packed = as_type(torch.cat((*layout.rest_of(whole), lefts, rights)), dtype)
        self._rights[key] = layout.warm(rights, before, first)
        self._residuals[key] = kept_of(whole, unpacked_factors(packed, layout, dtype))
        return packed

    def decode(self, payload: Payload) -> Payload:
        return decompress(payload, self.name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._residuals | {f"{key}{RIGHTS}": rights for key, rights in self._rights.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._residuals = {key: kept.clone() for key, kept in state.items() if not key.endswith(RIGHTS)}
        self._rights = {key.removesuffix(RIGHTS): kept.clone() for key, kept in state.items() if key.endswith(RIGHTS)}

    def kept(self, key: str, numel: int, matrices: Sequence[Matrix] = ()) -> dict[str, int]:
        layout = Layout.of(numel, self.rank, matrices)
        return {key: numel, f"{key}{RIGHTS}": layout.right_numel} if layout.matrices else {}
