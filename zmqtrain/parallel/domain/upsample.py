"""Upsampling on strips: nearest, bilinear and bicubic, with aligned corners or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import sizes
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.geometry import Range, Table, length
from zmqtrain.parallel.halo import HEIGHT

#: Weights up to this are rounding, and no reason to fetch a row.
NOTHING = {torch.float32: 1e-6, torch.float64: 1e-13}
MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")


@dataclass(frozen=True, slots=True)
class _Taps:
    """Of which input rows each output row is made (outputs, taps), and with what weights; unused taps have weight 0."""

    rows: Tensor
    weights: Tensor

    def ranges(self) -> list[Range]:
        """The input rows of each output row."""
        used = self.weights != 0
        beyond = int(self.rows.max()) + 1
        first = torch.where(used, self.rows, beyond).amin(1)
        last = torch.where(used, self.rows, -1).amax(1) + 1
        return list(zip(first.tolist(), last.tolist(), strict=True))


class DomainUpsample(DomainLayer):
    """`torch.nn.Upsample` on a strip of the image."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Upsample)
        if module.mode not in MODES:
            raise UsageError(f"{self.name}: upsampling with mode={module.mode!r} cannot be divided; {', '.join(MODES)} can")
        self.mode, self.align_corners = module.mode, module.align_corners
        self.recompute = module.recompute_scale_factor
        size, scale = module.size, module.scale_factor
        self.size = (size, size) if isinstance(size, int) else size
        self.scale = (scale, scale) if isinstance(scale, int | float) else scale

    def reach(self, rows: int) -> Table:
        # Torch finds the source of an output row with the arithmetic of the image's type, and rounding decides now and then.
        self.taps = {dtype: self._taps(rows, dtype) for dtype in (torch.float32, torch.float64)}
        single, double = (taps.ranges() for taps in self.taps.values())
        return Table.of(rows, [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(single, double, strict=True)])

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        taps = self.taps[torch.float64 if rows.dtype == torch.float64 else torch.float32]
        first = self.geometry.needs(outputs)[0]
        sources = (taps.rows[slice(*outputs)] - first).clamp(0, rows.shape[self.dim] - 1).to(rows.device)
        shares = taps.weights[slice(*outputs)].to(rows)
        result: Tensor | None = None
        for source, share in zip(sources.unbind(1), shares.unbind(1), strict=True):
            part = rows.index_select(self.dim, source)
            if shares.shape[1] > 1:  # nearest copies
                part = part * (share[:, None] if self.dim == HEIGHT else share)
            result = part if result is None else result + part
        assert result is not None
        return self._interpolate(result, 1 - (self.dim - HEIGHT), length(outputs))

    def _interpolate(self, image: Tensor, axis: int, other: int) -> Tensor:
        """Upsample along one axis only; ``other`` is the image's size along the other one."""
        return functional.interpolate(
            image,
            size=None if self.size is None else sizes(axis, self.size[axis], other),
            scale_factor=None if self.scale is None else ((self.scale[axis], 1.0) if axis == 0 else (1.0, self.scale[axis])),
            mode=self.mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute,
        )

    def _taps(self, rows: int, dtype: torch.dtype) -> _Taps:
        """What torch makes of each input row alone: it is upsampled as the column of a unit matrix."""
        unit = torch.eye(rows, dtype=dtype)
        axis = self.dim - HEIGHT
        matrix = self._interpolate(unit[None, None], axis, rows)[0, 0]
        if axis == 1:
            matrix = matrix.T
        matrix = torch.where(matrix.abs() > NOTHING[dtype], matrix, 0)
        used = matrix != 0
        # The taps of a row are its largest weights; the number of taps is that of the row that has most.
        found = used.to(torch.int8).topk(int(used.sum(1).max()), 1).indices.sort(1).values
        return _Taps(found, matrix.gather(1, found))
