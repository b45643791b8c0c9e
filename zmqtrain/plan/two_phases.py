"""Where a model's fully connected phase starts, and how long both phases take for a number of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.profile_phases import split_profile
from zmqtrain.plan.layers import LayerShape
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.profile import Profile

#: Layers in which every weight is used many times per sample: they belong to the convolution phase.
_SHARED_WEIGHTS = ("conv", "recurrent", "attention", "embedding")


def split_of(layers: Sequence[LayerShape], named: str | None = None) -> int:
    """The start of the fully connected phase: the index of the first linear layer after the last layer that shares its weights
    among positions (convolutions, recurrent layers, attention). The number of layers if there is no such phase.

    ``named``: the module at which it starts instead. A profile has no kinds of layers, so a layer with several positions counts as
    one that shares weights.
    """
    if named is not None:
        places = (index for index, each in enumerate(layers) if each.name == named or each.name.startswith(f"{named}."))
        return next(places, len(layers))
    last = max((index for index, each in enumerate(layers) if each.weights and _shares(each)), default=-1)
    following = (index for index in range(last + 1, len(layers)) if layers[index].weights and layers[index].kind == "linear")
    return next(following, len(layers))


def _shares(layer: LayerShape) -> bool:
    return layer.kind in _SHARED_WEIGHTS or (layer.kind == "linear" and len(layer.outputs) == 2 and layer.outputs[0] > 1)


#: Maps a number of samples to the factor on a sample's times.
Lasts = Callable[[float], float]


def in_proportion(samples: float) -> float:
    """Twice the samples take twice as long."""
    return samples


@dataclass(frozen=True, slots=True)
class Growth:
    """How times grow with the samples, if the profile has measured several sizes. Times of layers are those of a sample, as a
    share of ``samples`` of them."""

    whole: Lasts = in_proportion
    conv: Lasts = in_proportion
    fc: Lasts = in_proportion
    fc_update_s: float = 0.0
    """The optimizer's time for the parameters of the fully connected phase."""

    @classmethod
    def of(cls, topology: Topology, samples: int) -> Growth:
        """The growth that the job's profile has measured. Raises `UsageError` if it cannot be read."""
        if topology.compute.profile is None:
            return cls()
        profile = Profile.load(topology.compute.profile)
        whole = _lasts(profile, profile, samples)
        try:
            conv, fc = split_profile(profile, topology.exchange.split)
        except UsageError:  # it is not known which layers that would be
            return cls(whole, whole, whole)
        return cls(whole, _lasts(conv, profile, samples), _lasts(fc, profile, samples), fc.update_s)


def _lasts(part: Profile, profile: Profile, samples: int) -> Lasts:
    """Layers' times are the profile's, scaled to ``samples``; the part's own times grow in their own way."""
    if not profile.batch_size:
        return lambda _: float(samples)  # the same for any number
    base = profile.scaled(samples) / samples
    return lambda many: part.scaled(many) / base
