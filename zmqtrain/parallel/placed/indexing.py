"""Operators that look elements up: embeddings, gathers, indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.parallel.placed.dispatch import freed, on_whole, rule
from zmqtrain.parallel.placed.pointwise import _leader, _part
from zmqtrain.parallel.placed.tensor import Placed, World
from zmqtrain.parallel.placed.views import moved
from zmqtrain.parallel.placement import Placement, Summands, changed, laid

aten = torch.ops.aten


def _all(world: World, value: Any) -> Any:
    return world.whole(value) if isinstance(value, Placed) else value


@rule(aten.embedding.default)
def embedding(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Each process its own words, in a table that is whole or divided by features."""
    table, words, *rest = args
    if not isinstance(words, Placed):
        placement = freed(table, [0])
        found = func(world.relaid(table, placement), words, *rest)
        order = {0: 0, 1: words.dim()}
        return Placed(found, moved(placement, order), (*words.shape, table.shape[1]), world)
    placement = changed(words.placement, summands="none")
    found = func(_all(world, table), world.relaid(words, placement), *rest)
    return Placed(found, placement, (*words.shape, table.shape[1]), world)


@rule(aten.embedding_dense_backward.default)
def embedding_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Summands of all who have other words."""
    gradient, words, count, padding, by_frequency = args
    if by_frequency:
        return NotImplemented
    shape = (*words.shape, gradient.shape[-1])
    like = words if isinstance(words, Placed) else gradient
    target = freed(like, [gradient.dim() - 1])
    own = _part(world, gradient, target, shape, func)
    own_words = world.relaid(words, target) if isinstance(words, Placed) else world.cut(words, target)
    found = func(own, own_words, count, padding, by_frequency)
    over_rows, over_samples = target.divided is not None, target.sample_dimension is not None
    summands: Summands = "none"
    if over_samples:
        summands = "all" if over_rows or target.samples == "all" else "row"
    elif over_rows:
        summands = "column"
    return Placed(found, laid(target.grid, sample_dimension=None, summands=summands), (count, gradient.shape[-1]), world)


@rule(aten.gather.default)
def gathered(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Along a dimension that is whole, where the others of both are of the same length."""
    value, along, index = args[0], args[1], args[2]
    along %= max(value.dim(), 1)
    if not value.dim() or any(value.shape[each] != index.shape[each] for each in range(value.dim()) if each != along):
        return NotImplemented
    leader = _common([value, index], along)
    own = [_part(world, each, leader, tuple(each.shape), func) for each in (value, index)]
    return Placed(func(own[0], along, own[1], **kwargs), leader, tuple(index.shape), world)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def scattered(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same the other way round."""
    value, along, index, source = args[:4]
    along %= max(value.dim(), 1)
    given = [value, index, *([source] if isinstance(source, Tensor) else [])]
    if not value.dim() or any(len({each.shape[number] for each in given}) > 1 for number in range(value.dim()) if number != along):
        return NotImplemented
    leader = _common(given, along)
    own = [_part(world, each, leader, tuple(each.shape), func) for each in given]
    return Placed(func(own[0], along, own[1], own[2] if len(own) > 2 else source, **kwargs), leader, tuple(value.shape), world)


def _common(given: Sequence[Tensor], along: int) -> Placement:
    """Where all of these can lie, of which only the dimension ``along`` has different lengths."""
    placed = [each for each in given if isinstance(each, Placed)]
    shape = tuple(placed[0].shape)
    return _leader([placed[0]] * len(placed), [freed(each, [along]) for each in placed], shape)


@rule(aten.index_select.default)
def index_selected(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Some indices of a dimension that is whole, the same on all processes."""
    value, along, index = args
    if not isinstance(value, Placed):
        return NotImplemented
    along %= value.dim()
    placement = freed(value, [along])
    shape = list(value.shape)
    shape[along] = index.shape[0] if index.dim() else 1
    return Placed(func(world.relaid(value, placement), along, _all(world, index)), placement, tuple(shape), world)


@rule(aten.index_add.default)
def index_added(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradient of that."""
    value, along, index, source = args[:4]
    if not isinstance(source, Placed):
        return NotImplemented
    along %= source.dim()
    leader = freed(source, [along])
    own = _part(world, value, leader, tuple(value.shape), func)
    found = func(own, along, _all(world, index), world.relaid(source, leader), *args[4:], **kwargs)
    return Placed(found, leader, tuple(value.shape), world)


@rule(aten.index.Tensor)
def indexed(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Elements by tensors of indices, as masks of attention are made: of its own samples, where one of these counts them."""
    value, indices = args
    if not isinstance(value, Placed) or any(isinstance(each, Placed) for each in indices):
        return NotImplemented
    place = freed(value, [each for each in range(value.dim()) if each != value.placement.sample_dimension])
    samples = place.sample_dimension
    if samples is None or place.sample_unit != 1 or not all(isinstance(each, Tensor) for each in indices):
        return NotImplemented
    if len(indices) != value.dim() or any(each.dtype == torch.bool for each in indices):
        return NotImplemented
    shape = torch.broadcast_shapes(*(tuple(each.shape) for each in indices))  # type: ignore[no-untyped-call]
    counts, count = indices[samples], value.shape[samples]
    if counts.numel() != count or not torch.equal(counts.flatten(), torch.arange(count, device=counts.device)):
        return NotImplemented
    along = len(shape) - counts.dim() + next((each for each, size in enumerate(counts.shape) if size == count), 0)
    if not counts.dim() or any(
        each.dim() >= len(shape) - along and each.shape[along - len(shape)] != 1
        for number, each in enumerate(indices)
        if number != samples
    ):
        return NotImplemented
    start, stop = world.block(place, value.shape)[samples]
    own = list(indices)
    sizes = [stop - start if size == count else 1 for size in counts.shape]
    own[samples] = torch.arange(stop - start, device=counts.device).view(sizes)
    found = func(world.relaid(value, place), own)
    return Placed(found, changed(place, sample_dimension=along), tuple(shape), world)


@rule(aten._pack_padded_sequence.default)
def packed(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Times and samples become one dimension, in which a process's samples are no range: all processes compute all of them."""
    data, sizes = on_whole(world, func, args, kwargs)
    return data, world.whole(sizes)  # which torch reads as numbers
