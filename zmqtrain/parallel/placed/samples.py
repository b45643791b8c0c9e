"""Layers whose weights are whole: each process computes its own samples, by one call and not operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from zmqtrain.parallel.placed.functions import BY_SAMPLES, function
from zmqtrain.parallel.placed.layers import with_whole_weights
from zmqtrain.parallel.placed.parameters import use_of
from zmqtrain.parallel.placed.tensor import Placed, World, from_local, to_local
from zmqtrain.parallel.placement import Placement, changed


def _samples(x: Any, dimension: int, weights: Sequence[Any]) -> Placement | None:
    """Where ``x`` lies if nothing but its samples, in this dimension, is divided; ``None`` for what these rules are not for."""
    if not isinstance(x, Placed) or x.placement.sample_dimension != dimension or x.placement.sample_unit != 1:
        return None
    if any(isinstance(each, Placed) and each.placement != x.world.whole_of(each.placement.grid) for each in weights):
        return None
    uses = [use_of(each) for each in weights]
    if any(use is not None and use.shard.dimension is not None for use in uses):
        return None
    return changed(x.placement, divided=None, divisions=(), summands="none", origin="")


def _recurrent(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        """`torch.lstm` and the like on padded sequences, as `torch.nn.RNNBase` calls them."""
        x, hx, weights = arguments[:3]
        if not isinstance(weights, list | tuple) or not isinstance(x, Tensor) or x.dim() != 3:
            return NotImplemented  # packed sequences
        _, _, dropout, training, _, batch_first = arguments[3:9]
        along = 0 if batch_first else 1
        place = _samples(x, along, weights)
        if place is None or (training and dropout):
            return NotImplemented
        assert isinstance(x, Placed)
        world, states = x.world, changed(place, sample_dimension=1)
        given = hx if isinstance(hx, list | tuple) else [hx]
        own = [to_local(each, states, world) for each in given]
        parts = [with_whole_weights(each, place, world) for each in weights]
        output, *last = operator(to_local(x, place, world), own if len(own) > 1 else own[0], parts, *arguments[3:])
        shape = (*x.shape[:2], output.shape[2])
        return from_local(output, place, shape, world), *(
            from_local(each, states, (each.shape[0], x.shape[along], each.shape[2]), world) for each in last
        )

    return run


def _cell(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, hx: Any, *weights: Any) -> Any:
        """`torch.lstm_cell` and the like: (samples, features)."""
        place = _samples(x, 0, weights)
        if place is None or x.dim() != 2:
            return NotImplemented
        assert isinstance(x, Placed)
        world = x.world
        given = hx if isinstance(hx, list | tuple) else [hx]
        own = [to_local(each, place, world) for each in given]
        parts = [with_whole_weights(each, place, world) for each in weights]
        found = operator(to_local(x, place, world), own if len(own) > 1 else own[0], *parts)
        if isinstance(found, Tensor):
            return from_local(found, place, (x.shape[0], found.shape[1]), world)
        return tuple(from_local(each, place, (x.shape[0], each.shape[1]), world) for each in found)

    return run


#: Those of an LSTM are tried by the rule of divided ones, which comes here with what is whole.
lstm_on_samples = _recurrent(torch.lstm)
_RECURRENT: list[Callable[..., Any]] = [torch.gru, torch.rnn_tanh, torch.rnn_relu]
_CELLS: list[Callable[..., Any]] = [torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell]
for _operator in _RECURRENT:
    function(_operator)(_recurrent(_operator))
for _operator in _CELLS:
    function(_operator)(_cell(_operator))


@function(functional.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`torch.nn.functional.bilinear`."""
    place = _samples(input1, 0, [weight, bias])
    if place is None or input1.dim() < 2 or input1.shape[:-1] != input2.shape[:-1]:
        return NotImplemented
    assert isinstance(input1, Placed)
    world: World = input1.world
    own = [to_local(each, place, world) for each in (input1, input2)]
    parts = [with_whole_weights(each, place, world) for each in (weight, bias)]
    assert parts[0] is not None
    return from_local(functional.bilinear(*own, *parts), place, (*input1.shape[:-1], weight.shape[0]), world)


@function(functional.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`torch.nn.functional.embedding_bag` of (samples, words)."""
    place = _samples(input, 0, [weight])
    if place is None or input.dim() != 2 or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    assert isinstance(input, Placed)
    world = input.world
    part = with_whole_weights(weight, place, world)
    assert part is not None
    each = None if per_sample_weights is None else to_local(per_sample_weights, place, world)
    words = to_local(input, place, world)
    found = functional.embedding_bag(words, part, mode=mode, per_sample_weights=each, padding_idx=padding_idx)
    return from_local(found, place, (input.shape[0], weight.shape[1]), world)


#: What has a rule that asks for the samples itself is not among them: linear layers, convolutions, embeddings.
_LAYERS: list[Callable[..., Any]] = [
    *(functional.multi_head_attention_forward, torch.lstm, functional.bilinear, functional.embedding_bag),
    *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
    *(functional.layer_norm, functional.rms_norm, functional.group_norm, functional.batch_norm, functional.instance_norm),
    *(functional.prelu, torch.prelu, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm),
]
BY_SAMPLES.update(_LAYERS, _RECURRENT, _CELLS)
