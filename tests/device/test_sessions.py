"""Loops of one's own with a model on a device, beside the same on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zmqtrain
from tests.embed.test_session import DATA, network, sgd
from tests.precision import close
from zmqtrain.errors import UsageError


def train(device: torch.device, how: str) -> tuple[dict[str, Tensor], list[float]]:
    """Five epochs in a session of one worker."""
    model, losses = network().double().to(device), []
    inputs, target = (each.double() if each.is_floating_point() else each for each in DATA[:40])
    with zmqtrain.session() as session:
        model, optimizer = session.replicate(model, sgd(model))
        for _ in range(5):
            optimizer.zero_grad()
            micro = 2 if how == "accumulating" else 1
            for number, (x, y) in enumerate(zip(inputs.chunk(micro), target.chunk(micro), strict=True)):
                within: Any = session.accumulating() if number < micro - 1 else nullcontext()
                with within:
                    loss = cross_entropy(model(x.to(device)), y.to(device)) / micro
                    loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return {name: each.detach().cpu() for name, each in model.state_dict().items()}, losses


@pytest.mark.parametrize("how", ["plain", "accumulating"])
def test_it_trains_as_on_the_cpu(how: str, device: torch.device) -> None:
    ours, losses = train(device, how)
    theirs, expected = train(torch.device("cpu"), how)
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, tensor in theirs.items():
        close(ours[name], tensor, name)


def test_tensors_of_the_device_are_added_up(device: torch.device) -> None:
    with zmqtrain.session() as session:
        tensor = torch.arange(6.0, device=device).view(2, 3)
        assert session.all_reduce(tensor) is tensor
        assert session.all_reduce(tensor.t(), "mean").device == device
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_device_that_tensors_cannot_travel_from_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with zmqtrain.session() as session, pytest.raises(UsageError, match="a model on meta cannot be trained"):
        session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
