"""How long the layers of a model sleep, and that they compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import paced as module
from benchmarks.paced import paced


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The naps so far."""
    naps: list[float] = []
    monkeypatch.setattr(module.time, "sleep", naps.append)
    return naps


def test_layers_sleep_by_their_share_of_a_step(slept: list[float]) -> None:
    layers = [{"name": "0", "forward_s": 1.0, "backward_s": 2.0}, {"name": "2", "forward_s": 2.0, "backward_s": 5.0}]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = nn.Sequential(*model)
    inputs = torch.ones(2, 3)
    expected = torch.autograd.grad(plain(inputs).sum(), list(plain.parameters()))
    paced(model, {"layers": layers}, 1.0)
    loss = model(inputs).sum()
    assert slept == pytest.approx([0.1, 0.2])
    loss.backward()
    assert slept[2:] == pytest.approx([0.5, 0.2])
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected, strict=True))


def test_evaluation_does_not_sleep(slept: list[float]) -> None:
    model = paced(nn.Sequential(nn.Linear(3, 4)), {"layers": [{"name": "0", "forward_s": 1.0, "backward_s": 2.0}]}, 1.0)
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert not slept


def test_parts_of_a_layer_sleep_with_it(slept: list[float]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    parts = [{"name": f"0.{name}", "forward_s": 1.0, "backward_s": 2.0} for name in ("self_attn", "linear1")]
    model = paced(nn.Sequential(layer), {"layers": parts}, 0.6)
    model(torch.ones(1, 4, 8)).sum().backward()
    assert slept == pytest.approx([0.2, 0.4])
