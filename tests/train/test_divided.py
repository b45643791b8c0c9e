"""Groups that divide their model over a grid: training equals one process, under every exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from tests.train.staged import StagedDevice
from tests.train.test_worker import alone
from tests.train.world import Recipe, run, topology_of
from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.data.partition import Partition
from zmqtrain.errors import TaskError
from zmqtrain.train.random_state import seed_everything

KINDS: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "server": {"kind": "model_server", "staleness": "sync", "shards": 1},
    "servers": {"kind": "model_server", "staleness": "sync", "shards": 3, "split_size": 512},
    "averaging": {"kind": "averaging"},
}


def network(norm: bool = True) -> nn.Module:
    """A convolution, batch norm and pooling, then linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm2d(5) if norm else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(5, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 3, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    ).double()


def data_of(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 2, 9, 7, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def recipe_of(norm: bool = True, **fields: Any) -> Recipe:
    return Recipe(model=lambda: network(norm), train_data=data_of(72), eval_data=data_of(23), **fields)


def whole(recipe: Recipe, peers: list[str]) -> torch.Tensor:
    """The ordinary model's parameters, of the parts that a column has."""
    parts = [dict(recipe.models[peer].named_parameters()) for peer in peers]
    found = []
    for name, parameter in network(norm="1.weight" in parts[0]).named_parameters():
        tensors = [part[name].detach() for part in parts]
        same = tuple(tensors[0].shape) == tuple(parameter.shape)
        found.append((tensors[0] if same else torch.cat(tensors)).reshape(-1))
    return torch.cat(found)


def plan_of(choice: str, grid: str) -> list[dict[str, str]]:
    return [{"layer": name, "choice": choice if name in "04" else "model", "grid": grid} for name in ("0", "4", "7", "9")]


@pairwise(
    {
        "groups, grid": [(1, "2x1"), (1, "3x2"), (2, "2x2")],
        "kind": list(KINDS),
        "choice": ["model", "domain", "batch"],
    }
)
async def test_divided_groups_equal_one_process(groups: int, grid: str, kind: str, choice: str) -> None:
    recipe, steps, (rows, columns) = recipe_of(), 2, map(int, grid.split("x"))
    topology = topology_of(
        job={"steps": steps},
        compute={"groups": groups, "group_size": rows * columns, "batch_size": 12 // groups, "grid": grid},
        parallel={"layers": plan_of(choice, grid), "verify": kind == "servers"},
        exchange=KINDS[kind],
    )
    result = await run(topology, recipe)
    assert not result.errors, result.errors
    # Batch norm's statistics are of a group's batch, and one process would have those of all groups.
    if groups == 1:
        expected = alone(recipe_of(), steps, 12)
        torch.testing.assert_close(whole(recipe, [f"worker/{row}" for row in range(rows)]), expected, rtol=1e-10, atol=1e-12)
    for group in range(groups):
        for column in range(columns):
            peers = [f"worker/{group * rows * columns + column * rows + row}" for row in range(rows)]
            assert torch.equal(whole(recipe, peers), whole(recipe, [f"worker/{row}" for row in range(rows)]))
    losses = [result.losses(f"worker/{rank}") for rank in range(groups * rows * columns)]
    assert all(len(each) == steps for each in losses)
    spans = {name for name, _ in result.recorders["worker/0"].spans}
    assert "statistics of 9 (forward)" in spans, "logits stay divided"
    evaluations = [event for recorder in result.recorders.values() for event in recorder.of("eval")]
    assert evaluations
    assert all(0 <= event["eval_accuracy"] <= 1 for event in evaluations)


@pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
@pytest.mark.parametrize("kind", ["allreduce", "averaging", "gossip"])
async def test_rows_sum_in_the_hosts_memory(kind: str) -> None:
    """Each row its own part, all together what is whole, and also staged: the numbers are those of sums over the network."""
    found = []
    ways = [(False, False), (True, False), (True, True)]
    if kind != "allreduce":  # what does not stage is all-reduce's own; the sums of all kinds are the same code
        del ways[1]
    for shared, staged in ways:
        recipe = recipe_of()
        topology = topology_of(
            job={"steps": 2},
            compute={"groups": 2, "group_size": 4, "batch_size": 12, "grid": "2x2"},
            parallel={"layers": plan_of("domain", "2x2")},
            exchange={"kind": kind},
        )
        region = Arena.create(16, 1 << 20) if shared else None
        result = await run(topology, recipe, region=region, make_device=(lambda _role: StagedDevice(1e-4)) if staged else None)
        assert not result.errors, result.errors
        found.append([recipe.parameters(peer) for peer in sorted(recipe.models)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["async", "gossip"])
async def test_divided_groups_train_asynchronously(kind: str) -> None:
    """Two grids, asynchronous to each other: what a column has of whole parameters stays the same on all its rows."""
    exchange = {"kind": "model_server", "staleness": "async"} if kind == "async" else {"kind": "gossip"}
    recipe = recipe_of()
    topology = topology_of(
        job={"steps": 8},
        compute={"groups": 2, "group_size": 4, "batch_size": 12, "grid": "2x2"},
        parallel={"layers": plan_of("domain", "2x2")},
        exchange=exchange,
    )
    result = await run(topology, recipe)
    assert not result.errors, result.errors
    losses = [loss for rank in (0, 4) for loss in result.losses(f"worker/{rank}")]
    assert min(losses[-6:]) < losses[0]
    for peer in recipe.models:
        group = int(peer.removeprefix("worker/")) // 4
        assert torch.equal(recipe.models[peer][0].weight, recipe.models[f"worker/{4 * group}"][0].weight)  # type: ignore[index]


async def test_evaluation_of_a_divided_model_is_that_of_the_whole() -> None:
    values = []
    for grid in ("2x2", "1x1"):
        size = 4 if grid == "2x2" else 1
        topology = topology_of(
            job={"steps": 2}, compute={"group_size": size, "batch_size": 12, "grid": grid}, exchange={"kind": "allreduce"}
        )
        result = await run(topology, recipe_of())
        assert not result.errors, result.errors
        (event,) = result.recorders["worker/0"].of("eval")
        values.append((event["eval_loss"], event["eval_accuracy"]))
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.parametrize(("kind", "other"), [("allreduce", "2x2"), ("averaging", "4x1"), ("server", "1x4")])
async def test_a_run_resumes_on_another_grid(kind: str, other: str, tmp_path: Path) -> None:
    """Checkpoints hold the ordinary model and optimizer: the run goes on as one process that never stopped. Other exchanges and
    grids are in test_resume_on_grids.py."""
    compute = {"group_size": 4, "batch_size": 12, "grid": "2x2"}
    exchange = KINDS[kind]
    norm = other != "1x4"  # where nothing but the batch is divided, batch norm's statistics are each worker's own
    stopped, resumed = recipe_of(norm), recipe_of(norm)
    half = topology_of(job={"steps": 3, "checkpoint_every": 3}, compute=compute, exchange=exchange)
    assert not (await run(half, stopped, folder=tmp_path)).errors
    rest = topology_of(job={"steps": 6}, compute={**compute, "grid": other}, exchange=exchange)
    result = await run(rest, resumed, resume=tmp_path)
    assert not result.errors, result.errors
    rows = int(other.split("x")[0])
    found = whole(resumed, [f"worker/{row}" for row in range(rows)])
    torch.testing.assert_close(found, alone(recipe_of(norm), 6, 12), rtol=1e-10, atol=1e-12)


async def test_what_is_computed_on_gathered_tensors_is_said_once() -> None:
    class Median(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.median()

    topology = topology_of(
        job={"steps": 3}, compute={"group_size": 2, "batch_size": 4, "grid": "2x1"}, exchange={"kind": "allreduce"}
    )
    result = await run(topology, Recipe(model=lambda: nn.Sequential(Median(), nn.Linear(6, 3).double())))
    assert not result.errors, result.errors
    said = [event["layer"] for event in result.recorders["worker/0"].of("left whole")]
    assert len(set(said)) == len(said)
    assert "0: aten::median" in said


async def test_a_forward_may_branch_on_values() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum() > 0 else self.inner(-x)

    def model() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Tanh(), Branches())

    topology = topology_of(
        job={"steps": 4}, compute={"group_size": 4, "batch_size": 12, "grid": "2x2"}, exchange={"kind": "allreduce"}
    )
    recipe = Recipe(model=model)
    result = await run(topology, recipe)
    assert not result.errors, result.errors
    parts = [dict(recipe.models[peer].named_parameters())["1.inner.weight"] for peer in ("worker/0", "worker/1")]
    expected = alone(Recipe(model=model), 4, 12)[: 6 * 3].reshape(3, 6)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-10, atol=1e-12)


class Rare(nn.Module):
    """A layer that only every third step of training takes. It is left whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(9, 9), 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return torch.tanh(self.layer(hidden)) if self.training and self.steps % 3 == 0 else hidden


class Branches(nn.Module):
    """A layer that no backward reaches, one that some do, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.detached, self.unused, self.head = (nn.Linear(*sizes) for sizes in ((4, 9), (9, 9), (9, 7), (9, 3)))
        self.rare = Rare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.rare(torch.tanh(self.body(x)))
        scores: torch.Tensor = self.head(hidden + self.detached(hidden).detach())
        return scores


#: Where a gradient of zeros is another thing than none.
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
}


@pairwise({"grid": ["2x1", "2x2"], "optimizer": list(OPTIMIZERS), "groups": [1, 2], "kind": ["allreduce", "server", "servers"]})
async def test_what_no_backward_reaches_is_passed_over(kind: str, groups: int, optimizer: str, grid: str) -> None:
    """As PyTorch alone does, on both rows, whose parts of a parameter are of different sizes."""
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(24, 4, generator=generator, dtype=torch.float64), torch.randint(3, (24,), generator=generator))

    def recipe() -> Recipe:
        return Recipe(model=lambda: Branches().double(), optimizer=OPTIMIZERS[optimizer], train_data=data, eval_data=None)

    (rows, columns), steps, batch = map(int, grid.split("x")), 7, 8
    shared = recipe()
    topology = topology_of(
        job={"steps": steps},
        compute={"groups": groups, "group_size": rows * columns, "batch_size": batch // groups, "grid": grid},
        parallel={
            "whole": ["rare"],
            "layers": [{"layer": name, "choice": "model", "grid": grid} for name in ("body", "detached", "head")],
        },
        exchange=KINDS[kind],
    )
    result = await run(topology, shared)
    assert not result.errors, result.errors
    divided = set()
    for name, wanted in alone_without_zeros(recipe(), steps, batch).items():
        parts = [dict(shared.models[f"worker/{row}"].named_parameters())[name].detach() for row in range(rows)]
        if parts[0].shape != wanted.shape:
            divided.add(name)
            parts = [torch.cat(parts)]
        for part in parts:
            torch.testing.assert_close(part, wanted, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert {"body.weight", "detached.weight", "head.bias"} <= divided


def alone_without_zeros(recipe: Recipe, steps: int, batch: int) -> dict[str, torch.Tensor]:
    """The parameters after plain torch training on whole batches, where what is not reached has no gradient."""
    seed_everything(1)
    task = recipe("alone")
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    partition = Partition(len(task.train_data), 1, 1, batch, 1)
    for step in range(steps):
        inputs, targets = task.train_data[torch.from_numpy(partition.indices(step, 0, 0).copy())]
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("change", ["activation", "dropout"])
async def test_workers_that_divide_other_models_are_refused(change: str) -> None:
    """Also where nothing is compared with the ordinary model."""

    def made(changed: str) -> Recipe:
        def model() -> nn.Module:
            act: nn.Module = nn.ReLU() if changed == "activation" else nn.Tanh()
            layers = nn.Linear(6, 8), act, nn.Dropout(0.5 if changed == "dropout" else 0.1), nn.Linear(8, 3)
            return nn.Sequential(*layers).double()

        return Recipe(model=model, eval_data=None)

    usual, other = made(""), made(change)
    given = topology_of(job={"steps": 1}, compute={"group_size": 2, "batch_size": 8, "grid": "2x1"}, parallel={"verify": False})
    result = await run(given, lambda peer: (other if peer == "worker/1" else usual)(peer))
    with pytest.raises(TaskError, match=r"the model of worker/. differs"):
        raise next(iter(result.errors.values()))
