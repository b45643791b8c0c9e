"""Layers on images of which each row of the grid has a strip: by the code of `zmqtrain.parallel.domain`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.domain.adaptive import mean_of_parts, output_size
from zmqtrain.parallel.domain.axes import FIRST
from zmqtrain.parallel.domain.layer import Across
from zmqtrain.parallel.domain.make import domain_layer
from zmqtrain.parallel.domain.padding import Pad
from zmqtrain.parallel.domain.upsample import Resize
from zmqtrain.parallel.geometry import even, length, overlap
from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.layers import helper, lend
from zmqtrain.parallel.placed.parameters import Use, use_of
from zmqtrain.parallel.placed.tensor import Placed, World, contributed, from_local, to_local
from zmqtrain.parallel.placement import Divisions, Placement, Range, changed, laid, settled

_CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, type[nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def on_strips(
    world: World,
    x: Tensor,
    target: Placement,
    name: str,
    key: Any,
    make: Callable[[], nn.Module],
    leaves: Mapping[str, Tensor | None],
) -> Any:
    """A layer on this process's strip. ``make``: the ordinary layer, on the meta device.

    ``NotImplemented`` where the layer cannot be divided along the image.
    """
    division, dim = target.divisions, target.divided
    assert dim is not None
    members, beside = _members(world, target)
    across = None
    if target.across is not None:
        across = Across(target.across, world.fabric.among(beside), target.across_divisions)
    try:
        layer = helper(
            world, ("strips", name, key, target.grid, dim, target.across, members, beside),
            lambda: domain_layer(
                make(), name, world.fabric.among(members), division, dim=dim, across=across, recorder=world.recorder
            )[0],
        )  # fmt: skip
        layer.overlap = world.overlap
        out = layer.divide(division) if across is None else layer.divide(division, None, across.division)
    except UsageError as error:
        world.note(name, str(error))
        if world.strict:
            raise
        return NotImplemented
    lend(layer, **leaves)
    found = layer(to_local(x, target, world, gradient=contributed(target) if leaves else None, layer=name))
    shape = [x.shape[0], *found.shape[1:]]
    if out is None:
        placement = target.whole()
    else:
        placement = changed(target, divisions=out)
        shape[dim] = out[-1][1]
    if target.across is not None:
        placement = changed(placement, across_divisions=layer.out_across)
        shape[target.across] = layer.out_across[-1][1]
    return from_local(found, placement, shape, world, gradient=contributed(placement) if leaves else None)


def _members(world: World, place: Placement) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks among which the first dimension is divided, and those among which the second one is."""
    column = place.grid.column(world.rank)
    if place.across is None:
        return column, ()
    parts = len(place.across_divisions)
    first, second = divmod(place.grid.place(world.rank)[0], parts)
    return column[second::parts], column[first * parts : (first + 1) * parts]


def _strips(shape: Sequence[int], use: Use, there: Placement) -> Placement:
    """Where a layer whose plan divides images has those of this shape."""
    assert use.strips is not None
    parts, dimensions = use.strips, len(shape)
    found = laid(use.grid, sample_dimension=there.sample_dimension, sample_unit=there.sample_unit)
    # The height of a volume is the dimension before its width; a sequence has its length alone.
    if dimensions == FIRST + 1 or parts.height == 1:
        return found.along(dimensions - 1, shape[-1])
    if parts.width == 1:
        return found.along(dimensions - 2, shape[-2])
    return changed(
        found,
        divided=dimensions - 2,
        divisions=even(shape[-2], parts.height),
        across=dimensions - 1,
        across_divisions=even(shape[-1], parts.width),
    )


def convolution(input: Tensor, weight: Placed, bias: Tensor | None, given: Mapping[str, Any], use: Use) -> Any:
    """A convolution whose plan divides the image."""
    world = weight.world
    if not isinstance(input, Placed) or input.dim() != weight.dim():
        return NotImplemented
    there = _samples_first(input.placement)
    target = _strips(input.shape, use, there)
    same = there.grid == use.grid and (there.divided, there.across) == (target.divided, target.across)
    if same and len(there.divisions) == len(target.divisions):  # as the layer before has left them
        target = settled(there)

    def make() -> nn.Module:
        out, each, *kernel = weight.shape
        inputs, own = each * given["groups"], {"bias": bias is not None, "device": "meta", "dtype": weight.dtype}
        return _CONVOLUTIONS[len(kernel)](inputs, out, tuple(kernel), **own, **given)

    other = use_of(bias)
    leaves = {"weight": use.leaf, "bias": None if other is None else other.leaf}
    return on_strips(world, input, target, use.layer, ("convolution", repr(given), bias is None), make, leaves)


