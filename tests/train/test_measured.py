"""What was measured beside layers: read, refused, and asked for times between the sizes."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.train.device.measured import Measured, Size
from zmqtrain.train.device.profile import Layer, Profile, shipped

SIZES = (Size(2, 1.0, 0.5), Size(4, 1.6, 0.6), Size(8, 3.2, 1.2))


@pytest.mark.parametrize(
    ("samples", "conv_s", "fc_s"),
    [(1, 1.0, 0.5), (2, 1.0, 0.5), (3, 1.3, 0.55), (4, 1.6, 0.6), (6, 2.4, 0.9), (8, 3.2, 1.2), (16, 6.4, 2.4)],
)
def test_times_between_and_beyond_the_sizes(samples: int, conv_s: float, fc_s: float) -> None:
    measured = Measured(sizes=SIZES)
    assert (measured.conv_s(samples), measured.fc_s(samples)) == (pytest.approx(conv_s), pytest.approx(fc_s))
    profile = Profile((Layer("a", 1, 1.0, 1.2),), batch_size=4, measured=measured)
    assert profile.conv_s(samples) == pytest.approx(conv_s)
    assert profile.fc_s(samples) == pytest.approx(fc_s)
    assert profile.scaled(samples) == pytest.approx((conv_s + fc_s) / 2.2)


def test_phases_without_sizes_are_in_proportion() -> None:
    layers = (Layer("a", 1, 1.0, 2.0, phase="conv"), Layer("b", 1, 0.5, 0.5, phase="fc"))
    profile = Profile(layers, batch_size=4)
    assert (profile.conv_s(8), profile.fc_s(8), profile.scaled(8)) == (6.0, 2.0, 2.0)
    assert Profile(layers).conv_s(8) == 3.0
    with pytest.raises(UsageError, match="does not say which layers are the FC phase"):
        Profile((Layer("a", 1, 1.0, 2.0),), name="old").fc_s(1)


def test_a_profile_is_written_as_it_is_read() -> None:
    for name in shipped():
        profile = Profile.load(name)
        values = profile.to_values()
        assert Profile.of(values) == profile
        assert "optimizer" not in values
        assert "dtype" not in values["layers"][0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (3, "measured is 3; it must be an object"),
        ({"sizes": 3}, "sizes is 3; it must be a list"),
        ({"sizes": [3]}, "sizes 1 is 3; it must be an object"),
        ({"sizes": [{"samples": 1, "conv_s": -1, "fc_s": 0}]}, "sizes 1: conv_s is -1"),
        ({"sizes": [{"samples": 1, "conv_s": 1}]}, "sizes 1 lacks the field 'fc_s'"),
        ({"sizes": [{"samples": size, "conv_s": 1, "fc_s": 1} for size in (2, 1)]}, "sizes must be in ascending order"),
        ({"sizes": [{"samples": 0, "conv_s": 1, "fc_s": 1}]}, "sizes must be in ascending order"),
        ({"thread": 1}, "unknown field 'thread'; did you mean 'threads'"),
        ({"channels_last": 1}, "must be true or false"),
        ({"peak_flops": "fast"}, "must be a number"),
        ({"links": [{"source": "a", "target": 3, "bandwidth": 1, "latency_s": 1}]}, "links 1: target is 3; it must be a string"),
    ],
)
def test_what_is_wrong_is_named(values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Measured.of(values)
