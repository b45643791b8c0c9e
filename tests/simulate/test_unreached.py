"""Parameters that some backward passes do not reach: optimizers pass over them, as torch's alone does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from zmqtrain import Task
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.random_state import seed_everything

STEPS, BATCH = 9, 8
#: Samples that take the rare branch: in steps 2, 3 and 6, each time those of one worker of four only.
RARE = (2 * BATCH + 1, 3 * BATCH + 6, 6 * BATCH + 4)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused, self.rare, self.head = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x[:, 1:]))
        rare = x[:, :1]
        if bool(rare.any()):
            hidden = hidden + rare * self.rare(hidden) * self.scale
        output: Tensor = self.head(hidden)
        return output


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS * BATCH, 6, dtype=torch.float64, generator=generator)
    x[:, 0] = 0
    x[list(RARE), 0] = 1
    return TensorDataset(x, torch.randint(3, (STEPS * BATCH,), generator=generator))


Make = Callable[[Any], torch.optim.Optimizer]
SGD: Make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
DAMPENED: Make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01)
ADAM: Make = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
OPTIMIZERS = {"sgd": SGD, "dampened": DAMPENED, "adam": ADAM}


def alone(make: Make, every: int = 1) -> nn.Module:
    """One process on the whole batches, torch alone."""
    seed_everything(1)
    model = Branches().double()
    optimizer = make(model.parameters())
    x, y = data().tensors
    for step in range(STEPS // every):
        rows = slice(step * BATCH * every, (step + 1) * BATCH * every)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def trained(make: Make, groups: int, size: int, exchange: dict[str, Any], **sections: dict[str, Any]) -> list[nn.Module]:
    """The workers' models."""
    models: list[nn.Module] = []

    def model() -> nn.Module:
        models.append(Branches().double())
        return models[-1]

    task = Task(model=model, loss=nn.functional.cross_entropy, optimizer=make, train_data=data())
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": STEPS, "timeout": "20 s"},
        "hosts": [{"name": "h[1-4]", "slots": 2}],
        "compute": {"groups": groups, "group_size": size, "batch_size": BATCH // groups, "device": "cpu", "threads": 1},
        "exchange": exchange,
        "network": {"bandwidth": "1 Gbit/s", "latency": "100 us"},
        "data": {"shuffle": "none"},
        "simulation": {"payload": "real"},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    warnings: list[Any] = []

    def told(_: str, events: Any) -> None:
        warnings.extend(event["values"]["text"] for event in events if event["kind"] == "warning")

    result = simulate(Topology.from_dict(document), options=Options(task=task, on_report=told))
    assert (result.ending.status, result.broken) == ("done", []), result.ending
    assert not [text for text in warnings if "gave no gradient" in text]
    return models


EXACT: dict[str, dict[str, Any]] = {
    "allreduce": {"exchange": {"kind": "allreduce"}},
    "every": {"exchange": {"kind": "allreduce", "every": 3}},
    "clipped": {"exchange": {"kind": "allreduce"}, "optimizer": {"clip_norm": 1e6}},
    "small buckets": {"exchange": {"kind": "allreduce"}, "compute": {"bucket_size": "100 B"}},
    "servers": {"exchange": {"kind": "model_server", "staleness": "sync", "shards": 2}},
    "small pieces": {
        "exchange": {"kind": "model_server", "staleness": "sync", "shards": 3, "split_size": "64 B"},
        "compute": {"bucket_size": "1 KiB"},
    },
    "servers clip": {"exchange": {"kind": "model_server", "staleness": "sync"}, "optimizer": {"clip_norm": 1e6}},
}


@pairwise({"how": list(EXACT), "optimizer": list(OPTIMIZERS), "groups, size": [(4, 1), (2, 2)]})
def test_equals_one_process(how: str, optimizer: str, groups: int, size: int) -> None:
    make, sections = OPTIMIZERS[optimizer], EXACT[how]
    wanted = alone(make, sections["exchange"].get("every", 1)).state_dict()
    for model in trained(make, groups, size, **sections):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")
            if name.startswith("unused"):
                assert torch.equal(tensor, wanted[name])


OTHERS: dict[str, dict[str, Any]] = {
    "gossip": {"exchange": {"kind": "gossip"}},
    "gradients": {"exchange": {"kind": "gossip", "gossip": {"exchange": "gradients"}}},
    "batch": {"exchange": {"kind": "gossip", "gossip": {"granularity": "batch"}}},
    "averaging": {"exchange": {"kind": "averaging", "every": 2, "averaging": {"method": "average"}}},
    "async": {"exchange": {"kind": "model_server", "staleness": "async"}},
    "fp16": {"exchange": {"kind": "model_server", "staleness": "async", "compression": "fp16"}},
    "look ahead": {"exchange": {"kind": "model_server", "staleness": "async"}, "optimizer": {"momentum": "auto"}},
}


@pytest.mark.parametrize(("how", "groups"), [(how, 2 + 2 * (number % 2)) for number, how in enumerate(OTHERS)])
def test_what_is_never_reached_stays_as_it_is(how: str, groups: int) -> None:
    """Of each kind of exchange one runs among single workers, and one among pairs."""
    before = alone(ADAM).state_dict()  # where it stays, too
    for model in trained(ADAM, groups, 4 // groups, **OTHERS[how]):
        for name in ("unused.weight", "unused.bias"):
            assert torch.equal(model.state_dict()[name], before[name]), name
