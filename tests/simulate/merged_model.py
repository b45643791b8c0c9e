"""A small model of convolutions and merged layers, its task, and what one process makes of it, in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.run.faults import Fault
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.random_state import seed_everything

STEPS_OF_TORCH, BATCH = 6, 24
#: Samples that are evaluated: a few batches of each worker.
EVALUATED = 60


class Recipe:
    """Convolutions, and fully connected layers that perhaps have batch norm."""

    def __init__(self, *, norm: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(BATCH * STEPS_OF_TORCH, 2, 5, 5, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (len(self.x),), generator=generator)
        self.norm = norm
        self.models: list[nn.Sequential] = []

    def network(self) -> nn.Sequential:
        norm = nn.BatchNorm1d(8) if self.norm else nn.Identity()
        fc = [nn.Linear(36, 8, bias=not self.norm), norm, nn.Tanh(), nn.Linear(8, 3)]
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Flatten(), *fc).double()

    def task(self) -> Task:
        def model() -> nn.Module:
            self.models.append(self.network())
            return self.models[-1]

        data, few = TensorDataset(self.x, self.y), TensorDataset(self.x[:EVALUATED], self.y[:EVALUATED])
        loss = nn.functional.cross_entropy
        return Task(model=model, loss=loss, optimizer=self.optimizer, schedule=self.schedule, train_data=data, eval_data=few)

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.05)

    @staticmethod
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)

    def alone(self) -> nn.Sequential:
        """One process."""
        seed_everything(1)
        model = self.network()
        optimizer = self.optimizer(model.parameters())
        schedule = self.schedule(optimizer)
        for rows in torch.arange(len(self.x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(self.x[rows]), self.y[rows]).backward()
            optimizer.step()
            schedule.step()
        return model


def like(model: nn.Module, expected: nn.Module, layers: str) -> bool:
    own, names = model.state_dict(), [name for name in expected.state_dict() if name[0] in layers]
    return all(name in own and close(own[name], expected.state_dict()[name]) for name in names)


def close(mine: torch.Tensor, its: torch.Tensor) -> bool:
    return torch.allclose(mine, its, rtol=1e-11, atol=1e-12)


CONVOLUTIONS, MERGED = "02", "568"


def require(recipe: Recipe, expected: nn.Sequential, workers: int, *, copied: bool = False) -> None:
    """At least so many workers end with the convolutions of one process, and the FC server with the layers behind them. (If another
    one has a copy, that ends so, too, perhaps.)"""
    assert sum(like(model, expected, CONVOLUTIONS) for model in recipe.models) >= workers
    merged = sum(like(model, expected, MERGED) for model in recipe.models)
    assert merged >= 1 if copied else merged == 1


def trained(
    recipe: Recipe,
    *faults: Fault,
    hosts: int,
    exchange: Mapping[str, Any],
    groups: int = 2,
    size: int = 1,
    folder: Path | None = None,
    **job: Any,
) -> Result:
    """A whole synchronous run, which ends as it should.

    Args:
        recipe: what is trained. It has only this run's models afterwards.
        faults: of the run.
        hosts: how many there are.
        exchange, job: more settings of these sections.
        groups, size: how many there are, and their workers.
        folder: for checkpoints.
    """
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": STEPS_OF_TORCH, "timeout": "5 s", **job},
        "hosts": [{"name": f"h[1-{hosts}]", "slots": 1}],
        "compute": {"groups": groups, "group_size": size, "batch_size": BATCH // groups, "bucket_size": 256},
        "exchange": {"kind": "model_server", "staleness": "sync", "shards": 2, "merged_fc": True, **exchange},
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "data": {"shuffle": "none"},
        "simulation": {"payload": "real"},
    }
    recipe.models.clear()
    result = simulate(Topology.from_dict(document), options=Options(faults=faults, task=recipe.task(), checkpoints=folder))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    return result
