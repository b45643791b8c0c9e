"""Norms wherever samples, channels and strips are: batch norm with the statistics of the whole batch, and those of each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.parallel.communicator import Phase
from zmqtrain.parallel.domain.batch_norm import DomainBatchNorm2d
from zmqtrain.parallel.halo import HEIGHT, WIDTH
from zmqtrain.parallel.model.batch_norm import BatchNorm
from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.layers import at_least_one, helper, lend
from zmqtrain.parallel.placed.parameters import use_of
from zmqtrain.parallel.placed.tensor import Placed, World, from_local, to_local
from zmqtrain.parallel.placement import Placement, Summands, changed, laid


@function(functional.batch_norm, both=True)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`torch.nn.functional.batch_norm`."""
    if not isinstance(input, Placed) or input.dim() < 2:
        return NotImplemented
    world, place = input.world, changed(input.placement, summands="none")
    use = use_of(weight)
    alone = place.sample_dimension is None  # all samples on every process
    if (use is not None and use.choice != "domain") or alone or (place.across is not None and 1 in (place.divided, place.across)):
        place = _by_channels(place)
    if place.sample_dimension not in (None, 0):
        place, alone = world.whole_of(place.grid), True
    channels, parts = _weights(world, place, weight, bias)
    statistics = [_Buffer(each, channels, world) for each in (running_mean, running_var)]
    x = to_local(input, place, world)
    if not training or alone:
        found = functional.batch_norm(x, statistics[0].part, statistics[1].part, parts[0], parts[1], training, momentum, eps)
        for each in statistics if training else ():
            each.keep()
        return from_local(found, place, input.shape, world)
    layer = _layer(world, input, place, statistics[0].part is not None, eps)
    layer.momentum = momentum
    lend(layer, weight=parts[0], bias=parts[1])
    layer._buffers.update(running_mean=statistics[0].part, running_var=statistics[1].part)
    found = layer(x)
    lend(layer, weight=None, bias=None)  # computed tensors, through which the layer would keep its model alive
    for each in statistics:
        each.keep()
    return from_local(found, place, input.shape, world)


def _by_channels(place: Placement) -> Placement:
    """The placement with nothing divided over the rows but channels."""
    return place if place.divided in (None, 1) and place.across is None else place.whole()


def _weights(world: World, place: Placement, *weights: Tensor | None) -> tuple[Placement, list[Tensor | None]]:
    """Where what belongs to channels lies for an image that lies at ``place``, and this process's part of some."""
    channels = laid(place.grid, sample_dimension=None)
    if place.divided == 1:
        channels = changed(channels, divided=0, divisions=place.divisions)
    apart: Summands = "none"
    if place.samples == "all" or place.divided not in (None, 1):
        apart = "all" if place.sample_dimension is not None else "column"
    elif place.sample_dimension is not None:
        apart = "row"
    of_weights = changed(channels, summands=apart)
    return channels, [None if each is None else to_local(each, channels, world, gradient=of_weights) for each in weights]


@function(functional.instance_norm, both=True)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """`torch.nn.functional.instance_norm`: each process its own samples and channels."""
    if not isinstance(input, Placed) or input.dim() < 3:
        return NotImplemented
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    tracked = running_mean is not None or running_var is not None
    count = math.prod(input.shape[2:])
    if _by_statistics(input) and not _only_channels(input.placement):
        found, mean, variance = _normalized(input, input.shape[1], weight, bias, eps)
        if tracked:
            _track(running_mean, running_var, mean, variance, momentum, count / max(count - 1, 1))
        return found
    world, place = input.world, _by_channels(changed(input.placement, summands="none"))
    if place.sample_dimension not in (None, 0):
        place = world.whole_of(place.grid)
    _, parts = _weights(world, place, weight, bias)
    x = to_local(input, place, world)
    given = at_least_one(x, place.sample_dimension)
    own = functional.instance_norm(given, None, None, parts[0], parts[1], True, momentum, eps)
    found = from_local(own.narrow(0, 0, x.shape[0]), place, input.shape, world)
    if tracked:
        with torch.no_grad():
            moments = torch.var_mean(x, tuple(range(2, input.dim())))
        variance, mean = (world.placed(each, place, input.shape[:2]) for each in moments)
        _track(running_mean, running_var, mean, variance, momentum)
    return found


