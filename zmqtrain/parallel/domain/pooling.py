"""Max and average pooling on strips: any kernel, stride and padding, with torch's rules for windows that stand out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import FIRST, along, each, pad
from zmqtrain.parallel.domain.layer import Block, DomainLayer
from zmqtrain.parallel.geometry import Window

_MAX: dict[int, Callable[..., Tensor]] = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVERAGE: dict[int, Callable[..., Tensor]] = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


class _Pool(DomainLayer):
    """What both have in common."""

    def configure(self, module: nn.Module) -> None:
        kind: Any = module
        self.axes = axes = int(type(module).__name__[-2])
        self.kernel, self.stride, self.padding = (each(one, axes) for one in (kind.kernel_size, kind.stride, kind.padding))
        self.dilation, self.ceil = (1,) * axes, kind.ceil_mode

    def reach(self, dim: int, rows: int) -> Window:
        axis = dim - FIRST
        padding = self.padding[axis]
        return Window(rows, self.kernel[axis], self.stride[axis], padding, padding, self.dilation[axis], self.ceil)

    def window(self, dim: int) -> Window:
        """How the kernel slides along a divided dimension."""
        return cast(Window, self.lines[dim].geometry)

    def padded(self, rows: Tensor, outputs: Block, value: float = 0.0) -> Tensor:
        """With the padding of divided dimensions, so that the windows fit the rows exactly."""
        return pad(rows, {dim: self.window(dim).padding(rows_of) for dim, rows_of in outputs.items()}, value)

    def whole_padding(self, outputs: Block) -> list[int]:
        """The padding that is left to torch: none along divided dimensions."""
        return [0 if axis + FIRST in outputs else padding for axis, padding in enumerate(self.padding)]


class DomainMaxPool(_Pool):
    """`torch.nn.MaxPool2d` on a strip of the image, or another of its kind."""

    def configure(self, module: nn.Module) -> None:
        super().configure(module)
        assert isinstance(module, nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d)
        if module.return_indices:
            raise UsageError(f"{self.name}: pooling with return_indices cannot be divided: the indices are those of a strip")
        self.dilation = each(module.dilation, self.axes)

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        rows = self.padded(rows, outputs, -float("inf"))
        return _MAX[self.axes](rows, self.kernel, self.stride, self.whole_padding(outputs), self.dilation, self.ceil)


class DomainAvgPool(_Pool):
    """`torch.nn.AvgPool2d` on a strip of the image, or another of its kind."""

    def configure(self, module: nn.Module) -> None:
        super().configure(module)
        assert isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d)
        self.count_include_pad = module.count_include_pad
        self.divisor = getattr(module, "divisor_override", None)

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        rows, padding = self.padded(rows, outputs), self.whole_padding(outputs)
        divisor = () if self.axes == 1 else (self.divisor,)
        result = _AVERAGE[self.axes](rows, self.kernel, self.stride, padding, self.ceil, self.count_include_pad, *divisor)
        # Torch divides by the rows of a window, all of which it takes for rows of the image here; some may be padding.
        for dim, ranges in outputs.items():
            kernel, counted = self.kernel[dim - FIRST], [self._counted(dim, row) for row in range(*ranges)]
            if self.divisor is None and any(count != kernel for count in counted):
                factors = result.new_tensor([kernel / count if count else 0.0 for count in counted])
                result = result * along(factors, dim, result.dim())
        return result

    def _counted(self, dim: int, row: int) -> int:
        """The rows by which torch divides the sum of a window's."""
        window = self.window(dim)
        first, last = window.windows((row, row + 1))
        if self.count_include_pad:
            return min(last, window.length + window.after) - first
        return max(0, min(last, window.length) - max(first, 0))
