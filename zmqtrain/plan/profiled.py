"""The layers of a profile, and a profile's times for traced layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zmqtrain.plan.layers import Kind, LayerShape
from zmqtrain.train.device.profile import Layer, Profile


def profile_layers(profile: Profile, batch: int) -> tuple[LayerShape, ...]:
    """The layers as far as a profile describes them: sizes, arithmetic and times. ``batch``: a process's, for profiles whose times
    hold for any number of samples.

    A profile has no shapes. The number of a layer's outputs follows from its weights, arithmetic and activations; rows of images do
    not, so nothing is divided by domain.
    """
    found: list[LayerShape] = []
    inputs: tuple[int, ...] = (1,)
    each = profile.scaled(batch) / batch
    for layer in profile.layers:
        shape = _outputs(layer)
        outputs = shape or (layer.activation_numel or 1,)
        kind: Kind = "other" if not layer.numel or shape is None else "linear"
        if layer.numel and layer.flops_forward <= 16 * layer.activation_numel and layer.flops_forward:
            kind = "norm"  # a few operations per element
        found.append(
            LayerShape(
                layer.name,
                kind,
                inputs,
                outputs,
                layer.numel,
                flops=layer.flops_forward,
                forward_s=layer.forward_s * each,
                backward_s=layer.backward_s * each,
            )
        )
        inputs = outputs
    return tuple(found)


def with_times(layers: Sequence[LayerShape], profile: Profile, batch: int) -> tuple[LayerShape, ...]:
    """Traced layers with the times of the profile's layers of the same names. Raises `UsageError` if it is another model's
    profile."""
    profile.check_model({layer.name: layer.weights for layer in layers})
    each = profile.scaled(batch) / batch
    times = {layer.name: (layer.forward_s * each, layer.backward_s * each) for layer in profile.layers}
    return tuple(
        replace(layer, forward_s=times[layer.name][0], backward_s=times[layer.name][1]) if layer.name in times else layer
        for layer in layers
    )


def _outputs(layer: Layer) -> tuple[int, ...] | None:
    """(positions, outputs) of a layer that multiplies by a matrix, with or without biases; none if the figures fit neither.

    Of n parameters, W are the matrix and n - W the biases, one for each output. Each of p positions costs 2 W, so either
    p (n - W) = activations, or n = W.
    """
    flops, numel, activations = layer.flops_forward, layer.numel, layer.activation_numel
    if not (flops and numel and activations):
        return None
    for above in (flops // 2 + activations, flops // 2):  # with biases, without
        positions = above // numel
        if positions and positions * numel == above and activations % positions == 0:
            return (positions, activations // positions)
    return None
