"""Averaging among groups of several workers goes on without those that are lost, and with those that come back: whole runs in
simulated time. The auditor compares the run's model with a replay in one process of what counted (`zmqtrain.simulate.replay`), and
what the workers of a group average; with torch it is a replay in plain PyTorch, in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.simulate.worlds import PEERS_STEPS as STEPS
from tests.simulate.worlds import peers_topology, run
from zmqtrain import Task
from zmqtrain.run.faults import Fault, kill, pause, restart, slow
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints
from zmqtrain.train.random_state import seed_everything

METHODS = ["", 'method = "elastic"', 'method = "outer"', 'method = "outer", overlap_steps = 2, fragments = 2']


def topology(method: str = "", *, every: int = 4, groups: int = 2, size: int = 2, job: str = "") -> Topology:
    exchange = f'kind = "averaging"\nevery = {every}\naveraging = {{ {method} }}'
    return peers_topology(exchange, groups=groups, size=size, job=job)


@pytest.mark.parametrize(("method", "size"), list(zip(METHODS, (2, 3, 2, 3), strict=True)))
def test_a_group_goes_on_with_fewer_and_trains_all_its_batches(method: str, size: int) -> None:
    steps, views, seconds = run(topology(method, size=size), kill("worker/1", step=7), kill(f"worker/{size}", step=13))
    gone = ("worker/1", f"worker/{size}")
    assert [len(members) for members in views] == [2 * size - 1, 2 * size - 2]
    assert all(steps[peer] == list(range(STEPS)) for peer in steps if peer not in gone)
    assert seconds < 1  # nobody waits for a time-out


@pytest.mark.parametrize("method", METHODS)
def test_one_that_comes_back_begins_with_the_model_of_its_group(method: str) -> None:
    steps, views, _ = run(topology(method, groups=3, job="restarts = 1"), restart("worker/0", at=0.004, after=0.002))
    assert len(views[-1]) == 6
    assert steps["worker/0"][-1] == STEPS - 1
    assert steps["worker/1"] == list(range(STEPS))


@pytest.mark.parametrize("method", METHODS)
def test_a_group_that_has_lost_its_last_worker_drops_out_and_comes_back_as_a_copy_of_another(method: str) -> None:
    faults = kill("worker/2", step=5), restart("worker/3", at=0.006, after=0.003)
    steps, views, _ = run(topology(method), *faults)
    assert ("worker/0", "worker/1") in views
    assert views[-1] == ("worker/0", "worker/1", "worker/3")
    assert steps["worker/3"][-1] == STEPS - 1
    run(topology(method, job="restarts = 2"), kill("worker/2", at=0.005), kill("worker/3", at=0.005))


@pytest.mark.parametrize("every", [1, 5])
def test_at_the_beginning_in_the_last_step_and_to_the_last_worker(every: int) -> None:
    run(topology(every=every), kill("worker/1", step=0))
    run(topology(every=every), kill("worker/3", step=STEPS - 1))
    steps, _, _ = run(topology(every=every), *(kill(f"worker/{rank}", step=4 * rank + 1) for rank in range(3)))
    assert steps["worker/3"] == list(range(STEPS))
    steps, _, _ = run(topology(every=every, groups=1, size=3), kill("worker/0", step=4), kill("worker/2", step=9))
    assert steps["worker/1"] == list(range(STEPS))


def test_one_that_stands_still_while_others_of_its_group_are_slow() -> None:
    run(topology(size=3, job="restarts = 1\neval_every = 5"), slow("worker/1", 20.0, at=0.003), pause("worker/2", 60.0, at=0.004))


@pytest.mark.parametrize(("seed", "method"), list(enumerate(METHODS)))
def test_random_faults_break_nothing(seed: int, method: str) -> None:
    shape = topology(method, groups=2 + seed % 2, size=3 - seed % 2, job="restarts = 2\neval_every = 7")
    assert [each.broken for each in explore(shape, [2 * seed + 1], faults="random") if each.broken] == []


# With torch.

GROUPS, SIZE, TORCH_STEPS, BATCH, EVERY = 2, 2, 9, 16, 3
#: Samples that are evaluated: a few batches of each worker.
EVALUATED = 60


class Recipe:
    """A task in double precision, and what it gives."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(GROUPS * BATCH * TORCH_STEPS, 12, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (len(self.x),), generator=generator)
        self.models: list[nn.Module] = []

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.05)

    def task(self) -> Task:
        def model() -> nn.Module:
            self.models.append(self.network())
            return self.models[-1]

        data, few = TensorDataset(self.x, self.y), TensorDataset(self.x[:EVALUATED], self.y[:EVALUATED])
        loss = nn.functional.cross_entropy
        return Task(model=model, loss=loss, optimizer=self.optimizer, train_data=data, eval_data=few)

    def replayed(self, method: str) -> list[nn.Module]:
        """The groups' models, computed by one process."""
        seed_everything(1)
        first = self.network()
        models = [self.network() for _ in range(GROUPS)]
        for model in models:
            model.load_state_dict(first.state_dict())
        optimizers = [self.optimizer(model.parameters()) for model in models]
        own = [list(model.parameters()) for model in models]
        center = [each.detach().clone() for each in first.parameters()]
        momentum = [torch.zeros_like(each) for each in center]
        for step in range(TORCH_STEPS):
            for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                rows = slice((step * GROUPS + group) * BATCH, (step * GROUPS + group + 1) * BATCH)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(self.x[rows]), self.y[rows]).backward()
                optimizer.step()
            if (step + 1) % EVERY:
                continue
            with torch.no_grad():
                for index, parameters in enumerate(zip(*own, strict=True)):
                    mean = sum(parameters) / GROUPS
                    if method == "elastic":
                        pulls = [0.9 / GROUPS * (each - center[index]) for each in parameters]
                        for each, pull in zip(parameters, pulls, strict=True):
                            each -= pull
                        center[index] += sum(pulls)
                        continue
                    if method == "outer":
                        change = center[index] - mean
                        momentum[index] = 0.9 * momentum[index] + change
                        center[index] -= 0.7 * (change + 0.9 * momentum[index])
                        mean = center[index]
                    for each in parameters:
                        each.copy_(mean)
        return models


