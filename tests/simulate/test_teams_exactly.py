"""Synchronous groups of several workers compute what one process computes on the whole batches, whoever of them is lost or comes:
torch in simulated time, in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.run.faults import Fault, kill
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.random_state import seed_everything

GROUPS, SIZE, STEPS, BATCH, FEATURES = 2, 2, 6, 32, 12
#: Samples that are evaluated: a few batches of each worker.
EVALUATED = 60
#: Of a group.
SHARE = BATCH // GROUPS


class Recipe:
    """A task with a frozen layer, and perhaps batch norm."""

    def __init__(self, *, norm: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(BATCH * STEPS, FEATURES, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (len(self.x),), generator=generator)
        self.norm = norm
        self.models: list[nn.Module] = []

    def network(self) -> nn.Module:
        norm = nn.BatchNorm1d(16) if self.norm else nn.Identity()
        model = nn.Sequential(
            nn.Linear(FEATURES, 16, bias=False), norm, nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)
        ).double()
        model[3].requires_grad_(requires_grad=False)
        return model

    def task(self) -> Task:
        def model() -> nn.Module:
            self.models.append(self.network())
            return self.models[-1]

        data, few = TensorDataset(self.x, self.y), TensorDataset(self.x[:EVALUATED], self.y[:EVALUATED])
        loss = nn.functional.cross_entropy
        return Task(model=model, loss=loss, optimizer=self.optimizer, schedule=self.schedule, train_data=data, eval_data=few)

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([each for each in parameters if each.requires_grad], lr=0.1)

    @staticmethod
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)

    def replayed(self, parts: Sequence[Sequence[int]]) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
        """One process. ``parts``: into how many parts each group's batch is divided, by step. Returns the model, and the buffers of
        the first worker of each group."""
        seed_everything(1)
        model = self.network()
        optimizer = self.optimizer(model.parameters())
        schedule = self.schedule(optimizer)
        buffers = [{name: each.clone() for name, each in model.named_buffers()} for _ in range(GROUPS)]
        for step, divided in enumerate(parts):
            optimizer.zero_grad()
            for group, count in enumerate(divided):
                start = step * BATCH + group * SHARE
                for number, rows in enumerate(torch.arange(start, start + SHARE).tensor_split(count)):
                    with torch.no_grad():
                        for name, buffer in model.named_buffers():
                            buffer.copy_(buffers[group][name])
                    loss = nn.functional.cross_entropy(model(self.x[rows]), self.y[rows])
                    (loss * len(rows) / BATCH).backward()
                    if number == 0:
                        buffers[group] = {name: each.clone() for name, each in model.named_buffers()}
            optimizer.step()
            schedule.step()
        return model, buffers


def run(recipe: Recipe, *faults: Fault, job: dict[str, Any] | None = None) -> Result:
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": STEPS, "timeout": "5 s", "elastic": True, **(job or {})},
        "hosts": [{"name": "h[1-6]", "slots": 1}],
        "compute": {"groups": GROUPS, "group_size": SIZE, "batch_size": SHARE, "bucket_size": "1 KiB"},
        "exchange": {"kind": "model_server", "staleness": "sync", "shards": 2},
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "data": {"shuffle": "none"},
        "simulation": {"payload": "real"},
    }
    shape = Topology.from_dict(document)
    result = simulate(shape, options=Options(faults=faults, task=recipe.task()))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    return result


def require_equal(model: nn.Module, expected: nn.Module) -> None:
    for mine, its in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("faults", "restarts"),
    [
        ([kill("worker/1", step=0)], 0),
        ([kill("worker/0", step=2)], 0),
        ([kill("worker/0", step=2)], 2),
        ([kill("worker/3", step=STEPS - 1)], 2),
        ([kill("worker/1", step=2), kill("worker/2", step=2)], 0),
        ([kill("worker/1", step=2), kill("worker/2", step=3)], 2),
    ],
    ids=["beginning-0", "middle-0", "middle-2", "last step-2", "one of each group-0", "one after the other-2"],
)
def test_a_lost_worker_changes_nothing(faults: list[Fault], restarts: int) -> None:
    recipe = Recipe(norm=False)
    run(recipe, *faults, job={"restarts": restarts})
    lost = {int(str(fault.target).rpartition("/")[2]) for fault in faults}
    alone, _ = recipe.replayed([[1, 1]] * STEPS)
    assert len(recipe.models) == GROUPS * SIZE + (len(lost) if restarts else 0)
    for rank, model in enumerate(recipe.models):
        if rank not in lost:
            require_equal(model, alone)


@pytest.mark.parametrize("step", [0, 2, STEPS - 1])
def test_batch_norm_has_seen_the_repeated_batch_once(step: int) -> None:
    """Each worker normalizes its own part of a batch; the one that is left has the whole batch from the repeated step on."""
    recipe = Recipe(norm=True)
    run(recipe, kill("worker/1", step=step))
    model, buffers = recipe.replayed([[2 if each < step else 1, 2] for each in range(STEPS)])
    require_equal(recipe.models[0], model)
    for name, buffer in recipe.models[0].named_buffers():
        torch.testing.assert_close(buffer, buffers[0][name], rtol=1e-11, atol=1e-12)


def test_at_any_moment_also_during_evaluations_and_checkpoints() -> None:
    recipe = Recipe(norm=False)
    job = {"checkpoint_every": 1, "eval_every": 2, "restarts": 1}
    seconds = run(recipe, job=job).seconds
    expected, _ = recipe.replayed([[1, 1]] * STEPS)
    for part in (2, 4, 7, 9):
        recipe.models.clear()
        run(recipe, kill("worker/0", at=seconds * part / 10), job=job)
        require_equal(recipe.models[1], expected)
