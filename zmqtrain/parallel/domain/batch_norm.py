"""Batch norm on strips, with the statistics of the whole batch and image, or of the strip alone.

Forward gathers count, mean and sum of squares about the mean of every process, and joins them as Chan et al. (1979) do: exact for
uneven strips and samples, and no difference of large sums. All processes join the same numbers in the same order, so that running
statistics stay the same on all, bit by bit. Backward sums two numbers a channel, and multiplies in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Communicator, Label
from zmqtrain.parallel.domain.layer import adopt
from zmqtrain.parallel.domain.traffic import Collective
from zmqtrain.parallel.geometry import Division, checked
from zmqtrain.parallel.halo import HEIGHT
from zmqtrain.parallel.once import once_differentiable


class DomainBatchNorm2d(nn.Module):
    """`torch.nn.BatchNorm2d` on a strip of the image. Its gradients of weight and bias are this process's contribution."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: Communicator,
        division: Division,
        *,
        statistics: Communicator | None,
        dim: int = HEIGHT,
        recorder: Recorder | None = None,
    ) -> None:
        """Arguments:
        statistics: of the processes over whose samples and rows mean and variance are taken: all of the grid, for what the layer
            does in one process. ``None`` for those of the own strip, which differ from process to process, also in evaluation.
        """
        super().__init__()
        assert isinstance(module, nn.BatchNorm2d)
        self.name, self.communicator, self.statistics, self.dim = name, communicator, statistics, dim
        self.recorder: Recorder = recorder if recorder is not None else NullRecorder()
        self.eps, self.momentum, self.channels = module.eps, module.momentum, module.num_features
        adopt(self, module)
        self.divide(division)

    def divide(self, division: Division) -> Division:
        """Use this division from now on; that of the output is the same."""
        if len(division) != self.communicator.size:
            raise UsageError(f"{self.name}: the image has {len(division)} strips for {self.communicator.size} processes")
        self.division = self.out_division = checked(division)
        return division

    def forward(self, own: Tensor) -> Tensor:
        """The strip, normalised (samples, channels, height, width)."""
        if own.dim() != 4 or own.shape[1] != self.channels:
            raise UsageError(f"{self.name}: a strip with {self.channels} channels was due here, not the shape {tuple(own.shape)}")
        of_batch = self.training or self.running_mean is None
        if not of_batch:
            return functional.batch_norm(own, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        update = self.training and self.running_mean is not None
        if self.statistics is None and not own.numel():
            return _affine(own, self.weight, self.bias)
        share = self._share() if update else 0.0
        if self.statistics is None:
            means = (self.running_mean, self.running_var) if update else (None, None)
            return functional.batch_norm(own, *means, self.weight, self.bias, True, share, self.eps)
        with torch.no_grad():
            count, mean, squares = self._moments(own.detach())
            if update:
                assert self.running_mean is not None
                assert self.running_var is not None
                self.running_mean.lerp_(mean.to(self.running_mean), share)
                self.running_var.lerp_((squares / (count - 1)).to(self.running_var), share)
            deviation = (squares / count + self.eps).rsqrt()
        normalised: Tensor = _Normalise.apply(own, mean, deviation, count, self)  # type: ignore[no-untyped-call]
        return _affine(normalised, self.weight, self.bias)

    def _share(self) -> float:
        """The share of this batch in running statistics. Counts the batch."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        assert self.num_batches_tracked is not None
        return 0.0 if self.num_batches_tracked.is_meta else 1.0 / float(self.num_batches_tracked)

    def _moments(self, own: Tensor) -> tuple[float, Tensor, Tensor]:
        """How many values a channel has over all processes; by channel their mean, and their squares' sum about it (float64)."""
        assert self.statistics is not None
        count = own.numel() // self.channels
        moments = own.new_zeros(1 + 2 * self.channels, dtype=torch.float64)
        with self.recorder.span(f"statistics of {self.name}", "compute"):
            if count:
                variance, mean = torch.var_mean(_wide(own), (0, 2, 3), correction=0)
                moments = torch.cat([moments.new_tensor([count]), mean.double(), variance.double() * count])
        shapes = [tuple(moments.shape)] * self.statistics.size
        with self.recorder.span(f"wait for statistics of {self.name}", "wait"):
            parts = self.statistics.all_gather(moments, shapes, Label(self.name, "statistics")).wait()
        all_moments = torch.stack([part.to(own.device) for part in parts])
        counts, means, squares = all_moments[:, :1], all_moments[:, 1 : 1 + self.channels], all_moments[:, 1 + self.channels :]
        total = float(count * self.statistics.size) if own.is_meta else float(counts.sum())
        if total < 2:
            raise ValueError(f"{self.name}: expected more than 1 value per channel when training, over all processes")
        joined = (counts * means).sum(0) / total
        return total, joined, (squares + counts * (means - joined) ** 2).sum(0)

    def collectives(self, shape: Sequence[int], element_size: int, input_gradient: bool) -> list[Collective]:
        """The collectives of this layer in a step of training, for the cost model."""
        if self.statistics is None:
            return []
        forward = Collective("all_gather", 1 + 2 * self.channels, 8, "forward")
        return [forward, *([Collective("all_reduce", 2 * self.channels, 8, "backward")] if input_gradient else [])]


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation, where both depend on the x of all processes."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor, scale: Tensor, count: float, layer: DomainBatchNorm2d) -> Tensor:
        wide = _wide(own)
        result = wide - mean.to(wide)[:, None, None]
        result.mul_(scale.to(wide)[:, None, None])
        ctx.save_for_backward(result, scale)
        ctx.count, ctx.layer = count, layer
        return result.to(own.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalised, scale = ctx.saved_tensors
        layer: DomainBatchNorm2d = ctx.layer
        wide = _wide(gradient)
        sums = torch.cat([wide.sum((0, 2, 3)).double(), (wide * normalised).sum((0, 2, 3)).double()])
        assert layer.statistics is not None
        pending = layer.statistics.all_reduce(sums, Label(layer.name, "statistics", "backward"))
        with layer.recorder.span(f"interior of {layer.name} (backward)", "compute"):
            scale = scale.to(wide)[:, None, None]
            own = wide * scale
        with layer.recorder.span(f"wait for statistics of {layer.name} (backward)", "wait"):
            (sums,) = pending.wait()
        of_mean, of_deviation = (part.to(wide)[:, None, None] for part in (sums.to(wide.device) / ctx.count).chunk(2))
        own -= (of_mean + normalised * of_deviation) * scale
        return own.to(gradient.dtype), None, None, None, None


def _affine(tensor: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is None or bias is None:
        return tensor
    return torch.addcmul(bias[:, None, None], tensor, weight[:, None, None]).to(tensor.dtype)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in a type that sums may have."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
