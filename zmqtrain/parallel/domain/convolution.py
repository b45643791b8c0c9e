"""Convolution and transposed convolution on strips: any kernel, stride, padding, dilation and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import pad, pair
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.geometry import Range, Transposed, Window, length
from zmqtrain.parallel.halo import HEIGHT


class DomainConv2d(DomainLayer):
    """`torch.nn.Conv2d` on a strip of the image."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Conv2d)
        if module.padding_mode != "zeros":
            raise UsageError(
                f"{self.name}: a convolution with padding_mode={module.padding_mode!r} cannot be divided: only zeros are known "
                "to be the same at all strips' edges"
            )
        self.stride, self.dilation, self.groups = pair(module.stride), pair(module.dilation), module.groups
        self.kernel = pair(module.kernel_size)
        self.padding = tuple(conv_padding(module, axis) for axis in range(2))

    def window(self, axis: int, rows: int) -> Window:
        """How the kernel slides along the height (0) or the width (1) of so many rows."""
        before, after = self.padding[axis]
        return Window(rows, self.kernel[axis], self.stride[axis], before, after, self.dilation[axis])

    def reach(self, rows: int) -> Window:
        return self.window(self.dim - HEIGHT, rows)

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        weight, bias = weights[0], weights[1] if len(weights) > 1 else None
        axis = self.dim - HEIGHT
        before, after = cast(Window, self.geometry).padding(outputs)
        stride = self.stride[axis]
        # Torch pads both sides alike. More of it on one side, by whole strides, gives more output rows, which are left out: so the
        # strip need not be copied into a padded one, which would have to be kept for backward.
        more = -(-max(0, after - before) // stride)
        padding = [0, 0]
        padding[axis] = before + more * stride
        whole = self.padding[1 - axis]
        if whole[0] == whole[1]:
            padding[1 - axis] = whole[0]
        else:
            rows = pad(rows, 1 - axis, whole)
        if not rows.shape[self.dim]:  # windows that lie in the padding altogether
            rows, padding[axis], more = pad(rows, axis, (before, after)), 0, 0
        result = functional.conv2d(rows, weight, bias, self.stride, padding, self.dilation, self.groups)
        return result.narrow(self.dim, more, length(outputs))


class DomainConvTranspose2d(DomainLayer):
    """`torch.nn.ConvTranspose2d` on a strip of the image."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.ConvTranspose2d)
        self.stride, self.dilation, self.groups = pair(module.stride), pair(module.dilation), module.groups
        self.kernel, self.padding = pair(module.kernel_size), pair(cast("tuple[int, int]", module.padding))
        self.output_padding = pair(module.output_padding)

    def reach(self, rows: int) -> Transposed:
        axis = self.dim - HEIGHT
        settings = (self.kernel, self.stride, self.padding, self.output_padding, self.dilation)
        return Transposed(rows, *(setting[axis] for setting in settings))

    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        weight, bias = weights[0], weights[1] if len(weights) > 1 else None
        axis = self.dim - HEIGHT
        if not rows.shape[self.dim]:  # rows that no input row reaches: the bias alone, in the shape that one row would give
            rows = pad(rows, axis, (0, 1))
            start = outputs[1]
        else:
            geometry = cast(Transposed, self.geometry)
            start, _ = geometry.spread(geometry.needs(outputs))
        # Along the divided dimension everything that the rows reach; what others compute, and the padding, is cut off.
        padding, output_padding = list(self.padding), list(self.output_padding)
        padding[axis] = output_padding[axis] = 0
        result = functional.conv_transpose2d(rows, weight, None, self.stride, padding, output_padding, self.groups, self.dilation)
        result = pad(result, axis, (start - outputs[0], outputs[1] - start - result.shape[self.dim]))
        return result if bias is None else result + bias[:, None, None]


def conv_padding(module: nn.Conv2d, axis: int) -> tuple[int, int]:
    """Rows of padding before and after."""
    if isinstance(module.padding, str):
        if module.padding == "valid":
            return 0, 0
        total = pair(module.dilation)[axis] * (pair(module.kernel_size)[axis] - 1)
        return total // 2, total - total // 2
    return (pair(module.padding)[axis],) * 2
