"""Layer norm and group norm of features that are divided over the rows.

What is whole on the column needs nothing of this: `torch.nn.LayerNorm` itself is computed by every process alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.parts import gathered, sum_traffic
from zmqtrain.parallel.model.precision import raised
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Divisions, Range
from zmqtrain.parallel.shard import one_range

#: Of each row: (group, its channels there).
Overlaps: TypeAlias = tuple[tuple[tuple[int, Range], ...], ...]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Channels in groups, each of which is normalised; divided over the rows, with cuts wherever they fall."""

    site: Site
    divisions: Divisions
    groups: int
    eps: float

    @property
    def each(self) -> int:
        """Channels of a group."""
        return self.divisions[-1][1] // self.groups

    @property
    def aligned(self) -> bool:
        """Whether no group is cut."""
        return all(start % self.each == 0 for start, _ in self.divisions)

    def overlaps(self) -> Overlaps:
        """Which channels of which groups each row has, counted from its first."""
        return tuple(
            tuple(
                (group, (max(start, group * self.each) - start, min(stop, (group + 1) * self.each) - start))
                for group in range(start // self.each, (stop - 1) // self.each + 1)
            )
            for start, stop in self.divisions
        )

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of (vectors, channels, elements): mean and 1 / deviation of each channel's group, both (vectors, channels, 1).

        Rows tell one another mean and squared deviation of their parts: sums of squares would lose digits.
        """
        overlaps, row, elements = self.overlaps(), self.site.row, x.shape[2]
        parts = []
        for _, (start, stop) in overlaps[row]:
            mean = x[:, start:stop].mean((1, 2))
            variance = (x[:, start:stop] - mean[:, None, None]).square().mean((1, 2))
            parts.append(torch.stack((mean, variance)))
        own = torch.stack(parts, -1)  # (2, vectors, overlaps)
        if self.aligned:
            means, variances = own
        else:
            places = [len(each) for each in overlaps]
            divisions = tuple((sum(places[:number]), sum(places[: number + 1])) for number in range(len(places)))
            found = gathered(own, -1, divisions, self.site, self.site.label("statistics"))
            means, variances = self._combined(found, overlaps, elements)
        lengths = torch.tensor([stop - start for _, (start, stop) in overlaps[row]], device=x.device)
        mean, variance = (each.repeat_interleave(lengths, -1).unsqueeze(-1) for each in (means, variances))
        return mean, torch.rsqrt(variance + self.eps)

    def _combined(self, found: Tensor, overlaps: Overlaps, elements: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of this row's groups, of the parts that all rows have."""
        every = [(group, stop - start) for each in overlaps for group, (start, stop) in each]
        means, variances = [], []
        for group, _ in overlaps[self.site.row]:
            places = [number for number, (other, _) in enumerate(every) if other == group]
            share = torch.tensor([every[place][1] / self.each for place in places], dtype=found.dtype, device=found.device)
            mean, variance = found[..., places]
            common = (mean * share).sum(-1)
            means.append(common)
            variances.append(((variance + (mean - common.unsqueeze(-1)).square()) * share).sum(-1))
        return torch.stack(means, -1), torch.stack(variances, -1)

    def sums(self, parts: Tensor) -> Tensor:
        """Of (2, vectors, channels) that is summed over a row's channels by group: (2, vectors, all groups)."""
        result = parts.new_zeros(*parts.shape[:2], self.groups)
        for group, (start, stop) in self.overlaps()[self.site.row]:
            result[..., group] = parts[..., start:stop].sum(-1)
        return result

    def traffic(self, vectors: int, itemsize: int, gradient: bool) -> Traffic:
        """What this process sends to normalise ``vectors`` vectors, and for their gradient."""
        if self.aligned:
            return {}
        site = self.site
        parts = {
            site.label("statistics"): traffic.all_gather([2 * vectors * len(each) * itemsize for each in self.overlaps()], site.row)
        }
        if gradient:
            parts[site.label("statistics", "backward")] = sum_traffic(2 * vectors * self.groups, site, itemsize)
        return total([parts])


class _Normalise(torch.autograd.Function):
    """(vectors, channels, elements), normalised by groups of channels, with weights of (channels, elements or 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, grouped: Grouped) -> Tensor:
        mean, scale = grouped.statistics(x)
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, scale, weight)
        ctx.grouped = grouped
        result = normal if weight is None else normal * weight
        return result if bias is None else result + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        grouped: Grouped = ctx.grouped
        for_input, for_weight, for_bias, _ = ctx.needs_input_grad
        weighted = gradient if weight is None else gradient * weight
        pending = sums = None
        if for_input:
            sums = grouped.sums(torch.stack((weighted.sum(-1), (weighted * normal).sum(-1))))
            if not grouped.aligned:
                pending = grouped.site.column_group.all_reduce(sums, grouped.site.label("statistics", "backward"))
        over = [0] if weight is None or weight.shape[-1] > 1 else [0, 2]
        weights = (gradient * normal).sum(over).reshape(weight.shape) if for_weight and weight is not None else None
        biases = gradient.sum(over).reshape(weight.shape) if for_bias and weight is not None else None
        if sums is None:
            return None, weights, biases, None
        if pending is not None:
            (sums,) = pending.wait()
        overlaps = grouped.overlaps()[grouped.site.row]
        mine = torch.tensor([group for group, (start, stop) in overlaps for _ in range(start, stop)], device=sums.device)
        plain, along = sums[..., mine].unsqueeze(-1) / (grouped.each * normal.shape[2])
        return scale * (weighted - plain - normal * along), weights, biases, None


class LayerNorm(Divided):
    """`torch.nn.LayerNorm` of features that are divided over the rows, along the first of the dimensions that it normalises.

    Costs a small all-gather in forward (two numbers a vector and row), and a small all-reduce in backward.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, original: nn.LayerNorm, site: Site, *, divisions: Divisions | None = None) -> None:
        super().__init__(original, site)
        self.normalized_shape, self.eps = tuple(original.normalized_shape), original.eps
        self.divisions = self.given_or_even(divisions, self.normalized_shape[0], "features")
        for name in ("weight", "bias"):
            self.hold(name, getattr(original, name), 0, one_range(self.divisions))
        self._grouped = Grouped(site, self.divisions, 1, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., this row's features, ...) to the same."""
        start, stop = self.divisions[self.site.row]
        inner = math.prod(self.normalized_shape[1:])
        vectors = math.prod(x.shape[: x.dim() - len(self.normalized_shape)])
        weight = None if self.weight is None else self.weight.reshape(stop - start, inner)
        bias = None if self.bias is None else self.bias.reshape(stop - start, inner)
        return _normalise(x.reshape(vectors, stop - start, inner), weight, bias, self._grouped).reshape(x.shape)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        vectors = math.prod(shape[: len(shape) - len(self.normalized_shape)])
        return self._grouped.traffic(vectors, itemsize, input_gradient)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, grid {self.site.grid}"


class GroupNorm(Divided):
    """`torch.nn.GroupNorm` of channels that are divided over the rows.

    By itself it divides whole groups, and sends nothing. With ``divisions`` that cut groups, as the layer before has left them,
    rows tell one another their parts' statistics: two numbers for each sample and part of a group.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, original: nn.GroupNorm, site: Site, *, divisions: Divisions | None = None) -> None:
        super().__init__(original, site)
        self.num_groups, self.num_channels, self.eps = original.num_groups, original.num_channels, original.eps
        if divisions is None:
            each = self.num_channels // self.num_groups
            divisions = tuple((start * each, stop * each) for start, stop in site.divide(self.num_groups, "groups"))
        self.divisions = self.given_or_even(divisions, self.num_channels, "channels")
        for name in ("weight", "bias"):
            self.hold(name, getattr(original, name), 0, one_range(self.divisions))
        self._grouped = Grouped(site, self.divisions, self.num_groups, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, this row's channels, ...) to the same."""
        start, stop = self.divisions[self.site.row]
        if x.dim() < 2 or x.shape[1] != stop - start:
            raise UsageError(f"layer {self.site.layer}: shape {tuple(x.shape)} where this row has channels {start} to {stop}")
        weight = None if self.weight is None else self.weight.unsqueeze(-1)
        bias = None if self.bias is None else self.bias.unsqueeze(-1)
        flat = x.reshape(x.shape[0], stop - start, math.prod(x.shape[2:]))
        return _normalise(flat, weight, bias, self._grouped).reshape(x.shape)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        return self._grouped.traffic(shape[0], itemsize, input_gradient)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, grid {self.site.grid}"


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, grouped: Grouped) -> Tensor:
    found = cast(Tensor, _Normalise.apply(raised(x), weight, bias, grouped))  # type: ignore[no-untyped-call]
    return found.to(x.dtype)