def _track(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Placed, variance: Placed, momentum: float, times: float = 1.0
) -> None:
    """Let running statistics follow those of samples and channels, (samples, channels) each. Both travel in one message.

    ``times``: what the variance is to be multiplied by.
    """
    world, place = mean.world, mean.placement
    with torch.no_grad():
        both = torch.stack([mean.local.sum(0), variance.local.sum(0) * times], 1) / mean.shape[0]
        there = laid(place.grid, sample_dimension=None)
        if place.divided == 1:
            there = changed(there, divided=0, divisions=place.divisions)
        over: Summands = "none" if place.sample_dimension is None else "all" if place.samples == "all" else "row"
        sums = world.placed(both, changed(there, summands=over), (mean.shape[1], 2))
        label = world.label("statistics", "forward")
        of_batch = world.placed(world.relaid(sums, there, label), there, (mean.shape[1], 2))
        parts: dict[Placement, Tensor] = {}
        for number, running in enumerate((running_mean, running_var)):
            if running is None:
                continue
            held = running.placement if isinstance(running, Placed) else world.whole_of(place.grid)
            if held not in parts:
                parts[held] = world.relaid(of_batch, held, label) * momentum
            each = parts[held][:, number]
            running.mul_(1 - momentum).add_(world.placed(each, held, (mean.shape[1],)) if isinstance(running, Placed) else each)