def _strip_of(input: Any) -> Placement | None:
    """The placement of samples of images that lie in strips; ``None`` of anything else."""
    if not isinstance(input, Placed) or input.placement.summands != "none":
        return None
    place = input.placement
    if place.divided is None or place.sample_dimension not in (None, 0):
        return None
    return place if min(place.divided, FIRST if place.across is None else place.across) >= FIRST else None


def _samples_first(place: Placement) -> Placement:
    """The placement with samples where layers have them, or all of them on every process."""
    return place if place.sample_dimension in (None, 0) else changed(place, samples="columns", sample_dimension=None, sample_unit=1)


def _pool(kind: type[nn.Module], names: tuple[str, ...]) -> Callable[..., Any]:
    def run(input: Tensor, *arguments: Any, **named: Any) -> Any:
        place = _strip_of(input)
        if place is None or not isinstance(input, Placed) or input.dim() != _DIMENSIONS[kind]:
            return _by_channel(input, kind, names, arguments, named)
        settings = dict(zip(names, arguments, strict=False)) | named
        settings = {name: value for name, value in settings.items() if value is not None}
        if settings.get("return_indices"):
            return NotImplemented
        world = input.world
        if place.across is not None and "AdaptiveAvg" in kind.__name__ and set(output_size(kind(**settings))) == {1}:
            column = world.fabric.among(place.grid.column(world.rank))
            mean = mean_of_parts(to_local(input, place, world), math.prod(input.shape[FIRST:]), column, world.layer)
            return from_local(mean, place.whole(), (*input.shape[:FIRST], *mean.shape[FIRST:]), world)
        return on_strips(world, input, place, world.layer, (kind.__name__, repr(settings)), lambda: kind(**settings), {})

    return run


def _by_channel(input: Tensor, kind: type[nn.Module], names: tuple[str, ...], arguments: Any, named: Any) -> Any:
    """Where samples and channels alone are divided, each process pools its own."""
    if not isinstance(input, Placed) or input.dim() < 3 or input.placement.summands != "none":
        return NotImplemented
    dimensions = {input.placement.divided, input.placement.across, input.placement.sample_dimension} - {None, 0, 1}
    if dimensions or input.dim() < _DIMENSIONS[kind]:
        return NotImplemented
    settings = dict(zip(names, arguments, strict=False)) | named
    if settings.get("return_indices"):
        return NotImplemented
    world, place = input.world, input.placement
    local = kind(**settings)(to_local(input, place, world))
    return from_local(local, place, (*input.shape[:2], *local.shape[2:]), world)


_WINDOW = ("kernel_size", "stride", "padding")
_MAX = (*_WINDOW, "dilation", "ceil_mode", "return_indices")
_AVERAGE = (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override")
_POOLS: dict[Any, tuple[type[nn.Module], tuple[str, ...]]] = {
    functional.max_pool2d: (nn.MaxPool2d, (*_WINDOW, "dilation", "ceil_mode", "return_indices")),
    functional.avg_pool2d: (nn.AvgPool2d, _AVERAGE),
    functional.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
    functional.adaptive_max_pool2d: (nn.AdaptiveMaxPool2d, ("output_size", "return_indices")),
    functional.max_pool1d: (nn.MaxPool1d, _MAX),
    functional.avg_pool1d: (nn.AvgPool1d, (*_WINDOW, "ceil_mode", "count_include_pad")),
    functional.max_pool3d: (nn.MaxPool3d, _MAX),
    functional.avg_pool3d: (nn.AvgPool3d, _AVERAGE),
    functional.adaptive_avg_pool1d: (nn.AdaptiveAvgPool1d, ("output_size",)),
    functional.adaptive_avg_pool3d: (nn.AdaptiveAvgPool3d, ("output_size",)),
    functional.lp_pool2d: (nn.LPPool2d, ("norm_type", "kernel_size", "stride", "ceil_mode")),
}
_DIMENSIONS = {kind: int(kind.__name__.rstrip("d")[-1]) + 2 for kind, _ in _POOLS.values()}
for _function, (_kind, _names) in _POOLS.items():
    function(_function, both=True)(_pool(_kind, _names))


@function(functional.interpolate, both=True)
def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """`torch.nn.functional.interpolate`."""
    if not isinstance(input, Placed) or input.placement.summands != "none":
        return NotImplemented
    place, world = input.placement, input.world
    given = {"size": size, "scale_factor": scale_factor, "mode": mode, "align_corners": align_corners,
             "recompute_scale_factor": recompute_scale_factor}  # fmt: skip
    if _strip_of(input) is not None:
        key = ("resize", repr(given), antialias)
        return on_strips(world, input, place, world.layer, key, lambda: Resize(**given, antialias=antialias), {})
    if place.sample_dimension not in (None, 0):
        return NotImplemented
    if place.divided not in (None, 1) or place.across is not None:
        place = place.whole()
    local = functional.interpolate(to_local(input, place, world), **given, antialias=antialias)
    return from_local(local, place, (*input.shape[:2], *local.shape[2:]), world)


@function(
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
    both=True,
)
def transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """A transposed convolution whose plan divides the image."""
    use = use_of(weight)
    place = _strip_of(input)
    if use is None or place is None or use.choice != "domain" or not isinstance(weight, Placed) or input.dim() != weight.dim():
        return NotImplemented
    given = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups, "dilation": dilation}

    def make() -> nn.Module:
        into, each, *kernel = weight.shape
        own = {"bias": bias is not None, "device": "meta", "dtype": weight.dtype}
        return _TRANSPOSED[len(kernel)](into, each * groups, tuple(kernel), **own, **given)

    other = use_of(bias)
    leaves = {"weight": use.leaf, "bias": None if other is None else other.leaf}
    return on_strips(weight.world, input, place, use.layer, ("transposed", repr(given), bias is None), make, leaves)


