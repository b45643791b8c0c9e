"""The memory of a replica: for each bucket one range of parameters and one of gradients; the model's tensors are views of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zmqtrain.collectives.unreached import Parts
from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.train.buckets import BucketPlan
from zmqtrain.train.device.base import Device
from zmqtrain.train.shared import Allocate


@dataclass(slots=True)
class HeldBucket:
    """The memory of one bucket. Flat tensors have the bucket's dtype and ``plan.numel`` elements."""

    plan: BucketPlan
    parameters: Tensor  # in the device's memory
    gradients: Tensor
    host_parameters: Tensor  # what the network sees; the same tensor without staging
    host_gradients: Tensor
    views: list[Tensor]  # views of `gradients`, one per parameter
    parameter_views: list[Tensor]  # views of `parameters`, one per parameter
    written: set[int]  # parameters whose gradient has been written to its place since the bucket was taken
    host_sums: Tensor  # gradients for updates, as the network sees them: `host_gradients`, or the sums of several workers
    sums: list[Tensor]  # gradients for updates, one per parameter: `views`, or the sums of several workers
    parts: Parts  # the parameters, in host memory
    arrive: Callable[[], None] | None = None  # waits for the copy of the exchange's result to the device


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
                parameter.grad = gradient.detach()
    if staging is not None:
        host_parameters.copy_(parameters)
    parts = Parts(plan.offsets[:-1], plan.numel, first.dtype)
    return HeldBucket(
        plan, parameters, gradients, host_parameters, host_gradients, views, parameter_views, set(), host_gradients, views, parts
    )


class ReplicaMemory:
    """All buckets of a replica. Used in the compute thread."""

    def __init__(self, plans: Sequence[BucketPlan], named: Mapping[str, nn.Parameter], device: Device, allocate: Allocate) -> None:
        """``named``: the parameters by name, in the model's order. They move into flat memory, bucket by bucket."""
        self.named = named
        self.staging = device.staging
        self.buckets = [hold(plan, named, device, allocate) for plan in plans]
        self._addresses = self._current_addresses()
        self._added_before: dict[str, Tensor] = {}

    def gradient_views(self) -> dict[str, Tensor]:
        """Views of each parameter's gradient in its bucket, by name, in the parameter's shape. They are the caller's: one that
        becomes a ``grad`` may get other memory in a loop (``model.float()``), and the bucket's own view must stay."""
        return {name: view.detach() for name, view in self._gradients()}

    def fill_gradients(self, gradients: Mapping[str, Tensor], factors: Sequence[float] | float = 1.0) -> None:
        """Copy ``gradients`` (by name, in the parameters' shapes), times ``factors`` (of each bucket, or one for all), to where the
        network sees them; missing ones are zeros."""
        each = [factors] * len(self.buckets) if isinstance(factors, int | float) else factors
        for held, factor in zip(self.buckets, each, strict=True):
            for name, view in zip(held.plan.names, held.views, strict=True):
                gradient = gradients.get(name)
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
            if factor != 1.0:
                held.gradients.mul_(factor)
            if self.staging is not None:
                self.staging.to_host(held.gradients, held.host_gradients, nothing)
        self.synchronize()

    def fetch_gradients(self, factor: float = 1.0) -> None:
        """Copy gradients that the network has changed, times ``factor``, to `gradient_views`."""
        for held in self.buckets:
            if self.staging is not None:
                self.staging.to_device(held.host_gradients, held.gradients, nothing)()
            if factor != 1.0:
                held.gradients.mul_(factor)

    def added_up(self) -> dict[str, Tensor]:
        """The gradients accumulated since the last exchange, by parameter; none right after one. They alias the replica's
        memory."""
        return {name: parameter.grad for name, parameter in self.named.items() if parameter.grad is not None}

    def go_on_adding_to(self, gradients: Mapping[str, Tensor]) -> None:
        """The next backward adds to ``gradients``, which `added_up` returned in the run that this one resumes. Raises
        `CheckpointError`."""
        for name, gradient in gradients.items():
            parameter = self.named.get(name)
            if parameter is None or parameter.shape != gradient.shape or parameter.dtype != gradient.dtype:
                own = "none" if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"
                raise CheckpointError(
                    f"the checkpoint has a gradient of {name}, {gradient.dtype} {list(gradient.shape)}, but here it is {own}: "
                    "resume with the model and the grid with which it was written"
                )
        self._added_before = dict(gradients)

    def before_backward(self) -> None:
        """Write the gradients given to `go_on_adding_to` into the buckets, once."""
        for name, view in self._gradients() if self._added_before else ():
            if name in self._added_before:
                with torch.no_grad():
                    view.copy_(self._added_before[name])
                self.named[name].grad = view.detach()
        self._added_before.clear()

    def finite(self) -> bool:
        """Whether the gradients for the next update are finite. Synchronizes with the device once."""
        flats = [held.host_sums if self.staging is None else held.gradients for held in self.buckets]
        return bool(torch.stack([flat.sum(dtype=torch.float32) for flat in flats]).isfinite().all())

    def require_in_place(self) -> None:
        """Raise `TaskError` if torch has moved the buckets to other memory, of which the network does not know."""
        if self._current_addresses() != self._addresses:
            raise TaskError(
                "the memory of the model was moved while it is trained: by model.share_memory(), or since it, or part of it, was "
                "sent to another process (torch.multiprocessing). Workers exchange parameters where they were at first. "
                "Share or send a copy (copy.deepcopy(model)), and keep it up to date with copy.load_state_dict(model.state_dict())"
            )

    def _current_addresses(self) -> list[int]:
        return [flat.data_ptr() for held in self.buckets for flat in (held.parameters, held.gradients)]

    def bind(self) -> list[str]:
        """Return parameters whose ``data`` was replaced to their buckets, with the new content. Returns their names.

        Raises `TaskError` if the buckets themselves have been moved."""
        self.require_in_place()
        replaced = []
        for held in self.buckets:
            for name, view in zip(held.plan.names, held.parameter_views, strict=True):
                parameter = self.named[name]
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter.data)
                    parameter.data = view
                    replaced.append(name)
        return replaced

    def sample_parameters(self, most: int = 64, *, without: Collection[int] = ()) -> Tensor:
        """A few elements of each bucket of parameters (not of those ``without``), always the same ones: one dimension, float64."""
        flats = [held.parameters for number, held in enumerate(self.buckets) if number not in without]
        if not flats:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([flat[:: -(-flat.numel() // most)].double() for flat in flats])

    def flat_parameters(self) -> list[Tensor]:
        """Each bucket's parameters: one dimension, the bucket's dtype."""
        return [held.parameters for held in self.buckets]

    def publish(self) -> None:
        """The compute side has changed the parameters: make the change visible to the network."""
        if self.staging is not None:
            for held in self.buckets:
                self.staging.to_host(held.parameters, held.host_parameters, nothing)
        self.synchronize()

    def fetch(self, bucket: int) -> None:
        """Copy what the exchange has written to a bucket into the memory that the compute side reads."""
        held = self.buckets[bucket]
        if held.arrive is not None:
            held.arrive()
            held.arrive = None

    def synchronize(self) -> None:
        """Wait until all copies have ended."""
        if self.staging is not None:
            self.staging.synchronize()

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for held in self.buckets:
            yield from zip(held.plan.names, held.views, strict=True)


def nothing() -> None:
    """Called at the end of a copy for which nothing waits."""


def views_of(plan: BucketPlan, flat: Tensor, named: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The plan's parameters as views of ``flat``, each in its own shape."""
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
