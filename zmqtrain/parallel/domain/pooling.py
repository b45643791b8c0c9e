"""Max and average pooling on strips: any kernel, stride and padding, with torch's rules for windows that stand out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import pad, pair
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.geometry import Range, Window
from zmqtrain.parallel.halo import HEIGHT


class _Pool(DomainLayer):
    """What both have in common."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.MaxPool2d | nn.AvgPool2d)
        self.kernel, self.stride, self.padding = pair(module.kernel_size), pair(module.stride), pair(module.padding)
        self.dilation, self.ceil = (1, 1), module.ceil_mode

    def reach(self, rows: int) -> Window:
        axis = self.dim - HEIGHT
        padding = self.padding[axis]
        return Window(rows, self.kernel[axis], self.stride[axis], padding, padding, self.dilation[axis], self.ceil)

    @property
    def window(self) -> Window:
        """How the kernel slides along the divided dimension."""
        return cast(Window, self.geometry)

    def whole_padding(self) -> list[int]:
        """The padding that is left to torch: none along the divided dimension, where the windows fit the rows exactly."""
        padding = list(self.padding)
        padding[self.dim - HEIGHT] = 0
        return padding


class DomainMaxPool2d(_Pool):
    """`torch.nn.MaxPool2d` on a strip of the image."""

    def configure(self, module: nn.Module) -> None:
        super().configure(module)
        assert isinstance(module, nn.MaxPool2d)
        if module.return_indices:
            raise UsageError(f"{self.name}: pooling with return_indices cannot be divided: the indices are those of a strip")
        self.dilation = pair(module.dilation)

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        rows = pad(rows, self.dim - HEIGHT, self.window.padding(outputs), -float("inf"))
        return functional.max_pool2d(rows, self.kernel, self.stride, self.whole_padding(), self.dilation, self.ceil)


class DomainAvgPool2d(_Pool):
    """`torch.nn.AvgPool2d` on a strip of the image."""

    def configure(self, module: nn.Module) -> None:
        super().configure(module)
        assert isinstance(module, nn.AvgPool2d)
        self.count_include_pad, self.divisor = module.count_include_pad, module.divisor_override

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        axis = self.dim - HEIGHT
        rows = pad(rows, axis, self.window.padding(outputs))
        result = functional.avg_pool2d(
            rows, self.kernel, self.stride, self.whole_padding(), self.ceil, self.count_include_pad, self.divisor
        )
        # Torch divides by the rows of a window, all of which it takes for rows of the image here; some may be padding.
        kernel, counted = self.kernel[axis], [self._counted(row) for row in range(*outputs)]
        if self.divisor is not None or all(count == kernel for count in counted):
            return result
        factors = result.new_tensor([kernel / count if count else 0.0 for count in counted])
        return result * (factors[:, None] if axis == 0 else factors)

    def _counted(self, row: int) -> int:
        """The rows by which torch divides the sum of a window's."""
        window = self.window
        first, last = window.windows((row, row + 1))
        if self.count_include_pad:
            return min(last, window.length + window.after) - first
        return max(0, min(last, window.length) - max(first, 0))