@function(functional.local_response_norm, both=True)
def local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    """Along channels, which must be whole; places and samples may be divided."""
    if not isinstance(input, Placed) or input.placement.summands != "none":
        return NotImplemented
    world, place = input.world, input.placement
    if 1 in (place.divided, place.across):
        place = place.whole()
    local = functional.local_response_norm(to_local(input, place, world), size, alpha, beta, k)
    return from_local(local, place, input.shape, world)


@function(functional.pad, both=True)
def padded(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """`torch.nn.functional.pad` of strips; of anything else by the rules of its operators."""
    if mode == "circular":
        return _circular(input, pad)
    place = _strip_of(input)
    if place is None or not isinstance(input, Placed) or len(pad) % 2 or len(pad) > 2 * (input.dim() - FIRST):
        return NotImplemented
    if mode != "constant" and len(pad) != 2 * (input.dim() - FIRST):
        return NotImplemented
    ends = [*pad, *[0] * (2 * (input.dim() - FIRST) - len(pad))]
    if not any(any(ends[2 * (input.dim() - 1 - each) :][:2]) for each in place.ranges(0)):
        return NotImplemented  # what is divided stays as it is
    world, given = input.world, (tuple(ends), mode, 0.0 if value is None else value)
    return on_strips(world, input, place, world.layer, ("padding", *given), lambda: Pad(*given), {})


def _circular(input: Tensor, pad: Sequence[int]) -> Any:
    """Around: each end of the image goes to the process that has the other one."""
    if not isinstance(input, Placed) or any(each < 0 for each in pad):
        return NotImplemented
    if len(pad) != 2 * (input.dim() - 2) or any(
        most > input.shape[-1 - number // 2] for number, most in enumerate(pad)
    ):  # fmt: skip
        return NotImplemented
    found: Tensor = input
    for number in range(len(pad) // 2):
        found = _around(found, found.dim() - 1 - number, pad[2 * number], pad[2 * number + 1])
    return found


def _around(input: Tensor, dimension: int, before: int, after: int) -> Tensor:
    """With its last rows once more before the first ones, and these after the last, along one dimension."""
    size = input.shape[dimension]
    place = _strip_of(input)
    if place is None or dimension not in (place.divided, place.across):
        ends = [input.narrow(dimension, size - before, before), input, input.narrow(dimension, 0, after)]
        return torch.cat([each for each in ends if each.shape[dimension]], dimension)
    assert isinstance(input, Placed)
    which = "divisions" if dimension == place.divided else "across_divisions"
    world, division = input.world, getattr(place, which)
    own = place.ranges(place.grid.place(world.rank)[0])[dimension]
    part = to_local(input, place, world)

    def moved(rows: Range, there: Divisions) -> Tensor:
        """Some rows of the image, on the processes that ``there`` gives them to."""
        held = [overlap(each, rows) for each in division]
        cuts = [0, *itertools.accumulate(length(each) for each in held)]
        source = changed(place, **{which: tuple(itertools.pairwise(cuts))})
        first, last = overlap(own, rows)
        shape = [length(rows) if each == dimension else most for each, most in enumerate(input.shape)]
        cut = part.narrow(dimension, first - own[0] if first < last else 0, last - first)
        return to_local(from_local(cut, source, shape, world), changed(place, **{which: there}), world)

    others = len(division) - 1
    parts = [part]
    if before:
        parts.insert(0, moved((size - before, size), ((0, before), *[(before, before)] * others)))
    if after:
        parts.append(moved((0, after), (*[(0, 0)] * others, (0, after))))
    cuts = [0, *(stop + before for _, stop in division[:-1]), size + before + after]
    shape = [cuts[-1] if each == dimension else most for each, most in enumerate(input.shape)]
    return from_local(torch.cat(parts, dimension), changed(place, **{which: tuple(itertools.pairwise(cuts))}), shape, world)
