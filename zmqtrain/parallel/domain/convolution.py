"""Convolution and transposed convolution on strips: any kernel, stride, padding, dilation and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.axes import FIRST, along, each, pad
from zmqtrain.parallel.domain.layer import Block, DomainLayer
from zmqtrain.parallel.geometry import Transposed, Window, length

_PLAIN: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


class DomainConv(DomainLayer):
    """`torch.nn.Conv2d` on a strip of the image, or another convolution."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if module.padding_mode != "zeros":
            raise UsageError(
                f"{self.name}: a convolution with padding_mode={module.padding_mode!r} cannot be divided: only zeros are known "
                "to be the same at all strips' edges"
            )
        self.axes = len(module.kernel_size)
        self.stride, self.dilation, self.groups = each(module.stride, self.axes), each(module.dilation, self.axes), module.groups
        self.kernel = each(module.kernel_size, self.axes)
        self.padding = tuple(conv_padding(module, axis) for axis in range(self.axes))

    def window(self, axis: int, rows: int) -> Window:
        """How the kernel slides along an axis of an image with ``rows`` rows."""
        before, after = self.padding[axis]
        return Window(rows, self.kernel[axis], self.stride[axis], before, after, self.dilation[axis])

    def reach(self, dim: int, rows: int) -> Window:
        return self.window(dim - FIRST, rows)

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        weight, bias = weights[0], weights[1] if len(weights) > 1 else None
        padding, skipped, apart = [0] * self.axes, {}, {}
        for axis in range(self.axes):
            dim = axis + FIRST
            if dim not in outputs:
                before, after = self.padding[axis]
                if before == after:
                    padding[axis] = before
                else:
                    apart[dim] = before, after
                continue
            before, after = cast(Window, self.lines[dim].geometry).padding(outputs[dim])
            # Torch pads both sides alike. More of it on one side, by whole strides, gives more output rows, which are left out: so
            # the strip need not be copied into a padded one, which would have to be kept for backward.
            skipped[dim] = -(-max(0, after - before) // self.stride[axis])
            padding[axis] = before + skipped[dim] * self.stride[axis]
            if not rows.shape[dim]:  # windows that lie in the padding altogether
                apart[dim], padding[axis], skipped[dim] = (before, after), 0, 0
        result = _PLAIN[self.axes](pad(rows, apart), weight, bias, self.stride, padding, self.dilation, self.groups)
        for dim, more in skipped.items():
            result = result.narrow(dim, more, length(outputs[dim]))
        return result


class DomainConvTranspose(DomainLayer):
    """`torch.nn.ConvTranspose2d` on a strip of the image, or another of its kind."""

    def configure(self, module: nn.Module) -> None:
        assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
        self.axes = len(module.kernel_size)
        self.stride, self.dilation, self.groups = each(module.stride, self.axes), each(module.dilation, self.axes), module.groups
        self.kernel, self.padding = each(module.kernel_size, self.axes), each(cast(Any, module.padding), self.axes)
        self.output_padding = each(module.output_padding, self.axes)

    def reach(self, dim: int, rows: int) -> Transposed:
        settings = (self.kernel, self.stride, self.padding, self.output_padding, self.dilation)
        return Transposed(rows, *(setting[dim - FIRST] for setting in settings))

    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        weight, bias = weights[0], weights[1] if len(weights) > 1 else None
        # Along a divided dimension everything that the rows reach; what others compute, and the padding, is cut off.
        padding, output_padding, starts = list(self.padding), list(self.output_padding), {}
        for dim, (first, last) in outputs.items():
            padding[dim - FIRST] = output_padding[dim - FIRST] = 0
            if not rows.shape[dim]:  # rows that no input row reaches: the bias alone, in the shape that one row would give
                rows, starts[dim] = pad(rows, {dim: (0, 1)}), last
            else:
                geometry = cast(Transposed, self.lines[dim].geometry)
                starts[dim], _ = geometry.spread(geometry.needs((first, last)))
        result = _TRANSPOSED[self.axes](rows, weight, None, self.stride, padding, output_padding, self.groups, self.dilation)
        for dim, (first, last) in outputs.items():
            result = pad(result, {dim: (starts[dim] - first, last - starts[dim] - result.shape[dim])})
        return result if bias is None else result + along(bias, 1, result.dim())


def conv_padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, axis: int) -> tuple[int, int]:
    """Rows of padding before and after."""
    axes = len(module.kernel_size)
    if isinstance(module.padding, str):
        if module.padding == "valid":
            return 0, 0
        total = each(module.dilation, axes)[axis] * (each(module.kernel_size, axes)[axis] - 1)
        return total // 2, total - total // 2
    return (each(module.padding, axes)[axis],) * 2
