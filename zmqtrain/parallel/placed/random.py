"""Operators that draw random numbers: every process draws those of the whole tensor, and keeps its part.

All processes begin a forward with the same state of torch's generator. Dropout draws one number, and hashes positions with it
(`zmqtrain.parallel.model.dropout`): so a process makes no masks for the elements of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zmqtrain.parallel.model.dropout import Masks
from zmqtrain.parallel.placed.dispatch import changing, rule
from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.tensor import Placed, World, from_local, to_local
from zmqtrain.parallel.placement import changed, scaled, settled

aten = torch.ops.aten


@rule(
    *(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype),
    *(aten.bernoulli.p, aten.native_dropout.default, aten.bernoulli.default, aten.multinomial.default),
    both=True,
)
def drawn(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A tensor of random numbers like another one."""
    value: Placed = args[0]
    needs_values = "like" not in func.name() and func is not aten.bernoulli.p
    whole = world.whole(value) if needs_values else torch.empty(tuple(value.shape), dtype=value.dtype, device=value.local.device)
    found = func(whole, *args[1:], **kwargs)
    placement = changed(value.placement, summands="none")

    def back(each: Tensor) -> Placed:
        if tuple(each.shape) != tuple(value.shape):
            return Placed(each, world.whole_of(placement.grid), tuple(each.shape), world)
        return Placed(world.cut(each, placement).clone(), placement, tuple(value.shape), world)

    return tuple(back(each) for each in found) if isinstance(found, tuple) else back(found)


@rule(
    *(aten.uniform_.default, aten.normal_.default, aten.bernoulli_.float, aten.exponential_.default, aten.random_.default),
    *(aten.random_.to, aten.random_.__getattr__("from"), aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default),
    both=True,
)
def redrawn(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Random numbers in place of what there was."""
    value: Placed = args[0]
    changing(value)
    whole = torch.empty(tuple(value.shape), dtype=value.dtype, device=value.local.device)
    placement = changed(value.placement, summands="none")
    value.local.copy_(world.cut(func(whole, *args[1:], **kwargs), placement))
    value.placement = placement
    return value


def _masks(world: World) -> Masks:
    name = f"dropout of {world.layer}"
    if name not in world.helpers:
        grid = world.grid
        world.helpers[name] = Masks(world.site(grid), world.batch, world.seed)
    found: Masks = world.helpers[name]
    return found


def _dropout(input: Tensor, p: float, training: bool, inplace: bool, *, channels: bool) -> Any:
    if not isinstance(input, Placed) or not 0 <= p <= 1:
        return NotImplemented
    if not training or p == 0:
        return input
    world, there = input.world, settled(input.placement)
    place = there
    call, shape = draw(), tuple(input.shape)
    masks = _masks(world)
    if channels:
        if input.dim() < 3:
            return NotImplemented
        shape = (*shape[:2], *[1] * (len(shape) - 2))
        if place.divided not in (None, 0, 1) or place.across is not None:
            place = place.whole()
    like = input.local.new_empty(place.local_shape(shape, world.rank))
    block = place.block(shape, world.rank)
    scale = masks.of_block(shape, p, block, 0, like, call)  # of positions, wherever samples are
    own = to_local(input, there, world) * scale
    found = from_local(own, there, input.shape, world)
    return input.copy_(found) if inplace else found


def draw() -> int:
    """A number that all processes draw alike; once more where a forward is computed again for its backward."""
    return int(torch.randint(1 << 62, ()))


@function(functional.dropout, both=True)
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """`torch.nn.functional.dropout`."""
    return _dropout(input, p, training, inplace, channels=False)


@function(functional.dropout1d, functional.dropout2d, functional.dropout3d, both=True)
def dropout_channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """`torch.nn.functional.dropout2d` and the like."""
    return _dropout(input, p, training, inplace, channels=True)


@function(functional.scaled_dot_product_attention)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`: each process its own samples and heads."""
    given = [query, key, value]
    placed = next((each for each in given if isinstance(each, Placed)), None)
    if placed is None or dropout_p > 0 or query.dim() != 4 or not all(isinstance(each, Placed) for each in given):
        return NotImplemented
    world, place = placed.world, query.placement  # type: ignore[attr-defined]
    if place.summands != "none" or place.sample_dimension not in (None, 0):
        return NotImplemented
    if len({each.shape[0] for each in given}) > 1:
        return NotImplemented
    places = [place, place, place]
    if place.divided == 1 and enable_gqa and _shared_alike(query, key, value):
        shared = changed(place, divisions=key.placement.divisions)  # type: ignore[attr-defined]
        places = [place, shared, shared]
    elif place.divided not in (None, 1) or (place.divided == 1 and len({each.shape[1] for each in given}) > 1):
        place = changed(place, divided=None, divisions=(), origin="")
        places = [place, place, place]
    q, k, v = (to_local(each, there, world) for each, there in zip(given, places, strict=True))
    mask = None
    if attn_mask is not None:
        from zmqtrain.parallel.placed.pointwise import broadcast

        shape = (*query.shape[:2], query.shape[2], key.shape[2])
        mask = to_local(attn_mask, broadcast(place, shape, tuple(attn_mask.shape)), world)
        if attn_mask.requires_grad:
            return NotImplemented
    found = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return from_local(found, place, (*query.shape[:3], value.shape[3]), world)


def _shared_alike(query: Any, key: Any, value: Any) -> bool:
    """Whether each row has the keys and values of its queries, where several of these share one."""
    times, rest = divmod(query.shape[1], max(key.shape[1], 1))
    keys, values = key.placement, value.placement
    same = keys.divided == values.divided == 1 and keys.divisions == values.divisions and keys.grid == query.placement.grid
    return not rest and same and scaled(keys.divisions, times) == query.placement.divisions
