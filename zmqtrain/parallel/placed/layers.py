"""Layers with weights that are divided over the rows: by the code of `zmqtrain.parallel.model`, on this process's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.attention import MultiheadAttention
from zmqtrain.parallel.model.convolution import Convolution
from zmqtrain.parallel.model.dropout import Masks
from zmqtrain.parallel.model.embedding import Embedding
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.lstm import LSTM
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.packed import pack, packs_of
from zmqtrain.parallel.placed.parameters import Use, use_of
from zmqtrain.parallel.placed.random import draw
from zmqtrain.parallel.placed.tensor import Placed, World, contributed, from_local, to_local
from zmqtrain.parallel.placement import Divisions, Placement, Summands, changed, laid, scaled
from zmqtrain.parallel.plan import Choice


def helper(world: World, key: Any, make: Callable[[], nn.Module]) -> Any:
    """The layer that computes parts: made once for each way in which it is called."""
    if key not in world.helpers:
        world.helpers[key] = make()
    return world.helpers[key]


def drawing(site: Site, world: World) -> Masks:
    """Masks whose calls are numbered by what all processes draw."""
    masks = Masks(site, world.batch, world.seed)
    masks.draw = draw
    return masks


def lend(layer: nn.Module, **leaves: Tensor | None) -> None:
    """Let a layer compute with these parts of parameters, whose gradients are what they contribute."""
    for name, leaf in leaves.items():
        layer._parameters[name] = leaf  # type: ignore[assignment]


def placed_input(x: Tensor, use: Use, world: World, *, keep: int | None = None) -> tuple[Placement, Tensor]:
    """Where a layer takes ``x``: its grid's columns have the samples. ``keep``: a dimension that may stay divided over its rows.

    Returns the placement and the part.
    """
    samples = x.placement.sample_dimension if isinstance(x, Placed) else None
    unit = x.placement.sample_unit if isinstance(x, Placed) else 1
    target = laid(use.grid, sample_dimension=samples, sample_unit=unit)
    if keep is not None and isinstance(x, Placed) and x.placement.grid == use.grid and x.placement.divided == keep:
        there = x.placement.divisions
        if all(start < stop for start, stop in there) and x.placement.samples == "columns":
            target = changed(target, divided=keep, divisions=there)
    return target, taken(x, target, use, world)


def taken(x: Tensor, target: Placement, use: Use, world: World) -> Tensor:
    """This process's part of ``x``, for a layer with weights of its own."""
    return to_local(x, target, world, gradient=contributed(target), layer=use.layer, moved=True)


def computed(local: Tensor, placement: Placement, shape: Sequence[int], world: World) -> Placed:
    """Wrap a layer's local result as a tensor that knows its placement. ``shape``: of the whole result."""
    return from_local(local, placement, shape, world, gradient=contributed(placement))


def moved_to(x: Tensor, use: Use, world: World) -> Tensor:
    """``x`` where a layer with whole weights takes it: the column's samples, or this process's own share of them."""
    return moved(x, use.choice, use.grid, use.layer, world)


def moved(x: Tensor, choice: Choice, grid: Grid, layer: str, world: World) -> Tensor:
    """``x`` with nothing divided but samples, as a layer takes it."""
    if not isinstance(x, Placed) or x.placement.sample_dimension is None:
        return x
    target = laid(
        grid,
        "all" if choice == "batch" else "columns",
        sample_dimension=x.placement.sample_dimension,
        sample_unit=x.placement.sample_unit,
    )
    if x.placement == target:
        return x
    return from_local(to_local(x, target, world, layer=layer, moved=True), target, x.shape, world)


def _takes(layer: Any, target: Placement) -> None:
    """Let a layer take its input as it lies now."""
    divisions = target.divisions if target.divided is not None else None
    if layer.input_divisions != divisions:
        layer.takes(divisions)


def _own(weight: Any, bias: Any) -> bool:
    """Whether weight and bias are a layer's, as they are."""
    use = use_of(weight)
    other = use_of(bias)
    return use is not None and (bias is None or (other is not None and other.layer == use.layer))