def trained(
    recipe: Recipe,
    method: str,
    *faults: Fault,
    shuffle: str = "none",
    folder: Path | None = None,
    resume: Path | None = None,
    **job: Any,
) -> float:
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": TORCH_STEPS, "timeout": "5 s", "elastic": True, **job},
        "hosts": [{"name": "h[1-4]", "slots": 1}],
        "compute": {"groups": GROUPS, "group_size": SIZE, "batch_size": BATCH, "bucket_size": "1 KiB"},
        "exchange": {"kind": "averaging", "every": EVERY, "averaging": {"method": method}},
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "data": {"shuffle": shuffle},
        "simulation": {"payload": "real"},
    }
    if method == "outer":
        document["exchange"]["averaging"] |= {"outer_lr": 0.7, "outer_momentum": 0.9}
    recipe.models.clear()
    result = simulate(
        Topology.from_dict(document), options=Options(faults=faults, task=recipe.task(), checkpoints=folder, resume=resume)
    )
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    return result.seconds


def equal(model: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(mine, its, rtol=1e-11, atol=1e-12) for mine, its in pairs)


@pytest.mark.parametrize("method", ["average", "elastic", "outer"])
@pytest.mark.parametrize("restarts", [0, 2])
def test_as_long_as_one_of_each_group_is_left_nothing_is_changed(method: str, restarts: int) -> None:
    """In the middle of steps, of averages, of evaluations and of checkpoints: with each method at four moments."""
    recipe = Recipe()
    expected = recipe.replayed(method)
    alike = [1, 1] if method == "elastic" else [2, 2]  # groups with the same model in the end
    job = {"restarts": restarts, "eval_every": 4, "checkpoint_every": 4}
    seconds = trained(recipe, method, **job)
    assert [sum(equal(model, its) for model in recipe.models) for its in expected] == [SIZE * each for each in alike]
    most = 0
    for part in (4, 8) if restarts else (2, 6):
        faults = kill("worker/0", at=seconds * part / 10), kill("worker/3", at=seconds * (part + 0.3) / 10)
        trained(recipe, method, *faults, **job)
        there = min(sum(equal(model, its) for model in recipe.models) for its in expected)
        assert there >= alike[0], part
        most = max(most, there)
    assert not restarts or most == alike[0] * SIZE


@pytest.mark.parametrize("method", ["average", "elastic", "outer"])
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_is_gone_on_from_by_as_many_as_there_were(method: str, before: bool, after: bool, tmp_path: Path) -> None:
    """``before``, ``after``: whether the runs are elastic. There a worker keeps more than its part of what averaging keeps."""
    recipe = Recipe()
    expected = recipe.replayed(method)
    lost = [kill("worker/2", step=3), kill("worker/1", step=4)]
    trained(recipe, method, *(lost if before else ()), folder=tmp_path / "first", elastic=before, steps=5, checkpoint_every=5)
    (kept,) = find_checkpoints(tmp_path / "first")
    faults = [kill("worker/3", step=7)] if after else []
    trained(recipe, method, *faults, folder=tmp_path / "then", resume=kept, elastic=after, checkpoint_every=5)
    there = [sum(equal(model, its) for model in recipe.models) for its in expected]
    assert there == ([2, 1] if method == "elastic" else [3, 3]) if after else ([2, 2] if method == "elastic" else [4, 4])


@pytest.mark.parametrize("shuffle", ["global", "ring"])
def test_samples_stay_those_of_the_group(shuffle: str) -> None:
    """A worker that is lost, and one that comes back, change nothing about what its group trains."""
    recipe = Recipe()
    trained(recipe, "elastic", shuffle=shuffle)
    expected = [next(m for m in recipe.models if not equal(m, recipe.models[0])), recipe.models[0]]
    trained(recipe, "elastic", kill("worker/1", step=2), kill("worker/2", step=4), shuffle=shuffle, restarts=1)
    assert [sum(equal(model, its) for model in recipe.models) for its in expected] == [2, 2]
