"""The layers of a task's model: it is made without content, or in the ordinary way if its code needs values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zmqtrain
from zmqtrain.plan.setup import source_of
from zmqtrain.topology.load import parse_topology

#: Where models were made.
DEVICES: list[str] = []


class Valued(nn.Module):
    """Its constructor needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0, 0.5, 3).tolist()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        DEVICES.append(str(self.layers[0].weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.rates[1]  # type: ignore[no-any-return]


class Watching(Valued):
    """Its forward needs values."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.rates = [0.0, 0.25]
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        DEVICES.append(str(self.layers[0].weight.device))

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if float(found.sum()) < 1e9 else found * 2


def plain() -> nn.Module:
    found = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    DEVICES.append(str(found[0].weight.device))
    return found


def task(kind: str) -> zmqtrain.Task:
    make = {"plain": plain, "valued": Valued, "watching": Watching}[kind]
    data = TensorDataset(torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))
    return zmqtrain.Task(
        model=make, loss=nn.functional.cross_entropy, optimizer=lambda each: torch.optim.SGD(each, 0.1), train_data=data
    )


@pytest.mark.parametrize(("kind", "devices"), [("plain", ["meta"]), ("valued", ["cpu"]), ("watching", ["meta", "cpu"])])
def test_a_model_is_made_without_content_where_that_is_possible(kind: str, devices: list[str]) -> None:
    DEVICES.clear()
    topology = parse_topology(f'[job]\nname = "plan"\ntask = "tests.plan.test_setup:task"\nargs = {{ kind = "{kind}" }}\n')
    layers = source_of(topology).stages
    assert [stage.head.outputs for stage in layers] == [(6,), (4,)]
    assert devices == DEVICES


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        (nn.functional.cross_entropy, 3),
        (nn.CrossEntropyLoss(), 3),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 4),
        (nn.CrossEntropyLoss(reduction="sum"), 0),
        (lambda output, target: nn.functional.cross_entropy(output, target), 0),
    ],
)
def test_what_a_loss_of_divided_logits_tells_is_known_to_the_plan(loss: Any, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataclasses.replace(task("plain"), loss=loss)
    monkeypatch.setitem(globals(), "task", lambda kind: made)
    topology = parse_topology('[job]\nname = "plan"\ntask = "tests.plan.test_setup:task"\nargs = { kind = "plain" }\n')
    assert [layer.loss_numbers for layer in source_of(topology).layers if layer.weights] == [0, numbers]
