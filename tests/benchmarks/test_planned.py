"""Steps of whole runs take what was predicted, also where hosts have several processes and layers are on other grids."""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks import planned


def network() -> nn.Sequential:
    """Weights outweigh activations, as those of a larger perceptron on a faster network."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64),
    )  # fmt: skip


@pytest.mark.parametrize(("hosts", "slots", "drawn"), [(2, 2, 3), (2, 4, 1)])
def test_whole_runs_take_what_was_predicted(hosts: int, slots: int, drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(planned.MODELS, "small", (network, (3, 8, 8), 64))
    monkeypatch.setattr(planned, "BANDWIDTH", 25e6)
    found = planned.compare("small", hosts, slots, drawn=drawn, simple=False)
    assert len(found) == drawn + 1
    for each in found:
        assert each.predicted_s == pytest.approx(each.simulated_s, rel=0.15), each
