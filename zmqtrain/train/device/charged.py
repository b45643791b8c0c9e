"""Torch on a device with modelled speed: the arithmetic is real, but a profile says how long it takes.

Time passes layer by layer, so a forward waits for a layer's parameters, and a bucket leaves during backward, when they would on
the real device. Without a profile the device is a nominal one: `NOMINAL_FLOPS`, with two operations per parameter and sample in
the forward and four in the backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zmqtrain.membership.context import RoleContext
from zmqtrain.topology.plan import NOMINAL_FLOPS
from zmqtrain.train.device.noise import Noise
from zmqtrain.train.device.profile import Profile


@dataclass(frozen=True, slots=True)
class LayerTime:
    """How long a layer takes, in seconds, together with the layers without parameters after it: per sample, or for a whole batch of
    any size."""

    forward_s: float
    backward_s: float

    def part(self, share: float) -> LayerTime:
        """The time of a share (0 to 1) of the layer."""
        return LayerTime(self.forward_s * share, self.backward_s * share)


class ChargedTorch(ABC):
    """The part of `zmqtrain.train.device.base.Device` that charges time. Subclasses let it pass, in `spend`."""

    def __init__(self, context: RoleContext) -> None:
        """The device of a worker, as its topology describes it. Raises `UsageError` if its profile cannot be used."""
        compute, seed, rank = context.topology.compute, context.topology.job.seed, context.role.index
        noise = Noise(compute.noise.kind, compute.noise.spread, compute.noise.straggler_chance, compute.noise.straggler_factor)
        self._profile = None if compute.profile is None else Profile.load(compute.profile)
        self._speed_factor: Callable[[int], float] = lambda step: noise.factor(seed, rank, step) * context.slowdown()
        self._micro_batches = compute.accumulate
        self._samples = 0
        self._forwards = 0
        self._hooks: list[RemovableHandle] = []

    @abstractmethod
    def spend(self, seconds: float) -> None:
        """Let this much time pass. Called in the compute thread."""

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sizes: Mapping[str, int] | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Charge the time of this model's layers and of the optimizer's steps. Raises `UsageError` if the profile describes another
        model."""
        modules = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
        own_sizes = {name: sum(p.numel() for p in module.parameters(recurse=False)) for name, module in modules.items()}
        all_sizes = own_sizes if sizes is None else dict(sizes)  # a profile describes the whole model
        times = _nominal(all_sizes) if self._profile is None else _of_profile(self._profile, all_sizes)
        # Where nothing else is known, a divided layer takes the share of the time that it has of the parameters.
        own_shares = {name: own_sizes[name] / all_sizes[name] for name in own_sizes if name in all_sizes} | dict(shares or {})
        layers = [
            _ChargedLayer(self, self._hooks, module, times[name].part(own_shares[name]))
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

        self._hooks += [model.register_forward_pre_hook(begins, with_kwargs=True), model.register_forward_hook(ends)]
        whole = _numel(optimizer)

        def updated(part: Optimizer, *_: object) -> None:  # the optimizer of all parameters, or of one bucket
            self.spend(update_s * self._speed_factor(self._step) * _numel(part) / whole)

        self._hooks.append(optimizer.register_step_post_hook(updated))

    def forget(self) -> None:
        """Charge no more. A parameter whose hook refers to it, by way of this device, would be kept for ever: several runs of one
        process would need the memory of all."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def charge(self, seconds: float) -> None:
        """Charge this much time, multiplied by the batch's samples if the profile's times are per sample. In the compute thread."""
        samples = self._samples if self._profile is None or self._profile.batch_size else 1
        self.spend(seconds * samples * self._speed_factor(self._step))

    @property
    def _step(self) -> int:
        return max(0, self._forwards - 1) // self._micro_batches

    def _begin(self, arguments: tuple[Any, ...], *, training: bool) -> None:
        """The model's forward begins. The first dimension of the first tensor counts the samples."""
        self._forwards += training
        first = next((argument for argument in arguments if isinstance(argument, Tensor) and argument.dim()), None)
        self._samples = 1 if first is None else first.shape[0]


class _ChargedLayer:
    """A module with parameters of its own, and whether its time has been charged."""

    def __init__(self, device: ChargedTorch, hooks: list[RemovableHandle], module: nn.Module, time: LayerTime) -> None:
        """``hooks``: takes those that it registers."""
        self._device, self._time = device, time
        self._forward_due = self._backward_due = False
        hooks.append(module.register_forward_hook(lambda *_: self.forward()))
        # Registered before the replica's own hook, which hands buckets over: a gradient is complete once its time has passed.
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        hooks += [each.register_post_accumulate_grad_hook(lambda _: self._backward()) for each in trained]  # type: ignore[no-untyped-call]

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
    """Times of the layers with parameters. The time of others is added to the layer before (for the first ones, to the layer
    after)."""
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
