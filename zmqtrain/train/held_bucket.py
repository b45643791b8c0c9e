"""The memory of a replica's bucket: parameters and gradients in one run each, of which the model's own tensors become views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zmqtrain.exchange.unreached import Parts
from zmqtrain.train.buckets import BucketPlan
from zmqtrain.train.device.base import Device
from zmqtrain.train.shared import Allocate


@dataclass(slots=True)
class HeldBucket:
    """The memory of one bucket, and how far it is."""

    plan: BucketPlan
    parameters: Tensor  # in the device's memory
    gradients: Tensor
    host_parameters: Tensor  # what the network sees; the same tensors without staging
    host_gradients: Tensor
    views: list[Tensor]  # of `gradients`, one a parameter
    parameter_views: list[Tensor]  # of `parameters`, one a parameter
    missing: set[int]  # parameters without a gradient in this backward
    written: set[int]  # parameters whose gradient was written in its place since the bucket was taken
    host_sums: Tensor  # what updates go by, as the network sees it: `host_gradients`, or where several workers' are summed
    sums: list[Tensor]  # what updates go by, one a parameter: `views`, or where several workers' gradients are summed
    parts: Parts  # the parameters, in host memory
    unreached: list[int] = field(default_factory=list)  # parameters that this worker's step has not reached
    due: bool = False  # the optimizer runs on it when it is taken back
    arrive: Callable[[], None] | None = None  # what the exchange wrote is on its way to the device


def hold(plan: BucketPlan, named: Mapping[str, nn.Parameter], device: Device, allocate: Allocate) -> HeldBucket:
    """Move the plan's parameters into flat memory."""
    first, staging = named[plan.names[0]].data, device.staging
    host_parameters, host_gradients = allocate(plan.numel, first.dtype), allocate(plan.numel, first.dtype)
    parameters, gradients = host_parameters, host_gradients
    if staging is not None:
        parameters, gradients = (first.new_zeros(plan.numel) for _ in range(2))
        staging.pin(host_parameters)
        staging.pin(host_gradients)
    views, parameter_views = views_of(plan, gradients, named), views_of(plan, parameters, named)
    with torch.no_grad():
        for name, view, gradient in zip(plan.names, parameter_views, views, strict=True):
            parameter = named[name]
            view.copy_(parameter)
            parameter.data = view
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
                parameter.grad = gradient
    if staging is not None:
        host_parameters.copy_(parameters)
    parts = Parts(plan.offsets[:-1], plan.numel, first.dtype)
    return HeldBucket(
        plan,
        parameters,
        gradients,
        host_parameters,
        host_gradients,
        views,
        parameter_views,
        missing=set(),
        written=set(),
        host_sums=host_gradients,
        sums=views,
        parts=parts,
    )


def views_of(plan: BucketPlan, flat: Tensor, named: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The plan's parameters in flat memory, each in its own shape."""
    spans = zip(plan.names, plan.offsets, plan.offsets[1:], strict=False)
    return [_view(flat[start:stop], named[name]) for name, start, stop in spans]


def _view(flat: Tensor, parameter: Tensor) -> Tensor:
    """``flat`` in the shape and memory format of ``parameter``; contiguous where that format has gaps or overlaps."""
    strides = parameter.stride()
    expected = 1
    for dimension in sorted(range(parameter.dim()), key=lambda d: strides[d]):
        if parameter.shape[dimension] != 1:
            if strides[dimension] != expected:
                return flat.view(parameter.shape)
            expected *= parameter.shape[dimension]
    return flat.as_strided(parameter.shape, strides)
