"""A convolution divided over the rows by its output channels."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.parts import gather, gather_traffic, gathered
from zmqtrain.parallel.model.precision import lowered
from zmqtrain.parallel.model.product import Alone, Collected, Meeting, Scattered, Summed, product
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Divisions, Range, scaled
from zmqtrain.parallel.shard import one_range

Whole: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, slots=True)
class ConvolutionOperation:
    """A convolution with zero padding, of the input channels that this process's outputs need."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, *self._geometry(), self.groups)  # type: ignore[no-any-return]

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, x, weight, 0)

    def weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, x, weight, 1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum([dimension for dimension in range(gradient.dim()) if dimension != 1])

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        wanted = [number == which for number in range(3)]
        found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *self._geometry(), self.groups, wanted)
        return found[which]  # type: ignore[no-any-return]

    def _geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Literal[False], list[int]]:
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride)


class Convolution(Divided):
    """`torch.nn.Conv1d`, ``Conv2d`` or ``Conv3d``, of which a process holds some output channels.

    As with a linear layer the input is whole on the column, the outputs are all-gathered, and the gradient of the input is
    all-reduced; and likewise ``gather=False`` leaves the channels divided, and ``gathers=DIVISIONS`` takes divided ones.

    With groups a process has whole groups, or a part of one, and needs the input channels of these only: with whole groups the
    gradients of the input lie one after the other and are only all-gathered. ``input_divided=True`` takes the channels of its own
    groups alone, as a layer before with ``gather=False`` has left them: then neither forward nor backward sends for the input, as
    for the depthwise convolution between two others.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        original: Whole,
        site: Site,
        *,
        divisions: Divisions | None = None,
        gather: bool = True,
        gathers: Divisions | None = None,
        input_divided: bool = False,
    ) -> None:
        super().__init__(original, site)
        self.in_channels, self.out_channels, self.groups = original.in_channels, original.out_channels, original.groups
        self.gathers_output = gather
        self.divisions = self._divided(divisions)
        self.hold("weight", original.weight, 0, one_range(self.divisions))
        self.hold("bias", original.bias, 0, one_range(self.divisions))
        used = tuple(self._used(each) for each in self.divisions)
        self._used_here = used[site.row]
        here = (self._used_here[1] - self._used_here[0]) * self.groups // self.in_channels
        self._pad, self._pad_mode, padding = _padding(original)
        self._operation = ConvolutionOperation(tuple(original.stride), padding, tuple(original.dilation), here)
        self.input_divisions: Divisions | None
        self.input_divided, self._used_by = input_divided, used
        self.takes(gathers)
        if input_divided:
            if gathers is not None or not _one_after_the_other(used):
                raise UsageError(f"layer {site.layer}: its rows need other input channels than each other's, not divided ones")
            self.input_divisions = tuple(used)
            self._meeting = self._meet(used)

    def takes(self, gathers: Divisions | None) -> None:
        """From now on the input's channels are divided so, and gathered here; ``None``: they are whole. Raises `UsageError`."""
        self.input_divisions = None if gathers is None else self.given_or_even(gathers, self.in_channels, "input channels")
        self._meeting = self._meet(self._used_by)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, ...), the channels whole or divided as the layer was made."""
        site, x, given = self.site, lowered(x), None
        if x.dim() != len(self._operation.stride) + 2:
            raise UsageError(f"layer {site.layer}: a divided convolution needs a dimension of samples, not shape {tuple(x.shape)}")
        if self._pad is not None:
            x = functional.pad(x, self._pad, mode=self._pad_mode)
        if self.input_divisions is not None and not self.input_divided:
            if self.groups == 1:
                given = gathered(x.detach(), 1, self.input_divisions, site, site.label("all_gather"))
            else:
                x = gather(x, 1, self.input_divisions, site)
        if self.groups > 1 and not self.input_divided:
            start, stop = self._used_here
            given = x.detach().narrow(1, start, stop - start)
        result = product(x, self.weight, self.bias, self._operation, self._meeting, given)
        return gather(result, 1, self.divisions, site) if self.gathers_output else result

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        site, (samples, _, *space) = self.site, shape
        for number, amount in enumerate(self._pad or ()):
            space[-1 - number // 2] += amount
        weight = torch.empty(self.weight.shape, device="meta")
        x = torch.empty((samples, weight.shape[1] * self._operation.groups, *space), device="meta")
        inputs = samples * math.prod(space)
        outputs = samples * math.prod(self._operation.forward(x, weight, None).shape[2:])
        forward, backward = site.label("all_gather"), site.label("dx", "backward")
        parts = []
        if self.input_divisions is not None and not self.input_divided:
            parts.append({forward: gather_traffic(inputs, self.input_divisions, site, itemsize)})
        if self.gathers_output:
            parts.append({forward: gather_traffic(outputs, self.divisions, site, itemsize)})
        if input_gradient:
            parts.append({backward: self._meeting.sent(inputs, itemsize)})
        return total(parts)

    def extra_repr(self) -> str:
        start, stop = self.divisions[self.site.row]
        return f"{self.in_channels}, {self.out_channels}, outputs {start} to {stop}, grid {self.site.grid}"

    def _meet(self, used: Divisions) -> Meeting:
        """How the contributions to the gradient of the input come together; ``used``: the input channels of each row."""
        if self.input_divided:
            return Alone()
        if self.groups == 1:
            divided = self.input_divisions
            return Summed(self.site, self.in_channels, 1) if divided is None else Scattered(self.site, one_range(divided), 1)
        if _one_after_the_other(used):
            return Collected(self.site, used, 1)
        return Summed(self.site, self.in_channels, 1, self._used_here)

    def _divided(self, divisions: Divisions | None) -> Divisions:
        """The output channels of each row: whole groups, or a part of one. Raises `UsageError`."""
        rows, groups, channels = self.site.rows, self.groups, self.out_channels
        if groups == 1 or divisions is not None:
            return self.given_or_even(divisions, channels, "output channels")
        if groups >= rows:
            return scaled(bounds(groups, rows), channels // groups)
        if rows % groups or channels // groups < rows // groups:
            raise UsageError(
                f"layer {self.site.layer} has {groups} groups of {channels // groups} output channels, which cannot be divided "
                f"over {rows} rows: a row must have whole groups, or a part of one"
            )
        each = channels // groups
        return tuple(
            (group * each + start, group * each + stop) for group in range(groups) for start, stop in bounds(each, rows // groups)
        )

    def _used(self, outputs: Range) -> Range:
        """The input channels that these output channels need. Raises `UsageError`."""
        each, (start, stop) = self.out_channels // self.groups, outputs
        first, last = start // each, (stop - 1) // each + 1
        if last - first > 1 and (start % each or stop % each):
            raise UsageError(
                f"layer {self.site.layer}: output channels {start} to {stop} are neither whole groups of {each} nor a part of one"
            )
        inputs = self.in_channels // self.groups
        return first * inputs, last * inputs


def _one_after_the_other(ranges: Divisions) -> bool:
    return all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


def _padding(original: Whole) -> tuple[list[int] | None, str, tuple[int, ...]]:
    """What to pad before (an argument of `torch.nn.functional.pad`, and its mode), and what the convolution itself pads."""
    none = (0,) * len(original.kernel_size)
    # What torch's own forward uses where it pads before the convolution.
    before: list[int] = list(original._reversed_padding_repeated_twice)
    if original.padding_mode != "zeros":
        return before, original.padding_mode, none
    if original.padding == "valid":
        return None, "constant", none
    if isinstance(original.padding, str):  # "same" may need one more on one side
        if before[::2] != before[1::2]:
            return before, "constant", none
        return None, "constant", tuple(reversed(before[::2]))
    return None, "constant", tuple(original.padding)
