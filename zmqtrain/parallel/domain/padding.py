"""Padding of strips: by a number, by the image mirrored at its edges, or by its edges repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import FIRST, pad
from zmqtrain.parallel.domain.layer import Block, DomainLayer
from zmqtrain.parallel.geometry import Reach, Table, Window


class Pad(nn.Module):
    """`torch.nn.functional.pad` as a module."""

    def __init__(self, ends: Sequence[int], mode: str, value: float) -> None:
        """``ends``: before and after, of the last dimension first; of all dimensions but samples and channels."""
        super().__init__()
        self.ends, self.mode, self.value = tuple(ends), mode, value

    def forward(self, image: Tensor) -> Tensor:
        return functional.pad(image, self.ends, self.mode, self.value if self.mode == "constant" else None)


class DomainPad(DomainLayer):
    """`Pad` on a strip of the image."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, Pad)
        if module.mode not in ("constant", "reflect", "replicate"):
            raise UsageError(f"{self.name}: padding with mode={module.mode!r} cannot be divided")
        self.axes = len(module.ends) // 2
        pairs = list(zip(module.ends[::2], module.ends[1::2], strict=True))
        self.ends = {FIRST + axis: pairs[self.axes - 1 - axis] for axis in range(self.axes)}
        self.mode, self.value = module.mode, module.value

    def reach(self, dim: int, rows: int) -> Reach:
        before, after = self.ends[dim]
        if self.mode == "constant":
            return Window(rows, 1, 1, before, after)
        if self.mode == "reflect" and max(before, after) >= rows:
            raise UsageError(f"{self.name}: an image of {rows} rows cannot be mirrored by {max(before, after)}")
        sources = [self._source(dim, row, rows) for row in range(max(0, rows + before + after))]
        return Table.of(rows, [(row, row + 1) for row in sources])

    def _source(self, dim: int, row: int, rows: int) -> int:
        """Which input row an output row is."""
        source = row - self.ends[dim][0]
        if self.mode == "replicate":
            return min(max(source, 0), rows - 1)
        return abs(source) if source < rows else 2 * (rows - 1) - source

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        others = {dim: ends for dim, ends in self.ends.items() if dim not in outputs}
        if self.mode == "constant":
            own = {dim: cast(Window, self.lines[dim].geometry).padding(each) for dim, each in outputs.items()}
            return pad(rows, own | others, self.value)
        result = rows
        for dim, (start, stop) in outputs.items():
            geometry = self.lines[dim].geometry
            first = geometry.needs((start, stop))[0]
            sources = [self._source(dim, row, geometry.length) - first for row in range(start, stop)]
            result = result.index_select(dim, torch.tensor(sources, dtype=torch.int64, device=rows.device))
        ends = [number for dim in reversed(self.ends) for number in others.get(dim, (0, 0))]
        return functional.pad(result, ends, self.mode) if any(ends) else result
