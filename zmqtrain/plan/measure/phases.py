"""The two phases of a model: convolutions, with much arithmetic and few parameters, and the fully connected layers after them."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.plan.layers import LayerShape


def fc_begins(layers: Sequence[LayerShape]) -> int:
    """The index of the first layer of the FC phase: the first linear layer after the last convolution or, in a model without
    convolutions, the last linear layer, which makes the output. The number of layers if there is no such phase."""
    linear = [place for place, layer in enumerate(layers) if layer.kind == "linear"]
    convolutions = [place for place, layer in enumerate(layers) if layer.kind == "conv"]
    if not convolutions:
        return linear[-1] if linear else len(layers)
    return next((place for place in linear if place > convolutions[-1]), len(layers))
