"""Operators that give another shape: views of what is there, and joins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zmqtrain.parallel.placed.dispatch import become, freed, on_whole, result_like, rule
from zmqtrain.parallel.placed.tensor import Placed, World, local_sizes
from zmqtrain.parallel.placement import Divisions, Placement, changed, remembered

aten = torch.ops.aten


def _viewed(value: Placed, local: Tensor, placement: Placement, shape: Sequence[int], strides: Sequence[int]) -> Placed:
    """A view of ``value`` with these strides; where its part had to be copied, changes of one are none of the other."""
    own = value.local
    shares = local.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() if not own.is_meta else True
    if not shares and local.numel():
        value.kin.parted = True
    return Placed(local, placement, tuple(shape), value.world, value.kin, strides=strides)


def _whole_along(world: World, value: Placed, dimensions: Sequence[int]) -> None:
    """Bring together what is divided along these dimensions, for a view of it."""
    placement = freed(value, dimensions, keep_summands=True)
    if placement != value.placement:
        become(world, value, placement)


def moved(placement: Placement, order: Mapping[int, int]) -> Placement:
    """The placement where dimension ``d`` has become ``order[d]``."""
    return changed(
        placement,
        divided=None if placement.divided is None else order[placement.divided],
        sample_dimension=None if placement.sample_dimension is None else order[placement.sample_dimension],
        across=None if placement.across is None else order[placement.across],
    )


@rule(aten._conj.default, aten._neg_view.default, both=True)
def turned(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Conjugate or negative numbers, which torch computes when they are asked for, and a divided tensor at once."""
    return result_like(args[0], func(args[0].local), view=True)


