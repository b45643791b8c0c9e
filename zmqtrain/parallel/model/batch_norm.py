"""Batch norm of channels that are whole or divided over the rows, with the statistics of the whole batch or of own samples."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Communicator
from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.precision import raised
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.shard import one_range

AnyBatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class BatchNorm(Divided):
    """`torch.nn.BatchNorm1d`, ``2d`` or ``3d``, of the channels that a row has and the samples that a column (or process) has.

    ``statistics="whole"``: those of the group's whole batch, as one process would compute them, however unevenly its samples are
    divided; each process tells the others its count, means and squared deviations, and backward sums two numbers a channel.
    ``"local"``: those of this process's samples, without a message; running statistics then differ from column to column, and a
    gathered state has those of the column that gathers it.

    ``divisions``: of the channels over the rows; ``None``: whole. ``samples="all"``: after layers whose samples are divided over
    all processes; channels are whole then.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        original: AnyBatchNorm,
        site: Site,
        *,
        divisions: Divisions | None = None,
        statistics: Literal["whole", "local"] = "whole",
        samples: Literal["columns", "all"] = "columns",
    ) -> None:
        super().__init__(original, site)
        if divisions is not None and samples == "all":
            raise UsageError(f"layer {site.layer}: channels and samples cannot both be divided over the rows")
        self.num_features, self.eps, self.momentum = original.num_features, original.eps, original.momentum
        self.divisions = None if divisions is None else self.given_or_even(divisions, self.num_features, "channels")
        self.members = site.grid.row(site.rank) if samples == "columns" else tuple(range(site.grid.size))
        self.statistics = statistics
        dimension, pieces = (None, ()) if self.divisions is None else (0, one_range(self.divisions))
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.hold(name, getattr(original, name), dimension, pieces, self.members)
        self.hold("num_batches_tracked", original.num_batches_tracked, None, (), self.members)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, this row's channels, ...) to the same."""
        start, stop = (0, self.num_features) if self.divisions is None else self.divisions[self.site.row]
        if x.dim() < 2 or x.shape[1] != stop - start:
            raise UsageError(f"layer {self.site.layer}: shape {tuple(x.shape)} where this row has channels {start} to {stop}")
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        group = self.site.fabric.among(self.members) if self.statistics == "whole" and len(self.members) > 1 else None
        result, mean, variance, count = cast(
            tuple[Tensor, Tensor, Tensor, int],
            _Normalise.apply(raised(x), self.weight, self.bias, self.eps, group, self.site),  # type: ignore[no-untyped-call]
        )
        if self.training:
            self._track(mean, variance, int(count))
        return result.to(x.dtype)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        """See `Divided.traffic`; of a forward in training."""
        size, rank = len(self.members), self.members.index(self.site.rank)
        if self.statistics == "local" or size == 1:
            return {}
        forward, backward = self.site.label("statistics"), self.site.label("statistics", "backward")
        parts = [{forward: traffic.all_gather([(2 * shape[1] + 1) * itemsize] * size, rank)}]
        if input_gradient:
            parts.append({backward: traffic.all_reduce(2 * shape[1], itemsize, size, rank)})
        return total(parts)

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None or count == 0:
            return
        self.num_batches_tracked += 1
        if self.momentum is not None or self.num_batches_tracked.is_meta:
            share = self.momentum or 0.0
        else:
            share = 1 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, statistics {self.statistics}, grid {self.site.grid}"


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Communicator | None, site: Site
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """The result, mean and variance (not of a sample, but of these values) of each channel, and how many values they have."""
        values = x.transpose(0, 1).flatten(1)
        count = values.shape[1]
        variance, mean = torch.var_mean(values, 1, correction=0) if count else (x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1]))
        total = count
        if group is not None:
            own = torch.cat((mean, variance, mean.new_tensor([count])))
            found = torch.stack(group.all_gather(own, [tuple(own.shape)] * group.size, site.label("statistics")).wait())
            counts = found[:, -1].double()
            total = group.size * count if x.is_meta else round(float(counts.sum()))
            shares = (counts / max(total, 1)).to(x.dtype).unsqueeze(-1)
            means, variances = found[:, :-1].chunk(2, 1)
            mean = (means * shares).sum(0)
            variance = ((variances + (means - mean).square()) * shares).sum(0)
        if total == 1:
            raise UsageError(f"layer {site.layer}: batch norm needs more than one value per channel in training")
        along = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(variance + eps)
        normal = (x - mean.reshape(along)) * scale.reshape(along)
        ctx.save_for_backward(normal, scale, weight)
        ctx.group, ctx.site, ctx.count, ctx.along = group, site, total, along
        ctx.mark_non_differentiable(mean, variance)
        result = normal if weight is None else normal * weight.reshape(along)
        return result if bias is None else result + bias.reshape(along), mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, scale, weight = ctx.saved_tensors
        over = [0, *range(2, gradient.dim())]
        # What the gradients of the parameters are, too: the same sums serve both.
        sums = torch.stack((gradient.sum(over), (gradient * normal).sum(over)))
        biases, weights = sums
        inputs = None
        if ctx.needs_input_grad[0]:
            if ctx.group is not None:
                (sums,) = ctx.group.all_reduce(sums, ctx.site.label("statistics", "backward")).wait()
            factor = scale if weight is None else scale * weight
            plain, along = (each.reshape(ctx.along) / max(ctx.count, 1) for each in sums)
            inputs = factor.reshape(ctx.along) * (gradient - plain - normal * along)
        for_weight, for_bias = ctx.needs_input_grad[1:3]
        return inputs, weights if for_weight else None, biases if for_bias else None, None, None, None