@function(functional.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`torch.nn.functional.linear`."""
    use = use_of(weight)
    if use is None or not _own(weight, bias) or not isinstance(weight, Placed):
        return NotImplemented
    if use.choice != "model" or use.shard.dimension is None:
        if use.choice in ("batch", "whole", "model"):
            with torch._C.DisableTorchFunctionSubclass():
                return functional.linear(moved_to(input, use, weight.world), weight, bias)
        return NotImplemented
    return _linear(input, weight, bias, 0)


@function(torch.addmm)
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    """What a linear layer with a weight of (inputs, outputs) computes."""
    use = use_of(mat2)
    if use is None or not _own(mat2, input) or not isinstance(mat2, Placed) or use.choice != "model" or use.shard.dimension is None:
        return NotImplemented
    return _linear(mat1, mat2, input, 1) if (beta, alpha, out, input.dim()) == (1, 1, None, 1) else NotImplemented


def _linear(input: Tensor, weight: Placed, bias: Tensor | None, outputs: int) -> Any:
    """A linear layer that is divided over the rows. ``outputs``: the dimension of its weight along which outputs are."""
    use, other, world, features = weight.use, use_of(bias), weight.world, input.dim() - 1
    by_inputs, packs, width = use.shard.dimension != outputs, packs_of(use.shard, outputs), weight.shape[outputs]
    divisions: Divisions = tuple(ranges[0] for ranges in use.shard.pieces)
    if packs == 1 and any(len(ranges) > 1 for ranges in use.shard.pieces):
        return NotImplemented

    def make() -> nn.Module:
        whole = nn.Linear(weight.shape[1 - outputs], width, bias is not None, device="meta", dtype=weight.dtype)
        site = world.site(use.grid, use.layer)
        if by_inputs:
            return Linear(whole, site, divisions=divisions, input_divided=True)
        return Linear(whole, site, divisions=scaled(divisions, packs), gather=False)

    layer = helper(world, ("linear", use.layer, use.name, bias is None, outputs), make)
    lend(layer, weight=use.leaf if outputs == 0 else use.leaf.t(), bias=None if other is None else other.leaf)
    if by_inputs:
        divided = isinstance(input, Placed) and input.placement.divided == features
        target, x = placed_input(input, use, world, keep=features if divided else None)
        wanted = changed(target, divided=features, divisions=divisions)
        if target != wanted:
            x = taken(computed(x, target, input.shape, world), wanted, use, world)
        return computed(layer(x), changed(wanted, divided=None, divisions=()), (*input.shape[:-1], width), world)
    target, x = placed_input(input, use, world, keep=features)
    _takes(layer, target)
    placement, shape = changed(target, divided=features, divisions=divisions, origin=use.layer), (*input.shape[:-1], width // packs)
    parts = [computed(part, placement, shape, world) for part in layer(x).chunk(packs, -1)]
    return pack(parts) if packs > 1 else parts[0]


def _hashable(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in values)


def _convolution(kind: type[nn.Module]) -> Callable[..., Any]:
    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        use = use_of(weight)
        if use is None or not _own(weight, bias) or not isinstance(weight, Placed):
            return NotImplemented
        world = weight.world
        given = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        if use.choice == "domain":
            from zmqtrain.parallel.placed.strips import convolution

            return convolution(input, weight, bias, given, use)
        if use.choice != "model" or use.shard.dimension is None:
            with torch._C.DisableTorchFunctionSubclass():
                return _PLAIN[kind](moved_to(input, use, world), weight, bias, stride, padding, dilation, groups)
        divisions: Divisions = tuple(ranges[0] for ranges in use.shard.pieces)
        if input.dim() != len(weight.shape):
            return NotImplemented

        def make() -> nn.Module:
            out, each, *kernel = weight.shape
            whole = kind(each * groups, out, tuple(kernel), bias=bias is not None, device="meta", dtype=weight.dtype, **given)
            return Convolution(whole, world.site(use.grid, use.layer), divisions=divisions, gather=False)  # type: ignore[arg-type]

        layer = helper(world, ("convolution", use.layer, _hashable(given.values()), bias is None), make)
        other = use_of(bias)
        lend(layer, weight=use.leaf, bias=None if other is None else other.leaf)
        target, x = placed_input(input, use, world, keep=1)
        _takes(layer, target)
        out = layer(x)
        placement = changed(target, divided=1, divisions=divisions, origin=use.layer)
        shape = (input.shape[0], weight.shape[0], *out.shape[2:])
        return computed(out, placement, shape, world)

    return run


_PLAIN: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
for _kind, _function in _PLAIN.items():
    function(_function, both=True)(_convolution(_kind))


@function(functional.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`torch.nn.functional.embedding`."""
    use = use_of(weight)
    if use is None or not isinstance(weight, Placed) or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    world = weight.world
    if use.choice != "model" or use.shard.dimension is None:
        moved = moved_to(input, use, world)
        if moved is input:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return functional.embedding(moved, weight, padding_idx)
    divisions: Divisions = tuple(ranges[0] for ranges in use.shard.pieces)

    def make() -> nn.Module:
        whole = nn.Embedding(weight.shape[0], weight.shape[1], padding_idx, device="meta", dtype=weight.dtype)
        by = "features" if use.shard.dimension == 1 else "vocabulary"
        return Embedding(whole, world.site(use.grid, use.layer), by=by, divisions=divisions)  # type: ignore[arg-type]

    layer = helper(world, ("embedding", use.layer, use.name), make)
    lend(layer, weight=use.leaf)
    target, words = placed_input(input, use, world)
    return computed(layer(words), target, (*input.shape, weight.shape[1]), world)


def with_whole_weights(weight: Tensor | None, place: Placement, world: World) -> Tensor | None:
    """A whole weight for a layer's code on this process's samples: its gradient is that of these samples."""
    if weight is None:
        return None
    apart: Summands = "none"
    if place.sample_dimension is not None:
        apart = "all" if place.samples == "all" else "row"
    whole = world.whole_of(place.grid)
    return to_local(weight, whole, world, gradient=changed(whole, summands=apart))


def at_least_one(part: Tensor, dimension: int | None, count: int = 1) -> Tensor:
    """``part``, or zeros for a sample where this process has none: some functions of torch do not take none.

    ``count``: elements of a sample in its dimension. Of what is computed of zeros, ``narrow(dimension, 0, 0)`` is the part, whose
    gradients are zeros."""
    if dimension is None or part.shape[dimension]:
        return part
    found = part.new_zeros([count if each == dimension else size for each, size in enumerate(part.shape)])
    # What comes before sends messages in backward: others wait for them, so backward must reach it here, too.
    return found + part.sum() if part.requires_grad else found


def _attention_on_samples(query: Placed, given: dict[str, Any], key: Tensor, value: Tensor) -> Any:
    """Attention whose weights are whole: each process its own samples."""
    world, place = query.world, changed(query.placement, summands="none")
    if place.divided is not None:
        place = changed(place, divided=None, divisions=(), origin="")
    parts = {id(each): to_local(each, place, world) for each in (query, key, value)}
    masks = changed(place, sample_dimension=None if place.sample_dimension is None else 0)
    padding = given["key_padding_mask"]
    own: dict[str, Any] = {
        **given,
        "key_padding_mask": None if padding is None else to_local(padding, masks, world),
        "attn_mask": _mask_of_samples(given["attn_mask"], given["num_heads"], masks, world),
        **{name: with_whole_weights(given[name], place, world) for name in _ATTENTION_WEIGHTS},
    }
    none = place.sample_dimension is not None and not parts[id(query)].shape[1]
    if none:
        parts = {each: at_least_one(part, 1) for each, part in parts.items()}
        own["key_padding_mask"] = None if padding is None else at_least_one(own["key_padding_mask"], 0)
        if own["attn_mask"] is not None:
            own["attn_mask"] = at_least_one(own["attn_mask"], 0, given["num_heads"])
    three = parts[id(query)], parts[id(key)], parts[id(value)]
    if given["training"] and given["dropout_p"]:
        output, weights = _dropping(query, own, three, masks)
    else:
        output, weights = functional.multi_head_attention_forward(*three, **own)
    if none:
        output, weights = output.narrow(1, 0, 0), None if weights is None else weights.narrow(0, 0, 0)
    found = from_local(output, place, query.shape, world)
    if weights is None:
        return found, None
    return found, from_local(weights, masks, (query.shape[1], *weights.shape[1:]), world)


def _mask_of_samples(mask: Tensor | None, heads: int, place: Placement, world: World) -> Tensor | None:
    """A mask of (times, times), or the samples' part of one of (samples x heads, times, times)."""
    if mask is None or mask.dim() == 2:
        return None if mask is None else to_local(mask, world.whole_of(place.grid), world)
    return to_local(mask, changed(place, sample_unit=heads), world)


def _dropping(query: Placed, own: dict[str, Any], three: tuple[Tensor, Tensor, Tensor], place: Placement) -> Any:
    """The same with dropout: by the code of divided attention, on a grid without rows to divide heads over."""
    world, features = query.world, query.shape[2]
    separate = own["use_separate_proj_weight"]
    widths = [own[name].shape[1] if separate else None for name in ("k_proj_weight", "v_proj_weight")]
    settings = {"bias": own["in_proj_bias"] is not None, "kdim": widths[0], "vdim": widths[1], "device": "meta"}
    whole = nn.MultiheadAttention(features, own["num_heads"], own["dropout_p"], dtype=query.dtype, **settings)
    site = world.site(Grid(1, world.fabric.size))
    layer = MultiheadAttention(whole, site, masks=_SamplesMasks(site, world, place, query.shape[1]))
    lend(layer, **{name: own[name] for name in _ATTENTION_WEIGHTS if not name.startswith(("bias", "out"))})
    lend(layer.out_proj, weight=own["out_proj_weight"], bias=own["out_proj_bias"])
    return layer(
        *three, own["key_padding_mask"], own["need_weights"], own["attn_mask"], own["average_attn_weights"], own["is_causal"]
    )


class _SamplesMasks(Masks):
    """Masks of the samples that a placement says."""

    def __init__(self, site: Site, world: World, place: Placement, samples: int) -> None:
        super().__init__(site, world.batch, world.seed)
        self._place, self._samples, self._rank = place, samples, world.rank

    def drop(self, x: Tensor, probability: float, placement: Placement, call: int | None = None) -> Tensor:
        shape = (self._samples, *x.shape[1:])
        block = self._place.block(shape, self._rank)
        return x * self.of_block(shape, probability, block, 0, x, draw() if call is None else call)


_ATTENTION_WEIGHTS = (
    *("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj_weight", "out_proj_bias"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
)


@function(functional.multi_head_attention_forward)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """`torch.nn.functional.multi_head_attention_forward`: (time, samples, features) each."""
    given = {"in_proj_weight": in_proj_weight, "in_proj_bias": in_proj_bias, "q_proj_weight": q_proj_weight,
             "k_proj_weight": k_proj_weight, "v_proj_weight": v_proj_weight}  # fmt: skip
    first = use_of(in_proj_weight if in_proj_weight is not None else q_proj_weight)
    out = use_of(out_proj_weight)
    if static_k is not None or query.dim() != 3 or (attn_mask is not None and attn_mask.requires_grad):
        return NotImplemented
    by_sample = attn_mask is not None and attn_mask.dim() == 3
    if first is None or out is None or first.choice != "model" or first.shard.dimension is None:
        whole = all(use is None or use.shard.dimension is None for use in (first, out))
        samples = isinstance(query, Placed) and query.placement.sample_dimension in (None, 1)
        if not whole or not samples:
            return NotImplemented
        if training and dropout_p > 0 and (bias_k is not None or add_zero_attn):
            return NotImplemented
        rest: dict[str, Any] = {
            **given,
            **{"embed_dim_to_check": embed_dim_to_check, "num_heads": num_heads, "bias_k": bias_k, "bias_v": bias_v},
            **{"add_zero_attn": add_zero_attn, "dropout_p": dropout_p, "out_proj_weight": out_proj_weight},
            **{"out_proj_bias": out_proj_bias, "training": training, "key_padding_mask": key_padding_mask},
            **{"need_weights": need_weights, "attn_mask": attn_mask, "use_separate_proj_weight": use_separate_proj_weight},
            **{"average_attn_weights": average_attn_weights, "is_causal": is_causal},
        }
        assert isinstance(query, Placed)
        return _attention_on_samples(query, rest, key, value)
    world: World = out_proj_weight.world  # type: ignore[attr-defined]

    def make() -> nn.Module:
        kdim = None if k_proj_weight is None else k_proj_weight.shape[1]
        vdim = None if v_proj_weight is None else v_proj_weight.shape[1]
        whole = nn.MultiheadAttention(embed_dim_to_check, num_heads, dropout_p, bias=in_proj_bias is not None, kdim=kdim, vdim=vdim,
                                      device="meta", dtype=out_proj_weight.dtype)  # fmt: skip
        site = world.site(first.grid, first.layer)
        return MultiheadAttention(whole, site, masks=drawing(site, world))

    layer = helper(world, ("attention", first.layer), make)
    layer.train(training)
    layer.dropout = dropout_p
    uses = {name: use_of(each) for name, each in given.items()}
    lend(layer, **{name: None if use is None else use.leaf for name, use in uses.items()})
    bias = use_of(out_proj_bias)
    lend(layer.out_proj, weight=out.leaf, bias=None if bias is None else bias.leaf)
    target, own_query = placed_input(query, first, world)
    # Different tensors of the same values are one product; so the same part stays the same tensor.
    parts: dict[int, Tensor] = {id(query): own_query}
    for each in (key, value):
        if id(each) not in parts:
            parts[id(each)] = taken(each, target, first, world)
    masks = []
    for mask, along in ((key_padding_mask, 0), (attn_mask, 0 if by_sample else None)):
        place = laid(first.grid, sample_dimension=along if target.sample_dimension is not None else None)
        if mask is attn_mask and by_sample:
            place = changed(place, sample_unit=num_heads if place.sample_dimension is not None else 1)
        # Its gradient is the sum over the heads that rows have, and over the samples that columns have.
        back = changed(place, summands="column" if place.sample_dimension is not None else "all")
        masks.append(None if mask is None else to_local(mask, place, world, gradient=back, layer=first.layer))
    output, weights = layer(
        own_query, parts[id(key)], parts[id(value)], masks[0], need_weights, masks[1], average_attn_weights, is_causal
    )
    found = computed(output, target, (*query.shape[:2], embed_dim_to_check), world)
    if weights is None:
        return found, None
    shape = (query.shape[1], *weights.shape[1:])
    place = laid(first.grid, sample_dimension=0 if target.sample_dimension is not None else None)
    return found, computed(weights, place, shape, world)


@function(torch.lstm)
def lstm(*arguments: Any) -> Any:
    """`torch.lstm` on padded sequences, as `torch.nn.LSTM` calls it."""
    x, hx, weights = arguments[:3]
    if not isinstance(weights, list | tuple) or not isinstance(x, Tensor) or x.dim() != 3:
        return NotImplemented
    biased, layers, dropout, training, bidirectional, batch_first = arguments[3:9]
    uses = [use_of(each) for each in weights]
    first = uses[0]
    if first is None or any(each is None for each in uses) or first.choice != "model" or first.shard.dimension is None:
        from zmqtrain.parallel.placed.samples import lstm_on_samples

        return lstm_on_samples(*arguments)
    world: World = weights[0].world
    hidden = hx[0].shape[-1]

    def make() -> nn.Module:
        whole = nn.LSTM(x.shape[-1], hidden, layers, biased, batch_first, dropout, bidirectional, device="meta", dtype=x.dtype)
        site = world.site(first.grid, first.layer)
        return LSTM(whole, site, masks=drawing(site, world))

    layer = helper(world, ("lstm", first.layer), make)
    layer.train(training)
    lend(layer, **{use.name: use.leaf for use in uses if use is not None})
    target, own = placed_input(x, first, world)
    samples = target.sample_dimension
    if samples is not None and samples != (0 if batch_first else 1):
        raise UsageError(
            f"layer {first.layer}: an LSTM takes samples in dimension {0 if batch_first else 1}, and they are in {samples}"
        )
    state_place = laid(first.grid, sample_dimension=None if samples is None else 1)
    # Zeros are what a divided LSTM begins with by itself, without a message.
    zeros = not isinstance(hx[0], Placed) and not any(bool(each.any()) for each in hx if not each.is_meta)
    given = None if zeros else tuple(taken(each, state_place, first, world) for each in hx)
    output, (last, cells) = layer(own, given)
    features = hidden * (2 if bidirectional else 1)
    shape, state = (*x.shape[:2], features), (last.shape[0], x.shape[0 if batch_first else 1], hidden)
    return computed(output, target, shape, world), *(computed(each, state_place, state, world) for each in (last, cells))