@rule(aten.permute.default, both=True)
def permuted(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Dimensions in another order."""
    value: Placed = args[0]
    order = [each % value.dim() for each in args[1]]
    placement = moved(value.placement, {old: new for new, old in enumerate(order)})
    return _viewed(
        value, func(value.local, order), placement, [value.shape[each] for each in order], [value.stride(each) for each in order]
    )


@rule(aten.transpose.int, aten.t.default, both=True)
def transposed(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Two dimensions have changed places."""
    value: Placed = args[0]
    one, other = (each % value.dim() for each in args[1:]) if len(args) > 1 else (0, value.dim() - 1)
    order = list(range(value.dim()))
    if order:
        order[one], order[other] = order[other], order[one]
    return permuted(world, aten.permute.default, [value, order], {})


@rule(aten.unsqueeze.default, both=True)
def unsqueezed(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A new dimension of 1."""
    value: Placed = args[0]
    new = args[1] % (value.dim() + 1)
    placement = moved(value.placement, {old: old + (old >= new) for old in range(value.dim())})
    shape = list(value.shape)
    shape.insert(new, 1)
    strides = list(value.stride())
    strides.insert(new, value.shape[new] * value.stride(new) if new < value.dim() else 1)
    return _viewed(value, func(value.local, new), placement, shape, strides)


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, both=True)
def squeezed(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Dimensions of 1 are left out."""
    value: Placed = args[0]
    if len(args) == 1:
        dimensions = list(range(value.dim()))
    else:
        dimensions = [each % max(value.dim(), 1) for each in (args[1] if isinstance(args[1], list | tuple) else [args[1]])]
    gone = [each for each in dimensions if value.dim() and value.shape[each] == 1]
    _whole_along(world, value, gone)
    stay = [each for each in range(value.dim()) if each not in gone]
    placement = moved(value.placement, {old: new for new, old in enumerate(stay)})
    local = value.local.squeeze(gone) if gone else value.local.view(value.local.shape)
    return _viewed(value, local, placement, [value.shape[each] for each in stay], [value.stride(each) for each in stay])


@rule(aten.expand.default, both=True)
def expanded(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Dimensions of 1 repeated, and new ones before them."""
    value: Placed = args[0]
    sizes, added = list(args[1]), len(args[1]) - value.dim()
    shape = [value.shape[each - added] if size == -1 else size for each, size in enumerate(sizes)]
    grown = [each for each in range(value.dim()) if value.shape[each] != shape[each + added]]
    _whole_along(world, value, grown)
    placement = moved(value.placement, {old: old + added for old in range(value.dim())})
    local = func(value.local, list(local_sizes(placement, shape, world)))
    strides = [0] * added + [0 if each in grown else value.stride(each) for each in range(value.dim())]
    return _viewed(value, local, placement, shape, strides)


@rule(aten.select.int, both=True)
def selected(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One index of a dimension."""
    value: Placed = args[0]
    along = args[1] % value.dim()
    _whole_along(world, value, [along])
    placement = moved(value.placement, {old: old - (old > along) for old in range(value.dim())})
    shape = [size for each, size in enumerate(value.shape) if each != along]
    strides = [step for each, step in enumerate(value.stride()) if each != along]
    return _viewed(value, func(value.local, along, args[2]), placement, shape, strides)


@rule(aten.slice.Tensor, both=True)
def sliced(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A range of a dimension."""
    value: Placed = args[0]
    along = (args[1] if len(args) > 1 else 0) % value.dim()
    size = value.shape[along]
    start, stop, step = slice(*(args[2] if len(args) > 2 else None, args[3] if len(args) > 3 else None),
                              args[4] if len(args) > 4 else 1).indices(size)  # fmt: skip
    if (start, step) == (0, 1) and stop >= size:
        return _viewed(value, aten.alias.default(value.local), value.placement, value.shape, value.stride())
    _whole_along(world, value, [along])
    shape = list(value.shape)
    shape[along] = len(range(start, stop, step))
    strides = [each * step if number == along else each for number, each in enumerate(value.stride())]
    return _viewed(value, func(value.local, along, *args[2:]), value.placement, shape, strides)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unbind.int, both=True)
def pieces(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Parts of a dimension, one after the other."""
    value: Placed = args[0]
    given = list(args[1:]) + [kwargs[key] for key in ("dim",) if key in kwargs]
    if func is aten.unbind.int:
        along = (given[0] if given else 0) % value.dim()
        return [selected(world, aten.select.int, [value, along, each], {}) for each in range(value.shape[along])]
    along = (given[1] if len(given) > 1 else 0) % value.dim()
    size = value.shape[along]
    lengths = (
        given[0] if isinstance(given[0], list | tuple) else [min(given[0], size - start) for start in range(0, size, given[0] or 1)]
    )
    found, start = [], 0
    for length in lengths or [0]:
        found.append(sliced(world, aten.slice.Tensor, [value, along, start, start + length], {}))
        start += length
    return found


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default, both=True)
def viewed(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The elements in their order under other sizes."""
    value: Placed = args[0]
    shape = completed(args[1], math.prod(value.shape))
    if shape == tuple(value.shape):
        return _viewed(value, aten.alias.default(value.local), value.placement, shape, value.stride())
    placement, whole = reshaped(value.placement, tuple(value.shape), shape)
    if whole:
        _whole_along(world, value, whole)
        placement, _ = reshaped(value.placement, tuple(value.shape), shape)
    sizes = local_sizes(placement, shape, world)
    own = value.local
    local = own.reshape(sizes)
    if value.kin.count == 1 and not own.is_meta and local.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
        value.local = local.view(own.shape)  # another layout of the part, so that the view is one
    return _viewed(value, local, placement, shape, _strides_of_view(value.shape, value.stride(), shape))


@lru_cache(maxsize=4096)
def _strides_of_view(before: tuple[int, ...], strides: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """Those that one process would have; row by row where it would have to copy."""
    return torch.empty_strided(before, strides, device="meta").reshape(after).stride()


def completed(sizes: Sequence[int], numel: int) -> tuple[int, ...]:
    """Sizes of which one may be -1."""
    known = math.prod(size for size in sizes if size != -1)
    return tuple(numel // known if size == -1 and known else size for size in sizes)


@remembered
def reshaped(placement: Placement, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Placement, list[int]]:
    """The placement after a view, and the dimensions that must be whole before it where parts would be no ranges of it."""
    whole: list[int] = []
    changes: dict[str, Any] = {}
    if placement.divided is not None:
        there = _followed(placement.divided, placement.divisions, before, after)
        if there is None:
            whole.append(placement.divided)
        else:
            changes.update(divided=there[0], divisions=there[1])
    if placement.across is not None:
        beside = _followed(placement.across, placement.across_divisions, before, after)
        if beside is None or whole or beside[0] == changes["divided"]:
            assert placement.divided is not None
            whole = [placement.divided, placement.across]
        else:
            changes.update(across=beside[0], across_divisions=beside[1])
    if placement.sample_dimension is not None:
        samples = _samples_followed(placement.sample_dimension, placement.sample_unit, before, after)
        if samples is None:
            whole.append(placement.sample_dimension)
        elif samples[0] in (changes.get("divided"), changes.get("across")):
            whole += [each for each in (placement.divided, placement.across) if each is not None]
        else:
            changes.update(sample_dimension=samples[0], sample_unit=samples[1])
    return (placement, whole) if whole else (changed(placement, **changes), whole)


def _followed(dimension: int, ranges: Divisions, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, Divisions] | None:
    """Where a divided dimension is after a view, and its ranges; ``None`` where the parts are no ranges of one dimension."""
    outer, inner = math.prod(before[:dimension]), math.prod(before[dimension + 1 :])
    if before[dimension] == 1 and (same := _ones(after, outer)[_ones(before, outer).index(dimension) :]):
        return same[0], ranges
    passed = 1
    for new, size in enumerate(after):
        if passed == outer and size != 1:
            within = math.prod(after[new + 1 :])  # elements of one index of the new dimension
            if size * within != before[dimension] * inner:
                return None
            scaled = [(start * inner, stop * inner) for start, stop in ranges]
            if any(start % within or stop % within for start, stop in scaled):
                return None
            return new, tuple((start // within, stop // within) for start, stop in scaled)
        passed *= size
        if passed > outer:
            return None
    return None


def _samples_followed(dimension: int, unit: int, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, int] | None:
    """The same for that with samples, and the unit there. A single sample is where several would be, as far as sizes say."""
    outer, single = math.prod(before[:dimension]), before[dimension] == unit
    if single and unit > 1 and (ones := _ones(after, outer)):
        return ones[0], 1
    found = _followed(dimension, ((0, unit),), before, after)
    if found is None or (single and unit == 1 != after[found[0]] and found[0] == len(after) - 1):
        return None  # features
    return found[0], found[1][0][1]


def _ones(shape: Sequence[int], outer: int) -> list[int]:
    """Dimensions of 1 that come after ``outer`` elements of those before them."""
    return [each for each, size in enumerate(shape) if size == 1 and math.prod(shape[:each]) == outer]


@rule(aten.cat.default, both=True)
def joined(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Tensors one after the other along a dimension, which must be whole."""
    values = [each for each in args[0] if not (each.dim() == 1 and each.shape[0] == 0)]
    if not values:
        return NotImplemented
    along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % values[0].dim()
    placed = [each for each in values if isinstance(each, Placed)]
    if not placed:
        return NotImplemented
    leader = max(
        (freed(each, [along]) for each in placed), key=lambda each: (each.divided is not None, each.sample_dimension is not None)
    )
    local = [_laid(world, each, leader) for each in values]
    shape = list(values[0].shape)
    shape[along] = sum(each.shape[along] for each in values)
    return Placed(func(local, along), leader, tuple(shape), world)


@rule(aten.stack.default, both=True)
def stacked(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Tensors one after the other along a new dimension."""
    along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (args[0][0].dim() + 1)
    raised = [each.unsqueeze(along) for each in args[0]]
    return joined(world, aten.cat.default, [raised, along], {})


def _laid(world: World, value: Tensor, placement: Placement) -> Tensor:
    return world.relaid(value, placement) if isinstance(value, Placed) else world.cut(value, placement)


@rule(aten.repeat.default, both=True)
def repeated(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Copies one after the other along some dimensions, which must be whole."""
    value: Placed = args[0]
    times, added = list(args[1]), len(args[1]) - value.dim()
    placement = freed(value, [each for each in range(value.dim()) if times[each + added] != 1])
    local = func(world.relaid(value, placement), times)
    shape = [times[each] * (value.shape[each - added] if each >= added else 1) for each in range(len(times))]
    return Placed(local, moved(placement, {old: old + added for old in range(value.dim())}), tuple(shape), world)


@rule(aten.select_backward.default, aten.slice_backward.default, both=True)
def put_back(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradient of what a range was taken of: zeros around that of the range."""
    value, shape, along = args[0], list(args[1]), args[2] % len(args[1])
    if not isinstance(value, Placed):
        return NotImplemented
    if func is aten.select_backward.default:
        value = unsqueezed(world, aten.unsqueeze.default, [value, along], {})
        start = args[3] % shape[along]
        given = [start, start + 1, 1]
    else:
        given = list(args[3:6])
    if slice(*given).indices(shape[along]) == (0, shape[along], 1):
        return Placed(value.local.clone(), value.placement, tuple(shape), world)
    placement = freed(value, [along], keep_summands=True)
    local = world.relaid(value, placement)
    sizes = list(local.shape)
    sizes[along] = shape[along]
    return Placed(aten.slice_backward.default(local, sizes, along, *given), placement, tuple(shape), world)


@rule(aten.as_strided.default, both=True)
def restrided(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view by its strides: only of a whole tensor that lies in memory as one process has it."""
    value: Placed = args[0]
    if tuple(args[1]) == tuple(value.shape) and tuple(args[2]) == value.stride() and not (args[3] if len(args) > 3 else 0):
        return _viewed(value, aten.alias.default(value.local), value.placement, value.shape, value.stride())
    become(world, value, world.whole_of(value.placement.grid))
    if value.local.stride() != value.stride():
        local = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.local.device)
        value.local = local.copy_(value.local)
        value.kin.parted = value.kin.parted or value.kin.count > 1
    return on_whole(world, func, args, kwargs)
