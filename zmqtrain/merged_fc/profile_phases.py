"""The two phases of a profile, if an FC server computes the fully connected layers: which device takes which of its times."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.cut import ForwardStep, StepKind, second_phase
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.profile import Layer, Profile


def split_profile(profile: Profile, split: str | None = None) -> tuple[Profile, Profile]:
    """The profiles of workers and of the FC server. Each has a share of the time of an update, in proportion to its parameters.

    Without ``split``, the second phase starts at the first layer after the last convolution that, like a linear layer, multiplies
    each parameter with one number per sample. Raises `UsageError` if there is none, or the layer before it does not state the size
    of its output.
    """
    names = [layer.name for layer in profile.layers]
    steps = [
        ForwardStep(layer.name, (names[place - 1],) if place else (), _kind(layer), layer.name)
        for place, layer in enumerate(profile.layers)
    ]
    try:
        second = second_phase(steps, split)
    except UsageError as error:
        raise UsageError(f"[compute] profile {profile.name or 'of the job'} cannot be split in two phases: {error}") from error
    first_layers = tuple(layer for layer in profile.layers if layer.name not in second)
    second_layers = tuple(layer for layer in profile.layers if layer.name in second)
    if not any(layer.numel for layer in first_layers):
        raise UsageError(f"[exchange] split = {split!r}: no layer of the profile before it has parameters")
    if not first_layers[-1].activation_numel:
        raise UsageError(
            f"[compute] profile {profile.name or 'of the job'}: {first_layers[-1].name}, whose output is sent to the FC server, "
            "does not state the size of its output: give it activation_numel"
        )
    known = profile.measured is not None and second_layers[0].name == profile.measured.fc_from
    return _part(profile, first_layers, "conv" if known else None), _part(profile, second_layers, "fc" if known else None)


def worker_profile(topology: Topology) -> Profile:
    """The profile of a worker's modelled device. Raises `UsageError` if it cannot be used."""
    profile = Profile.of_job(topology)
    return split_profile(profile, topology.exchange.split)[0] if topology.fc_servers else profile


def fc_profile(topology: Topology) -> Profile:
    """The profile of the FC server's modelled device. Raises `UsageError` if it cannot be used."""
    return split_profile(Profile.of_job(topology), topology.exchange.split)[1]


def _part(profile: Profile, layers: tuple[Layer, ...], phase: Literal["conv", "fc"] | None) -> Profile:
    """A profile of some layers. ``phase``: their phase, if the profile has measured how its time grows with the samples."""
    numel = sum(layer.numel for layer in layers)
    measured = profile.measured
    if measured is not None and phase is not None:
        sizes = (replace(size, fc_s=0.0) if phase == "conv" else replace(size, conv_s=0.0) for size in measured.sizes)
        measured = replace(measured, sizes=tuple(sizes))
    return replace(profile, layers=layers, update_s=profile.update_s * numel / profile.numel, measured=measured)


def _kind(layer: Layer) -> StepKind:
    if not layer.numel or not layer.flops_forward:
        return "other"
    return "linear" if layer.flops_forward <= 2 * layer.numel else "convolution"
