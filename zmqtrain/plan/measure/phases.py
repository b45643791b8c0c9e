"""The two phases of a model: convolutions, with much arithmetic and few parameters, and the fully connected layers behind them."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.plan.layers import LayerShape


def fc_begins(layers: Sequence[LayerShape]) -> int:
    """The place of the first layer of the FC phase: the first linear one after the last convolution; in a model without any the
    last linear one, which makes the output. Where there is none, the number of layers."""
    linear = [place for place, layer in enumerate(layers) if layer.kind == "linear"]
    convolutions = [place for place, layer in enumerate(layers) if layer.kind == "conv"]
    if not convolutions:
        return linear[-1] if linear else len(layers)
    return next((place for place in linear if place > convolutions[-1]), len(layers))
