"""Operators along dimensions: sums, softmax, sorting; and statistics of norms with their gradients.

Along a dimension that is whole each process computes its own part. A sum along a divided one gives summands, which are added up
when they are needed; everything else brings the dimension together first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zmqtrain.parallel.placed.dispatch import RULES, freed, rule
from zmqtrain.parallel.placed.pointwise import _leader, _part
from zmqtrain.parallel.placed.tensor import Placed, World
from zmqtrain.parallel.placed.views import moved
from zmqtrain.parallel.placement import Placement, Summands, changed

aten = torch.ops.aten


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operator by name, defaults included."""
    found: dict[str, Any] = {}
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            found[argument.name] = args[number]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def normal(dimensions: Any, count: int) -> list[int]:
    """Dimensions counted from the first; none given means all."""
    if dimensions is None or (isinstance(dimensions, list | tuple) and not dimensions):
        return list(range(count))
    given = dimensions if isinstance(dimensions, list | tuple) else [dimensions]
    return [each % count for each in given] if count else []


def without(placement: Placement, gone: Sequence[int], count: int, *, keepdim: bool) -> Placement:
    """The placement after dimensions that are whole have been reduced."""
    if keepdim:
        return placement
    stay = [each for each in range(count) if each not in gone]
    return moved(placement, {old: new for new, old in enumerate(stay)})


def reduced_shape(shape: Sequence[int], gone: Sequence[int], *, keepdim: bool) -> tuple[int, ...]:
    """The shape after that."""
    return tuple(1 if each in gone else size for each, size in enumerate(shape) if keepdim or each not in gone)


def summed(placement: Placement, gone: Sequence[int]) -> Placement:
    """The placement of sums over these dimensions: summands where one of them was divided."""
    over_rows = placement.divided is not None and placement.divided in gone
    over_samples = placement.sample_dimension is not None and placement.sample_dimension in gone
    summands: Summands = "none"
    if over_samples and (over_rows or placement.samples == "all"):
        summands = "all"
    elif over_samples:
        summands = "row"
    elif over_rows:
        summands = "column"
    found = placement
    assert placement.across is None or over_rows == (placement.across in gone), "bring one of two divided dimensions together first"
    if over_rows:
        found = found.whole()
    if over_samples:
        found = changed(found, samples="columns", sample_dimension=None, sample_unit=1)
    return changed(found, summands=summands)


@rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, both=True)
def sums(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The rule of sums and means over dimensions."""
    given = arguments(func, args, kwargs)
    value: Placed = given["self"]
    keepdim, dtype = bool(given.get("keepdim", False)), given.get("dtype")
    gone = normal(given.get("dim"), value.dim())
    if value.placement.across is not None and (value.placement.divided in gone) != (value.placement.across in gone):
        there = freed(value, gone)
        value = Placed(world.relaid(value, there), there, tuple(value.shape), world)
    placement = summed(changed(value.placement, summands="none"), gone)
    if value.placement.summands != "none":
        if placement.summands != "none":
            local, placement = world.relaid(value, changed(value.placement, summands="none")), placement
        else:
            local, placement = value.local, changed(placement, summands=value.placement.summands)
    else:
        local = value.local
    if not local.is_floating_point() and not local.is_complex() and dtype is None:
        dtype = torch.int64
    found = local.sum(gone, keepdim=keepdim, dtype=dtype) if value.dim() else local.to(dtype or local.dtype)
    if "mean" in func.name():
        found = found / max(math.prod(value.shape[each] for each in gone), 1)
    placement = without(placement, gone, value.dim(), keepdim=keepdim)
    return Placed(found, placement, reduced_shape(value.shape, gone, keepdim=keepdim), world)


def along(*names: str, sizes: Callable[[dict[str, Any], tuple[int, ...]], tuple[int, ...]] | None = None) -> Any:
    """The rule of operators that work along a dimension, of one tensor or several of a shape: it is brought together first.

    ``names``: of the arguments that say along which.
    """

    def run(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = arguments(func, args, kwargs)
        values = [each for each in pytree.tree_leaves((list(args), dict(kwargs))) if isinstance(each, Tensor)]
        shape = tuple(values[0].shape)
        if any(tuple(each.shape) != shape for each in values) or func._schema.is_mutable:
            return NotImplemented
        dimensions = [each for name in names for each in normal(given.get(name), len(shape))]
        leader = _whole_leader(values, dimensions, shape)
        local = pytree.tree_map(
            lambda leaf: _part(world, leaf, leader, shape, func) if isinstance(leaf, Tensor) else leaf, (list(args), dict(kwargs))
        )
        result = func(*local[0], **local[1])
        return pytree.tree_map(lambda leaf: _along_result(leaf, leader, dimensions, shape, world), result)

    return run


def _whole_leader(values: Sequence[Tensor], dimensions: Sequence[int], shape: tuple[int, ...]) -> Placement:
    placed = [each for each in values if isinstance(each, Placed)]
    return _leader(placed, [freed(each, dimensions) for each in placed], shape)


def _along_result(leaf: Any, leader: Placement, dimensions: Sequence[int], shape: tuple[int, ...], world: World) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == len(shape):
        full = [leaf.shape[each] if each in dimensions else size for each, size in enumerate(shape)]
        return Placed(leaf, leader, tuple(full), world)
    placement = without(leader, dimensions, len(shape), keepdim=False)
    return Placed(leaf, placement, reduced_shape(shape, dimensions, keepdim=False), world)


for operator in (
    *(
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    ),
    *(aten._safe_softmax.default, aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.sort.default),
    *(aten.sort.stable, aten.topk.default, aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default),
    *(aten.argmin.default, aten.prod.dim_int, aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims, aten.logsumexp.default),
    *(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim),
    *(aten.median.dim, aten.kthvalue.default, aten.glu.default),
):
    if operator not in RULES:
        rule(operator, both=True)(along("dim"))
for operator in (aten.flip.default, aten.roll.default):
    rule(operator, both=True)(along("dims"))


@rule(aten.triu.default, aten.tril.default, aten.triu_.default, aten.tril_.default, both=True)
def triangle(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The upper or lower triangle of the last two dimensions, which must be whole."""
    value: Placed = args[0]
    if func._schema.is_mutable:
        return NotImplemented
    placement = freed(value, [value.dim() - 1, value.dim() - 2])
    return Placed(func(world.relaid(value, placement), *args[1:]), placement, tuple(value.shape), world)


@rule(
    *(aten.constant_pad_nd.default, aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
    both=True,
)
def padded(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """More elements at the ends of the last dimensions."""
    value: Placed = args[0]
    more = _added(value, args[1])
    placement = freed(value, list(more))
    shape = [size + more.get(dimension, 0) for dimension, size in enumerate(value.shape)]
    return Placed(func(world.relaid(value, placement), *args[1:], **kwargs), placement, tuple(shape), world)


@rule(
    *(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default),
    *(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default),
    both=True,
)
def padded_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradient of what was padded with itself."""
    gradient, value, pad = args
    leader = freed(gradient if isinstance(gradient, Placed) else value, list(_added(value, pad)))
    own = [_part(world, each, leader, tuple(each.shape), func) for each in (gradient, value)]
    return Placed(func(*own, pad, **kwargs), leader, tuple(value.shape), world)


def _added(value: Tensor, pad: Sequence[int]) -> dict[int, int]:
    """How much longer dimensions become, by dimension."""
    ends = [pad[2 * number : 2 * number + 2] for number in range(len(pad) // 2)]
    return {value.dim() - 1 - number: sum(each) for number, each in enumerate(ends) if any(each)}


@rule(
    *(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default, aten.native_channel_shuffle.default),
    *(aten.im2col.default, aten.col2im.default),
    both=True,
)
def of_samples(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is made of each sample (the first dimension) by itself."""
    value: Placed = args[0]
    if value.dim() < (3 if func is aten.col2im.default else 4):
        return NotImplemented  # a single sample
    placement = freed(value, range(1, value.dim()))
    local = world.relaid(value, placement)
    given = local if local.shape[0] else local.new_zeros((1, *local.shape[1:]))  # torch gives other shapes where there is nothing
    found = func(given, *args[1:], **kwargs)
    return Placed(found[: local.shape[0]], placement, (value.shape[0], *found.shape[1:]), world)


@rule(aten.native_layer_norm.default, both=True)
def layer_norm(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Each process its own vectors."""
    value, sizes, weight, bias, eps = args
    if not isinstance(value, Placed):
        return NotImplemented
    first = value.dim() - len(sizes)
    placement = freed(value, range(first, value.dim()))
    local = func(world.relaid(value, placement), sizes, _all(world, weight), _all(world, bias), eps)
    shapes = [tuple(value.shape), (*value.shape[:first], *[1] * len(sizes))]
    return Placed(local[0], placement, shapes[0], world), *(Placed(each, placement, shapes[1], world) for each in local[1:])


@rule(aten.native_layer_norm_backward.default, both=True)
def layer_norm_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gradients of weights are summands of all who have other vectors."""
    gradient, value, sizes, mean, rstd, weight, bias, mask = args
    shape, first = tuple(value.shape), value.dim() - len(sizes)
    inner = range(first, len(shape))
    leader = _whole_leader([gradient, value], inner, shape)
    own = [_part(world, each, leader, shape, func) for each in (gradient, value)]
    statistics = [_part(world, each, leader, tuple(each.shape), func) for each in (mean, rstd)]
    found = func(own[0], own[1], sizes, *statistics, _all(world, weight), _all(world, bias), mask)
    outer = list(range(first))
    of_weights = without(summed(leader, outer), outer, len(shape), keepdim=False)
    places = [(leader, shape), (of_weights, tuple(sizes)), (of_weights, tuple(sizes))]
    return tuple(None if each is None else Placed(each, *place, world) for each, place in zip(found, places, strict=True))


@rule(aten.native_group_norm.default, both=True)
def group_norm(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Each process its own samples."""
    value, weight, bias, samples, channels, inner, groups, eps = args
    if not isinstance(value, Placed):
        return NotImplemented
    placement = freed(value, range(1, value.dim()))
    local = world.relaid(value, placement)
    found = func(local.contiguous(), _all(world, weight), _all(world, bias), local.shape[0], channels, inner, groups, eps)
    shapes = [tuple(value.shape), (samples, groups), (samples, groups)]
    return tuple(Placed(each, placement, shape, world) for each, shape in zip(found, shapes, strict=True))


@rule(aten.native_group_norm_backward.default, both=True)
def group_norm_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gradients of weights are summands of all who have other samples."""
    gradient, value, mean, rstd, weight, samples, channels, inner, groups, mask = args
    shape = tuple(value.shape)
    leader = _whole_leader([gradient, value], range(1, len(shape)), shape)
    own = [_part(world, each, leader, shape, func).contiguous() for each in (gradient, value)]
    statistics = [_part(world, each, leader, (samples, groups), func) for each in (mean, rstd)]
    found = func(*own, *statistics, _all(world, weight), own[0].shape[0], channels, inner, groups, mask)
    of_weights = without(summed(leader, [0]), [0], 2, keepdim=False)
    places = [(leader, shape), (of_weights, (channels,)), (of_weights, (channels,))]
    return tuple(None if each is None else Placed(each, *place, world) for each, place in zip(found, places, strict=True))


def _all(world: World, value: Any) -> Any:
    return world.whole(value) if isinstance(value, Placed) else value


@rule(aten.any.default, aten.all.default, both=True)
def any_or_all(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Whether any element is true, or all are: a number of each process."""
    value: Placed = args[0]
    place = changed(value.placement, summands="none")
    sums = summed(place, range(value.dim()))
    local = world.relaid(value, place).bool()
    wanted = local.any() if func is aten.any.default else local.logical_not().any()
    count = world.relaid(Placed(wanted.to(torch.int64), sums, (), world), world.whole_of(place.grid))
    return Placed(count > 0 if func is aten.any.default else count == 0, world.whole_of(place.grid), (), world)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, both=True)
def nll_loss(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Each process its own samples; of a mean, the weight of all of them."""
    value, target, weight, reduction, ignored = args
    if value.dim() < 2:
        return NotImplemented
    scores, labels = _scores(world, func, value, target)
    found, total = func(scores[0], labels, _all(world, weight), 2 if reduction else 0, ignored)
    if not reduction:
        whole = world.whole_of(scores[1].grid)
        return Placed(found, without(scores[1], [1], value.dim(), keepdim=False), tuple(target.shape), world), Placed(
            total, whole, (), world
        )
    others = [each for each in range(value.dim()) if each != 1]
    place = without(summed(scores[1], others), range(value.dim()), value.dim(), keepdim=False)
    count = world.relaid(Placed(total, place, (), world), world.whole_of(place.grid))
    found = found / count if reduction == 1 else found
    return Placed(found, place, (), world), Placed(count, world.whole_of(place.grid), (), world)


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, both=True)
def nll_loss_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The rule of the gradient of ``nll_loss``: each process computes that of its own samples."""
    gradient, value, target, weight, reduction, ignored, total = args
    if value.dim() < 2:
        return NotImplemented
    scores, labels = _scores(world, func, value, target)
    if reduction:
        back = _all(world, gradient)
    else:
        back = _part(world, gradient, without(scores[1], [1], value.dim(), keepdim=False), tuple(target.shape), func)
    found = func(back, scores[0], labels, _all(world, weight), reduction, ignored, _all(world, total))
    return Placed(found, scores[1], tuple(value.shape), world)


def _scores(world: World, func: Any, value: Tensor, target: Tensor) -> tuple[tuple[Tensor, Placement], Tensor]:
    """Scores with whole classes, where they lie, and the labels of the same samples."""
    like = value if isinstance(value, Placed) else target
    assert isinstance(like, Placed)
    if isinstance(value, Placed):
        place = freed(value, [1])
    else:
        place = moved(freed(target, []), {old: old + (old >= 1) for old in range(target.dim())})  # type: ignore[arg-type]
    own = _part(world, value, place, tuple(value.shape), func)
    labels = _part(world, target, without(place, [1], value.dim(), keepdim=False), tuple(target.shape), func)
    return (own, place), labels
