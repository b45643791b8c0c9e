"""Values that change in training and are not in checkpoints."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.train.world import Recipe, network_of, run, topology_of
from zmqtrain.train.forgotten import Forgotten


class Counting(nn.Module):
    """Keeps in plain attributes what a resumed run would begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.zeros(()))
        self.constant, self.name, self.sizes = 3, "counting", (2, 2)
        self._calls = 0
        self.center = torch.zeros(2)
        self.scales = {"in": 1.0}
        self.last: Tensor | None = None
        self.losses: list[float] = []
        self.recent: deque[float] = deque(maxlen=3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(self.layer(inputs))
        self.last = output.detach()
        self.losses.append(float(output.detach().mean()))
        self.kept += 1
        return output


def warnings(*changed: str) -> list[str]:
    model = nn.Sequential(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Forgotten(model, optimizer)
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    own = model[0]
    for name in changed:
        if name == "center":
            own.center = own.center * 0.9 + 1
        elif name == "scales":
            own.scales["in"] = 2.0
        else:
            own._calls += 1
    return watched.warnings(scheduled=False)


def test_caches_records_buffers_and_constants_are_no_cause_for_a_warning() -> None:
    assert warnings() == []


@pytest.mark.parametrize(("changed", "named"), [("calls", "0._calls"), ("center", "0.center"), ("scales", "0.scales")])
def test_numbers_and_tensors_in_plain_attributes_are_named(changed: str, named: str) -> None:
    (text,) = warnings(changed)
    assert text.startswith(f"the model changes {named!r}, which checkpoints and model.safetensors do not hold")


def test_many_are_counted() -> None:
    model = nn.ModuleList(Counting() for _ in range(5))
    watched = Forgotten(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for each in model:
        each._calls = 1
    (text,) = watched.warnings(scheduled=False)
    assert "'0._calls', '1._calls', '2._calls' and 2 more" in text


class Own(torch.optim.AdamW):
    """A class of a task's own, of which it is not known what it keeps."""


def test_what_a_schedule_sets_is_set_again() -> None:
    model = nn.Linear(2, 2)
    optimizer = Own(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
    watched = Forgotten(model, optimizer)
    optimizer.step()
    schedule.step()
    assert watched.warnings(scheduled=True) == []
    assert "'betas'" in watched.warnings(scheduled=False)[0]


class Counted(nn.Sequential):
    """The model that the other tests train, with a number of its own."""

    def __init__(self) -> None:
        super().__init__(network_of(torch.float64))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs)


@pytest.mark.parametrize("grid", ["1x2", "2x1"])
async def test_a_run_warns_with_its_first_checkpoint(grid: str, tmp_path: Path) -> None:
    shape = {"groups": 1, "group_size": 2, "batch_size": 12, "grid": grid}
    topology = topology_of(job={"steps": 4, "checkpoint_every": 2}, compute=shape)
    result = await run(topology, Recipe(model=Counted), folder=tmp_path)
    assert not result.errors
    (warning,) = [event for recorder in result.recorders.values() for event in recorder.of("warning")]
    assert warning["step"] == 2
    assert "the model changes 'calls'" in warning["text"]
