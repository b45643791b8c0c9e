"""Weight gradients are summed over those who contribute to them while backward goes on: each layer's as soon as it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from zmqtrain.parallel.communicator import Fabric, Label, Pending
from zmqtrain.parallel.shard import Shard, gradient_of, summed_together


class GradientSums:
    """The sums of one model's gradients. Made once; `finish` after every backward, which all processes of the group must call.

    All processes must have the same parameters in the same order of their backward, as divided models have. Parameters that get no
    gradient contribute nothing, and receive what others have.
    """

    def __init__(self, model: nn.Module, fabric: Fabric, shards: Mapping[str, Shard], *, overlap: bool = True) -> None:
        """``overlap``: whether layers are begun during backward; otherwise all at its end."""
        self._fabric = fabric
        self._layers = [_Layer(layer, members, parameters) for layer, members, parameters in summed_together(model, shards)]
        if overlap:
            for each in self._layers:
                for parameter in each.parameters:
                    parameter.register_post_accumulate_grad_hook(partial(self._ready, each))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Wait until all gradients are the sums. Those that were not begun yet are, in reverse order of the model's layers."""
        for layer in reversed(self._layers):
            if layer.pending is None:
                self._begin(layer)
        for layer in self._layers:
            assert layer.pending is not None
            (flat,) = layer.pending.wait()
            layer.pending, layer.complete = None, 0
            parts = torch.split(flat, [parameter.numel() for parameter in layer.parameters])
            for parameter, part in zip(layer.parameters, parts, strict=True):
                parameter.grad = part.view(parameter.shape)

    def _ready(self, layer: _Layer, _parameter: nn.Parameter) -> None:
        layer.complete += 1
        if layer.complete == len(layer.parameters):
            self._begin(layer)

    def _begin(self, layer: _Layer) -> None:
        flat = torch.cat([gradient_of(parameter).flatten() for parameter in layer.parameters])
        layer.pending = self._fabric.among(layer.members).all_reduce(flat, Label(layer.name, "dw", "backward"))


class _Layer:
    """Parameters whose gradients travel together."""

    def __init__(self, name: str, members: tuple[int, ...], parameters: list[nn.Parameter]) -> None:
        self.name, self.members, self.parameters = name, members, parameters
        self.complete = 0
        self.pending: Pending | None = None
