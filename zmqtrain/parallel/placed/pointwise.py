"""Operators that compute each element by itself, of one tensor or of several that are broadcast against one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zmqtrain.parallel.placed.dispatch import become, changing, result_like, rule
from zmqtrain.parallel.placed.tensor import Placed, World, dense
from zmqtrain.parallel.placement import Placement, changed

aten = torch.ops.aten

#: Of sums, the sum of what it gives for the summands; of a sum and a number it is not.
LINEAR = {aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor}
#: Of one sum and numbers.
LINEAR_BY_NUMBERS = {
    *(aten.neg.default, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.mul_.Tensor, aten.div_.Tensor),
}


def pointwise(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What lies most divided stays so; the others are cut to it, which sends nothing where they are whole."""
    in_place, writes = _changes(func)
    if writes and not in_place:
        return NotImplemented  # out=
    alike = _alike(args, kwargs)
    if alike is not None:
        first, own = alike
        if in_place:
            changing(first)
            func(*own, **kwargs)
            return first
        found = func(*own, **kwargs)
        if isinstance(found, Tensor):
            return result_like(first, found)
        return pytree.tree_map(lambda leaf: result_like(first, leaf) if isinstance(leaf, Tensor) else leaf, found)
    form = None  # plain arguments, one after the other
    flat = list(args)
    if kwargs or any(isinstance(each, list | tuple) for each in args):
        flat, form = pytree.tree_flatten((list(args), dict(kwargs)))
    given = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    shape = _common_shape([tuple(each.shape) for each in given])
    placed = [each for each in given if isinstance(each, Placed)]
    if not _stay_summands(func, args, given):
        placed_on = [_without_summands(each) for each in placed]
    else:
        placed_on = [each.placement for each in placed]
    if in_place:
        target = args[0]
        if not isinstance(target, Placed):
            return NotImplemented
        if target.placement != placed_on[0]:
            become(world, target, placed_on[0])
        changing(target)
        leader = target.placement
    else:
        leader = _leader(placed, placed_on, shape)
    local = [
        _part(world, leaf, leader, shape, func) if isinstance(leaf, Tensor) else leaf
        for leaf in flat
    ]  # fmt: skip
    local_args, local_kwargs = (local, {}) if form is None else pytree.tree_unflatten(local, form)
    result = func(*local_args, **local_kwargs)
    if in_place:
        return args[0]
    like = next((each for each in given if tuple(each.shape) == shape), None)
    strides = None if like is None or like.is_contiguous() else dense(shape, like.stride())
    if isinstance(result, Tensor):
        return Placed(result, leader, shape, world, strides=strides)
    return pytree.tree_map(
        lambda leaf: Placed(leaf, leader, shape, world, strides=strides) if isinstance(leaf, Tensor) else leaf, result
    )


@cache
def _changes(func: Any) -> tuple[bool, bool]:
    """Whether an operator changes its first argument, and whether it writes to any."""
    name = func._schema.name
    return name.endswith("_") and not name.endswith("__"), func._schema.is_mutable


def _alike(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Placed, list[Any]] | None:
    """The first of an operator's tensors, and its arguments with this process's parts, where all lie alike and nothing is to be
    sent or cut; ``None`` where one does not."""
    first = args[0]
    if not isinstance(first, Placed) or first.placement.summands != "none":
        return None
    own: list[Any] = [first.local]
    for each in args[1:]:
        if isinstance(each, Tensor):
            if not isinstance(each, Placed) or each.shape != first.shape:
                return None
            if each.placement is not first.placement and each.placement != first.placement:
                return None
            own.append(each.local)
        elif isinstance(each, list | tuple):
            return None
        else:
            own.append(each)
    if any(isinstance(each, Tensor) for each in kwargs.values()):
        return None
    return first, own


def _common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What these shapes are broadcast to. Torch's own takes ten times as long, and refuses what cannot be."""
    if all(shape == shapes[0] for shape in shapes[1:]):
        return shapes[0]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _part(world: World, value: Tensor, leader: Placement, shape: tuple[int, ...], func: Any) -> Tensor:
    if _half(leader, shape, tuple(value.shape)):
        return _half_part(world, value, leader, shape)
    target = broadcast(leader, shape, tuple(value.shape))
    if isinstance(value, Placed):
        return world.relaid(value, target)
    if leader.summands != "none":
        raise AssertionError(f"{func}: summands and {value.shape}")
    return world.cut(value, target)


