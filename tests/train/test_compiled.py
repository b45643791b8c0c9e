"""Tasks whose model is compiled, whole or in part: they train what the plain model trains, and their graphs stay whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from zmqtrain import Task
from zmqtrain.embed.own_run import open_run
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.schema import Topology

#: Torch means to suppress it when it compiles for a tensor that is no leaf, but for one thread only: here workers are threads.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Parts(nn.Module):
    """A layer that is called within compiled code and outside of it, one compiled block, and plain layers."""

    def __init__(self, backend: str | None, way: str) -> None:
        super().__init__()
        shared = nn.Linear(16, 16)
        block: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), shared)
        if backend is not None and way == "function":
            block = torch.compile(block, backend=backend)  # type: ignore[assignment]
        elif backend is not None:
            block.compile(backend=backend)
        self.block, self.first, self.shared, self.last = block, nn.Linear(6, 16), shared, nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.block(self.shared(torch.tanh(self.first(inputs)))))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def whole(backend: str | None, way: str) -> nn.Module:
    model = Net()
    if backend is not None and way == "function":
        return torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]
    if backend is not None:
        model.compile(backend=backend, fullgraph=True)
    return model


def train(build: Callable[[], nn.Module], exchange: dict[str, Any], groups: int, folder: Path) -> dict[str, Tensor]:
    """The model that the run leaves."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))

    def task() -> Task:
        return Task(
            model=build,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            train_data=data,
            eval_data=data,
        )

    topology = Topology.model_validate(
        {
            "job": {"steps": 6, "eval_every": 3, "checkpoint_every": 4, "timeout": 60.0, "oversubscribe": True, "elastic": False},
            "compute": {"groups": groups, "batch_size": 8, "bucket_size": 512, "device": "cpu"},
            "exchange": exchange,
        }
    )

    async def run_all() -> None:
        opened = open_run(topology, network=MemoryNetwork(), checkpoints=folder / "checkpoints")
        async with opened as run, asyncio.TaskGroup() as tasks:
            for role in run.placement.roles:
                tasks.create_task(run.role(role.peer, task=task() if role.kind == "worker" else None))

    asyncio.run(run_all())
    return load_file(folder / "model.safetensors")


@pairwise(
    {
        "exchange, groups": {
            "allreduce": ({"kind": "allreduce"}, 2),
            "sync": ({"kind": "model_server", "staleness": "sync"}, 2),
            "async": ({"kind": "model_server", "staleness": "async"}, 1),  # alone, so that the result is one
            "gossip": ({"kind": "gossip"}, 2),
        },
        "backend": ["eager", "aot_eager"],
        "way": ["function", "method"],
    }
)
def test_a_compiled_model_is_trained_as_the_plain_one(
    exchange: dict[str, Any], groups: int, backend: str, way: str, tmp_path: Path
) -> None:
    """With ``fullgraph=True``, so that torch refuses whatever would break the graph."""
    plain = train(lambda: whole(None, way), exchange, groups, tmp_path / "plain")
    compiled = train(lambda: whole(backend, way), exchange, groups, tmp_path / "compiled")
    assert compiled.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["function", "method"])
def test_compiled_in_part(way: str, tmp_path: Path) -> None:
    """What hooks do within compiled code is no part of it: it is compiled once, and not anew for each state of the gates."""
    plain = train(lambda: Parts(None, way), {"kind": "allreduce"}, 2, tmp_path / "plain")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled = train(lambda: Parts("eager", way), {"kind": "allreduce"}, 2, tmp_path / "compiled")
    assert {name.replace("_orig_mod.", "") for name in compiled} == set(plain)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-5, atol=1e-6)