@function(functional.group_norm, both=True)
def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Any:
    """`torch.nn.functional.group_norm` of what is divided: each process its own groups, or sums of statistics."""
    if not isinstance(input, Placed) or input.dim() < 3 or not _by_statistics(input) or input.shape[1] % num_groups:
        return NotImplemented
    world, place, each = input.world, input.placement, input.shape[1] // num_groups
    if not _only_channels(place) or any(start % each or stop % each for start, stop in place.divisions):
        return _normalized(input, num_groups, weight, bias, eps)[0]
    _, parts = _weights(world, place, weight, bias)
    x = to_local(input, place, world)
    if not x.shape[1]:  # a process without channels: what it has of weights is as empty
        return from_local(x + sum(part.sum() for part in parts if part is not None), place, input.shape, world)
    given = at_least_one(x, place.sample_dimension)
    own = functional.group_norm(given, x.shape[1] // each, parts[0], parts[1], eps)
    return from_local(own.narrow(0, 0, x.shape[0]), place, input.shape, world)


def _by_statistics(input: Placed) -> bool:
    """Whether channels or places are divided, of numbers of which torch would sum as precisely."""
    place = input.placement
    known = place.divided is not None and place.sample_dimension == 0 and place.summands == "none"
    if place.across is not None and 1 in (place.divided, place.across):
        return False  # channels and places at once: what belongs to channels would have to be added up over some rows
    return known and input.dtype in (torch.float32, torch.float64)


def _only_channels(place: Placement) -> bool:
    return place.divided == 1 and place.across is None


def _normalized(
    input: Placed, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Placed, Placed]:
    """The norm of parts of channels or of places, which stay as they are: sums of each sample and group travel, twice in forward
    and once in backward. Returns means and variances of (samples, groups), too."""
    world, place = input.world, input.placement
    _, parts = _weights(world, place, weight, bias)
    first = place.ranges(place.grid.place(world.rank)[0]).get(1, (0, 0))[0]
    x = to_local(input, place, world)
    of = torch.arange(first, first + x.shape[1], device=x.device) // (input.shape[1] // groups)
    each = math.prod(input.shape[1:]) // groups
    found, mean, variance = _Normalize.apply(x, *parts, _Sums(world, place, of, groups, each), eps)  # type: ignore[no-untyped-call]
    of_groups = [world.placed(value, laid(place.grid), (input.shape[0], groups)) for value in (mean, variance)]
    return from_local(found, place, input.shape, world), of_groups[0], of_groups[1]


class _Sums:
    """Means over groups of channels, of which each process of a column has some channels or places."""

    def __init__(self, world: World, place: Placement, of: Tensor, groups: int, each: int) -> None:
        """``of``: the group of each of this process's channels. ``each``: elements of a sample's group."""
        self._column = world.fabric.among(world.members(place, "column"))
        self._of, self._groups, self._each, self._world, self._layer = of, groups, each, world, world.layer

    def means(self, values: Sequence[Tensor], phase: Phase) -> list[Tensor]:
        """(samples, groups) of each. All of them travel in one message."""
        sums = [value.sum(tuple(range(2, value.dim()))) for value in values]
        parts = [each.new_zeros(len(each), self._groups).index_add(1, self._of, each) for each in sums]
        label = self._world.label("statistics", phase, self._layer)
        (found,) = self._column.all_reduce(torch.stack(parts) / self._each, label).wait()
        return list(found.unbind(0))

    def by_channel(self, value: Tensor, like: Tensor) -> Tensor:
        """(samples, groups), for each of this process's channels and places."""
        return value.index_select(1, self._of).reshape(*like.shape[:2], *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, sums: _Sums, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        (mean,) = sums.means([x], "forward")
        apart = x - sums.by_channel(mean, x)
        (variance,) = sums.means([apart * apart], "forward")
        scale = (variance + eps).rsqrt()
        apart *= sums.by_channel(scale, x)
        ctx.save_for_backward(apart, scale, weight)
        ctx.sums, ctx.biased = sums, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        ones = [1] * (x.dim() - 2)
        found = apart * weight.reshape(-1, *ones) if weight is not None else apart.clone()
        return found + bias.reshape(-1, *ones) if bias is not None else found, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        apart, scale, weight = ctx.saved_tensors
        sums: _Sums = ctx.sums
        others = (0, *range(2, gradient.dim()))
        of_weight = (gradient * apart).sum(others) if weight is not None else None
        of_bias = gradient.sum(others) if ctx.biased else None
        if weight is not None:
            gradient = gradient * weight.reshape(-1, *[1] * (gradient.dim() - 2))
        mean, along = (sums.by_channel(each, apart) for each in sums.means([gradient, gradient * apart], "backward"))
        return (gradient - mean - apart * along) * sums.by_channel(scale, apart), of_weight, of_bias, None, None


def _layer(world: World, input: Placed, place: Placement, tracked: bool, eps: float) -> Any:
    name, members = world.layer, tuple(range(place.grid.size))

    def make() -> nn.Module:
        if place.divided in (HEIGHT, WIDTH) and place.across is None and input.dim() == 4:
            whole = nn.BatchNorm2d(input.shape[1], eps, affine=False, track_running_stats=tracked, device="meta", dtype=input.dtype)
            among = world.site(place.grid, name).column_group
            every = world.fabric.among(members) if world.statistics == "whole" else None
            found: nn.Module = DomainBatchNorm2d(whole, name, among, place.divisions, statistics=every, recorder=world.recorder)
        else:
            plain = nn.BatchNorm1d(input.shape[1], eps, affine=False, track_running_stats=tracked, device="meta", dtype=input.dtype)
            divisions = place.divisions if place.divided == 1 else None
            every_process = place.samples == "all" or place.divided not in (None, 1)
            found = BatchNorm(plain, world.site(place.grid, name), divisions=divisions, statistics=world.statistics,
                              samples="all" if every_process else "columns")  # fmt: skip
        found._buffers["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)
        return found.train()

    channels = place.divisions if place.divided == 1 else ()
    key = ("batch norm", name, place.grid, place.divided, place.across, channels, place.samples, tracked, eps)
    layer = helper(world, key, make)
    if isinstance(layer, DomainBatchNorm2d):
        layer.divide(place.divisions)
    return layer


class _Buffer:
    """Running statistics of the channels that this process has, and the way back into the module's."""

    def __init__(self, whole: Tensor | None, channels: Placement, world: World) -> None:
        self._whole, self._channels, self._world = whole, channels, world
        self.part: Tensor | None = None
        if isinstance(whole, Placed):
            self.part = world.relaid(whole, channels)
        elif whole is not None:
            self.part = world.cut(whole, channels)

    def keep(self) -> None:
        """What the layer has made of them becomes the module's."""
        whole = self._whole
        if not isinstance(whole, Placed) or self.part is None or self.part is whole.local:
            return
        if whole.placement == self._channels:
            return
        with torch.no_grad():
            found = self._world.placed(self.part, self._channels, whole.shape)
            whole.local.copy_(self._world.relaid(found, whole.placement))