def _half(leader: Placement, shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether a tensor that is broadcast has one of two divided dimensions."""
    if leader.across is None or leader.divided is None or own == shape:
        return False
    skipped = len(shape) - len(own)
    found = [each >= skipped and own[each - skipped] == shape[each] for each in (leader.divided, leader.across)]
    return found[0] != found[1]


def _half_part(world: World, value: Tensor, leader: Placement, shape: tuple[int, ...]) -> Tensor:
    """This process's part of such a tensor: of what is whole along both, the range of the one."""
    target = broadcast(leader.whole(), shape, tuple(value.shape))
    part = world.relaid(value, target) if isinstance(value, Placed) else world.cut(value, target)
    skipped = len(shape) - value.dim()
    for dimension, (start, stop) in leader.ranges(leader.grid.place(world.rank)[0]).items():
        if dimension >= skipped and value.shape[dimension - skipped] == shape[dimension]:
            part = part.narrow(dimension - skipped, start, stop - start)
    return part


def broadcast(leader: Placement, shape: tuple[int, ...], own: tuple[int, ...]) -> Placement:
    """The placement of a tensor of shape ``own`` that is broadcast to ``shape``, of which ``leader`` says where it lies."""
    if own == shape:
        return leader
    skipped = len(shape) - len(own)

    def within(dimension: int | None) -> int | None:
        if dimension is None or dimension < skipped or own[dimension - skipped] != shape[dimension]:
            return None
        return dimension - skipped

    divided, across, samples = within(leader.divided), within(leader.across), within(leader.sample_dimension)
    assert leader.across is None or (divided is None) == (across is None), (leader, shape, own)
    return changed(
        leader,
        divided=divided,
        divisions=leader.divisions if divided is not None else (),
        sample_dimension=samples,
        samples=leader.samples if samples is not None else "columns",
        sample_unit=leader.sample_unit if samples is not None else 1,
        origin=leader.origin if divided is not None else "",
        across=across,
        across_divisions=leader.across_divisions if across is not None else (),
    )


def lifted(placement: Placement, own: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
    """The placement of what a tensor of shape ``own`` is broadcast to."""
    added = len(shape) - len(own)
    if not added:
        return placement
    return changed(
        placement,
        divided=None if placement.divided is None else placement.divided + added,
        across=None if placement.across is None else placement.across + added,
        sample_dimension=None if placement.sample_dimension is None else placement.sample_dimension + added,
    )


def _leader(placed: Sequence[Placed], placements: Sequence[Placement], shape: tuple[int, ...]) -> Placement:
    candidates = []
    for value, placement in zip(placed, placements, strict=True):
        found = lifted(placement, tuple(value.shape), shape)
        # A dimension of 1 that is broadcast cannot lead the others.
        pairs = ((placement.divided, found.divided), (placement.across, found.across))
        if any(value.shape[old or 0] != shape[new] for old, new in pairs if new is not None):
            found = found.whole()
        if found.sample_dimension is not None and value.shape[placement.sample_dimension or 0] != shape[found.sample_dimension]:
            found = changed(found, sample_dimension=None, samples="columns", sample_unit=1)
        candidates.append(found)
    # Of a column's samples each process has its own share already: that costs no message, and saves the others' work.
    leader = max(candidates, key=lambda each: (each.divided is not None, each.sample_dimension is not None, each.samples == "all"))
    if leader.sample_dimension is None:
        taken = (None, leader.divided, leader.across)
        others = [each for each in candidates if each.sample_dimension not in taken and each.grid == leader.grid]
        for other in others:
            if other.samples == "columns" and leader.divided is not None:
                return changed(leader, sample_dimension=other.sample_dimension, sample_unit=other.sample_unit)
    return leader


def _stay_summands(func: Any, args: Sequence[Any], given: Sequence[Tensor]) -> bool:
    """Whether the operator may be computed on summands."""
    kinds = {each.placement.summands if isinstance(each, Placed) else "none" for each in given}
    if kinds == {"none"}:
        return True
    if len(given) == 1:
        return func in LINEAR_BY_NUMBERS
    same = len({each.placement for each in given if isinstance(each, Placed)}) == 1 and len({each.shape for each in given}) == 1
    return func in LINEAR and len(kinds) == 1 and same


def _without_summands(value: Placed) -> Placement:
    found = value.placement
    return found if found.summands == "none" else changed(found, summands="none")


@rule(aten.detach.default, aten.alias.default, both=True)
def same_memory(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Another tensor in the same memory."""
    return result_like(args[0], func(args[0].local), view=True)


@rule(aten.clone.default, aten._to_copy.default, aten.contiguous.default, aten.lift_fresh.default, both=True)
def copied(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same in memory of its own."""
    value, dtype = args[0], kwargs.get("dtype")
    if dtype is not None and not dtype.is_floating_point and not dtype.is_complex and value.placement.summands != "none":
        become(world, value, _without_summands(value))  # rounding is of the sum
    kept = func is not aten.contiguous.default and kwargs.get("memory_format") in (None, torch.preserve_format)
    found = func(value.local, *args[1:], **kwargs)
    return result_like(value, found) if kept else Placed(found, value.placement, tuple(value.shape), world)


@rule(aten.copy_.default, both=True)
def copied_into(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Into a tensor that lies as it does; or into a plain one, the whole."""
    target, source = args[0], args[1]
    if not isinstance(target, Placed):
        return func(target, world.whole(source), *args[2:], **kwargs)
    if target.placement.summands != "none":
        become(world, target, changed(target.placement, summands="none"))
    changing(target)
    local = _part(world, source, target.placement, tuple(target.shape), func)
    func(target.local, local, *args[2:], **kwargs)
    return target


@rule(
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    *(aten.zero_.default, aten.fill_.Scalar),
    both=True,
)
def filled(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What does not depend on values: each process's part by itself."""
    value: Placed = args[0]
    placement = changed(value.placement, summands="none")
    if func._schema.is_mutable:
        changing(value)
        func(value.local, *args[1:], **kwargs)
        value.placement = placement  # nothing is left of the summands
        return value
    return Placed(func(value.local, *args[1:], **kwargs), placement, tuple(value.shape), world)


@rule(
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.new_empty_strided.default),
    both=True,
)
def made(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of the same shape it lies in the same way; of any other it is whole on every process."""
    value: Placed = args[0]
    shape = tuple(args[1])
    if func is aten.new_empty_strided.default:
        func, args = aten.new_empty.default, [value, list(shape)]
    if shape == tuple(value.shape):
        local = func(value.local, list(value.local.shape), *args[2:], **kwargs)
        return Placed(local, changed(value.placement, summands="none"), shape, world)
    local = func(value.local, list(shape), *args[2:], **kwargs)
    return Placed(local, world.whole_of(value.placement.grid), shape, world)


@rule(aten.is_same_size.default, both=True)
def same_size(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The rule of ``aten::is_same_size``: compares the shapes of the whole tensors."""
    return args[0].shape == args[1].shape
