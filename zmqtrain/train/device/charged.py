"""Torch on a device that takes its time: the arithmetic is real, how long it takes is a profile's.

Time passes layer by layer, so a forward waits for a layer's parameters, and a bucket leaves during backward, at the moments at
which they would on the real device. Without a profile the device is a nominal one: `NOMINAL_FLOPS`, two operations a parameter and
sample in the forward and twice as many in the backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.membership.context import RoleContext
from zmqtrain.train.device.noise import Noise
from zmqtrain.train.device.profile import Profile

#: Operations a second of the nominal device, about one core's.
NOMINAL_FLOPS = 20e9


@dataclass(frozen=True, slots=True)
class LayerTime:
    """How long a layer takes (and those without parameters behind it), in seconds: a sample, or a whole batch of any size."""

    forward_s: float
    backward_s: float

    def part(self, share: float) -> LayerTime:
        """Of a share of the layer."""
        return LayerTime(self.forward_s * share, self.backward_s * share)


class ChargedTorch(ABC):
    """The part of `zmqtrain.train.device.base.Device` that charges time. Where it passes is for `spend` to say."""

    def __init__(self, context: RoleContext) -> None:
        """The device of a worker, as its topology describes it. Raises `UsageError` where its profile cannot be used."""
        compute, seed, rank = context.topology.compute, context.topology.job.seed, context.role.index
        noise = Noise(compute.noise.kind, compute.noise.spread, compute.noise.straggler_chance, compute.noise.straggler_factor)
        self._profile = None if compute.profile is None else Profile.load(compute.profile)
        self._speed_factor: Callable[[int], float] = lambda step: noise.factor(seed, rank, step) * context.slowdown()
        self._micro_batches = compute.accumulate
        self._samples = 0
        self._forwards = 0

    @abstractmethod
    def spend(self, seconds: float) -> None:
        """In the compute thread: let so much time pass."""

    def watch(self, model: nn.Module, optimizer: Optimizer, sizes: Mapping[str, int] | None = None) -> None:
        """Charge the time of this model's layers, and of the optimizer's steps. Raises `UsageError` where the profile is of another
        model."""
        modules = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
        own_sizes = {name: sum(p.numel() for p in module.parameters(recurse=False)) for name, module in modules.items()}
        all_sizes = own_sizes if sizes is None else dict(sizes)  # a profile is of the whole model
        times = _nominal(all_sizes) if self._profile is None else _of_profile(self._profile, all_sizes)
        # A divided layer takes as much of the time as it has of the parameters.
        layers = [
            _ChargedLayer(self, module, times[name].part(own_sizes[name] / all_sizes[name]))
            for name, module in modules.items()
            if name in times
        ]
        share = sum(own_sizes.values()) / sum(all_sizes.values())
        update_s = 0.0 if self._profile is None else self._profile.update_s * share

        def begins(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._begin((*arguments, *named.values()), training=module.training)
            for layer in layers:
                layer.begin()

        def ends(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            for layer in layers:  # those that are used without being called
                layer.forward()

        model.register_forward_pre_hook(begins, with_kwargs=True)
        model.register_forward_hook(ends)
        whole = _numel(optimizer)

        def updated(part: Optimizer, *_: object) -> None:  # all parameters, or a bucket's
            self.spend(update_s * self._speed_factor(self._step) * _numel(part) / whole)

        optimizer.register_step_post_hook(updated)

    def charge(self, seconds: float) -> None:
        """In the compute thread: work of this length, for each sample where the profile's times are a sample's."""
        samples = self._samples if self._profile is None or self._profile.batch_size else 1
        self.spend(seconds * samples * self._speed_factor(self._step))

    @property
    def _step(self) -> int:
        return max(0, self._forwards - 1) // self._micro_batches

    def _begin(self, arguments: tuple[Any, ...], *, training: bool) -> None:
        """The model's forward begins. Batches come first: the first dimension of the first tensor counts samples."""
        self._forwards += training
        first = next((argument for argument in arguments if isinstance(argument, Tensor) and argument.dim()), None)
        self._samples = 1 if first is None else first.shape[0]


class _ChargedLayer:
    """A module with parameters of its own, and whether its time has been charged."""

    def __init__(self, device: ChargedTorch, module: nn.Module, time: LayerTime) -> None:
        self._device, self._time = device, time
        self._forward_due = self._backward_due = False
        module.register_forward_hook(lambda *_: self.forward())
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                # Before the replica's own hook, which hands buckets over: the gradient is there when its time has passed.
                parameter.register_post_accumulate_grad_hook(lambda _: self._backward())  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._forward_due = self._backward_due = True

    def forward(self) -> None:
        if self._forward_due:
            self._forward_due = False
            self._device.charge(self._time.forward_s)

    def _backward(self) -> None:
        if self._backward_due:
            self._backward_due = False
            self._device.charge(self._time.backward_s)


def _numel(optimizer: Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def _nominal(sizes: dict[str, int]) -> dict[str, LayerTime]:
    return {name: LayerTime(2 * numel / NOMINAL_FLOPS, 4 * numel / NOMINAL_FLOPS) for name, numel in sizes.items()}


def _of_profile(profile: Profile, sizes: dict[str, int]) -> dict[str, LayerTime]:
    """Times of the layers with parameters; the others' count with the one before (the first ones' with the one behind)."""
    profile.check_model(sizes)
    batch = profile.batch_size or 1
    sums: dict[str, list[float]] = {}
    current: str | None = None
    early = [0.0, 0.0]
    for layer in profile.layers:
        if layer.numel:
            current = layer.name
            sums[current], early = [early[0], early[1]], [0.0, 0.0]
        into = early if current is None else sums[current]
        into[0] += layer.forward_s
        into[1] += layer.backward_s
    return {name: LayerTime(forward_s / batch, backward_s / batch) for name, (forward_s, backward_s) in sums.items()}
