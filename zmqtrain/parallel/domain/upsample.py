"""Resizing on strips: nearest, linear, bicubic and area, with aligned corners or not, antialiased or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import FIRST, along
from zmqtrain.parallel.domain.layer import Block, DomainLayer
from zmqtrain.parallel.geometry import Range, Table

#: Weights up to this are rounding, and no reason to fetch a row.
NOTHING = {torch.float32: 1e-6, torch.float64: 1e-13}
MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area")

#: Spatial dimensions of images that a mode is for, if not any.
_AXES = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


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


class Resize(nn.Upsample):
    """`torch.nn.functional.interpolate` as a module."""

    antialias: bool

    def __init__(self, *, antialias: bool, **given: Any) -> None:
        super().__init__(**given)
        self.given, self.antialias = given, antialias

    def forward(self, image: Tensor) -> Tensor:
        return functional.interpolate(image, **self.given, antialias=self.antialias)


class DomainUpsample(DomainLayer):
    """`torch.nn.Upsample` on a strip of the image, or `Resize`."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Upsample)
        if module.mode not in MODES:
            raise UsageError(f"{self.name}: upsampling with mode={module.mode!r} cannot be divided; {', '.join(MODES)} can")
        self.mode, self.align_corners = module.mode, module.align_corners
        self.recompute = module.recompute_scale_factor
        size, scale = module.size, module.scale_factor
        self.antialias = getattr(module, "antialias", False)
        self.size: Any = size
        self.scale: Any = scale
        self.taps: dict[tuple[int, torch.dtype], _Taps] = {}

    def reach(self, dim: int, rows: int) -> Table:
        # Torch finds the source of an output row with the arithmetic of the image's type, and rounding decides now and then.
        for dtype in (torch.float32, torch.float64):
            self.taps[dim, dtype] = self._taps(dim, rows, dtype)
        single, double = (self.taps[dim, dtype].ranges() for dtype in (torch.float32, torch.float64))
        return Table.of(rows, [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(single, double, strict=True)])

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        result = rows
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        for dim, each in outputs.items():
            result = self._along(result, dim, self.taps[dim, dtype], each, self.lines[dim].geometry.needs(each)[0])
        others = [dim for dim in range(FIRST, rows.dim()) if dim not in outputs]
        if not self.antialias:
            return self._interpolate(result, others)
        for dim in others:  # a strip may be one column wide, and antialiased resizing of such an image is wrong in torch
            taps = self._taps(dim, rows.shape[dim], dtype)
            result = self._along(result, dim, taps, (0, len(taps.rows)), 0)
        return result

    def _along(self, rows: Tensor, dim: int, taps: _Taps, outputs: Range, first: int) -> Tensor:
        """Resized along one dimension; ``first``: which of the image's rows is the first one here."""
        sources = (taps.rows[slice(*outputs)] - first).clamp(0, rows.shape[dim] - 1).to(rows.device)
        shares = taps.weights[slice(*outputs)].to(rows)
        result: Tensor | None = None
        for source, share in zip(sources.unbind(1), shares.unbind(1), strict=True):
            part = rows.index_select(dim, source)
            if shares.shape[1] > 1:  # nearest copies
                part = part * along(share, dim, rows.dim())
            result = part if result is None else result + part
        assert result is not None
        return result

    def _interpolate(self, image: Tensor, dims: Sequence[int]) -> Tensor:
        """Resize along some dimensions only."""
        if not dims:
            return image
        axes = range(FIRST, image.dim())
        size, scale = self.size, self.scale
        if size is not None:
            wanted = [size] * len(axes) if isinstance(size, int) else size
            size = [each if dim in dims else image.shape[dim] for dim, each in zip(axes, wanted, strict=True)]
        else:
            wanted = [scale] * len(axes) if isinstance(scale, int | float) else scale
            scale = [each if dim in dims else 1.0 for dim, each in zip(axes, wanted, strict=True)]
        return functional.interpolate(
            image,
            size=size,
            scale_factor=scale,
            mode=self.mode,
            align_corners=self.align_corners,
            recompute_scale_factor=self.recompute,
            antialias=self.antialias,
        )

    def _taps(self, dim: int, rows: int, dtype: torch.dtype) -> _Taps:
        """What torch makes of each input row alone: it is resized as the column of a unit matrix."""
        given = self.scale if self.size is None else self.size
        axes = _AXES.get(self.mode) or (max(dim - FIRST + 1, 2) if isinstance(given, int | float) else len(given))
        shape, column = [1] * (axes + FIRST), 1 if axes == 1 else FIRST + (dim == FIRST)
        shape[dim] = shape[column] = rows
        resized = self._interpolate(torch.eye(rows, dtype=dtype).reshape(shape), [dim])
        matrix = resized.movedim((dim, column), (0, 1)).reshape(-1, rows)
        matrix = torch.where(matrix.abs() > NOTHING[dtype], matrix, 0)
        used = matrix != 0
        # The taps of a row are its largest weights; the number of taps is that of the row that has most.
        found = used.to(torch.int8).topk(int(used.sum(1).max()), 1).indices.sort(1).values
        return _Taps(found, matrix.gather(1, found))
