"""Attention as one operator, where a function of torch calls it: each process its own samples and heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zmqtrain.parallel.placed.dispatch import freed, rule
from zmqtrain.parallel.placed.pointwise import _leader, _part
from zmqtrain.parallel.placed.tensor import Placed, World
from zmqtrain.parallel.placement import Placement, changed

aten = torch.ops.aten


def _place(values: Sequence[Tensor]) -> Placement | None:
    """Where (samples, heads, time, features) lie: time and features whole. ``None`` where some have fewer samples or heads."""
    if len({tuple(each.shape[:2]) for each in values}) > 1:
        return None
    placed = [each for each in values if isinstance(each, Placed)]
    shape = tuple(values[0].shape)
    same = [each for each in placed if tuple(each.shape) == shape] or placed[:1]
    found = _leader(same, [freed(each, [2, 3]) for each in same], tuple(same[0].shape))
    return changed(found, summands="none")


def _own(world: World, values: Sequence[Tensor], place: Placement, func: Any) -> list[Tensor]:
    return [_part(world, each, place, (*each.shape[:2], 0, 0)[: each.dim()], func) for each in values]


def _mask(world: World, mask: Any, place: Placement, query: Tensor, key: Tensor, func: Any) -> Any:
    return None if mask is None else _part(world, mask, place, (*query.shape[:3], key.shape[2]), func)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result, and what its backward needs of the softmax."""
    query, key, value, *rest = args
    place = _place([query, key, value])
    if place is None or (rest and rest[0]):
        return NotImplemented
    settings = dict(kwargs) | {"attn_mask": _mask(world, kwargs.get("attn_mask"), place, query, key, func)}
    output, sums = func(*_own(world, [query, key, value], place, func), *rest, **settings)
    return (
        Placed(output, place, (*query.shape[:3], value.shape[3]), world),
        Placed(sums, place, tuple(query.shape[:3]), world),
    )


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradients of query, key and value."""
    tensors, rest = args[:6], args[6:]
    query, key = tensors[1], tensors[2]
    place = _place([*tensors[1:4], tensors[0]])
    if place is None:
        return NotImplemented
    settings = dict(kwargs) | {"attn_mask": _mask(world, kwargs.get("attn_mask"), place, query, key, func)}
    found = func(*_own(world, tensors, place, func), *rest, **settings)
    return tuple(Placed(each, place, tuple(like.shape), world) for each, like in zip(found, tensors[1:4], strict=True))
