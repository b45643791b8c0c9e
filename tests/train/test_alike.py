"""Workers that would not train the same are refused, whatever it is that differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from tests.train.world import Recipe, data_of, run, topology_of
from zmqtrain.data.content import content_of
from zmqtrain.errors import TaskError
from zmqtrain.train.alike import facts_of_training, files
from zmqtrain.train.task import Task


def facts(change: str = "") -> dict[str, Any]:
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2 if change == "dropout" else 0.1), nn.Linear(3, 1))
    if change == "dtype":
        model.double()
    if change == "frozen":
        model[0].bias.requires_grad_(False)
    settings = {"lr": 0.2 if change == "lr" else 0.1, "momentum": 0.9}
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.3 if change == "group" else 0.1}]
    kind: Any = torch.optim.RMSprop if change == "optimizer" else torch.optim.SGD
    loss: Any = partial(functional.cross_entropy, label_smoothing=0.1 if change == "smoothing" else 0.0)
    if change == "loss":
        loss = nn.MSELoss()
    samples = {"training data": None if change == "stream" else 64, "evaluation data": 7 if change == "evaluation" else 8}
    inputs = torch.arange(64.0).flip(0) if change == "content" else torch.arange(64.0)
    contents = {"training data": content_of(TensorDataset(inputs))}
    return dict(facts_of_training(model, kind(groups, **settings), loss, samples, contents))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("dropout", "the model"),
        ("dtype", "the list of the model's parameters"),
        ("frozen", "the list of the model's parameters"),
        ("lr", "the optimizer"),
        ("group", "the optimizer"),
        ("optimizer", "the optimizer"),
        ("smoothing", "the loss"),
        ("loss", "the loss"),
        ("stream", "the number of samples of the training data"),
        ("content", "the content of the training data"),
        ("evaluation", "the number of samples of the evaluation data"),
    ],
)
def test_each_change_is_seen_and_nothing_else(change: str, what: str) -> None:
    usual, changed = facts(), facts(change)
    assert [name for name in usual if usual[name] != changed[name]] == [what]


def test_what_differs_between_processes_that_have_the_same_does_not_count() -> None:
    class Odd(nn.Module):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where = where

        def extra_repr(self) -> str:
            return self.where

    one, other = (
        facts_of_training(Odd(where), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5)))
        for where in ("<function f at 0x7f01>, cuda:0", "<function f at 0x7ea2>, cuda:1")
    )
    assert one == other
    assert "group 0: lr = 0.5" in one["the optimizer"]


def test_a_model_without_shapes_yet_is_described() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert any(
        "of no shape yet" in line for line in facts_of_training(nn.LazyLinear(3), optimizer)["the list of the model's parameters"]
    )


def test_files_are_the_users_own() -> None:
    found = files()
    assert any("test_alike.py" in name for name in found)
    assert [name for name in found if "(module torch)" in name or "(module torch." in name or "(module zmqtrain." in name] == []


def subset(samples: TensorDataset, drawn: np.random.Generator) -> Any:
    return Subset(samples, drawn.permutation(len(samples))[:64].tolist())


def loader_of_subset(samples: TensorDataset, drawn: np.random.Generator) -> Any:
    return DataLoader(samples, batch_size=8, sampler=SubsetRandomSampler(drawn.permutation(len(samples))[:64].tolist()))


def weighted(samples: TensorDataset, drawn: np.random.Generator) -> Any:
    weights = drawn.random(len(samples)).tolist()
    return DataLoader(samples, batch_size=8, sampler=WeightedRandomSampler(weights, len(samples)))


@pytest.mark.parametrize("made", [subset, loader_of_subset, weighted])
@pytest.mark.parametrize("data", ["train_data", "eval_data"])
async def test_workers_whose_tasks_have_drawn_other_samples_are_refused(
    made: Callable[[TensorDataset, np.random.Generator], Any], data: str
) -> None:
    recipe = Recipe()

    def task(peer: str, seed: int) -> Task:
        return replace(recipe(peer), **{data: made(data_of(), np.random.default_rng(seed))})

    topology = topology_of(job={"steps": 1}, compute={"group_size": 2, "batch_size": 8})
    result = await run(topology, lambda peer: task(peer, int(peer[-1])))
    what = {"train_data": "training", "eval_data": "evaluation"}[data]
    with pytest.raises(TaskError, match=rf"the content of the {what} data of worker/\d differs.*default_rng"):
        raise next(iter(result.errors.values()))
    assert not (await run(topology, lambda peer: task(peer, 3))).errors


class Listed(Dataset[Any]):
    """Reads its samples in an order of its own."""

    def __init__(self, base: TensorDataset, order: list[int], folder: str) -> None:
        self.base, self.order = base, order
        self.files = [f"{folder}/{number}.png" for number in order]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.base[self.order[index]]


@pytest.mark.parametrize("same", [True, False])
async def test_a_dataset_with_an_order_of_its_own_on_each_worker_is_warned_of(same: bool) -> None:
    recipe = Recipe()

    def task(peer: str) -> Task:
        order = np.random.default_rng(3 if same else int(peer[-1])).permutation(64).tolist()
        return replace(recipe(peer), train_data=Listed(data_of(), order, f"/home/{peer}"))

    result = await run(topology_of(job={"steps": 1}, compute={"group_size": 2, "batch_size": 8}), task)
    assert not result.errors
    warnings = [each["text"] for recorder in result.recorders.values() for each in recorder.of("warning")]
    if same:
        assert warnings == []
    else:
        (text,) = warnings
        assert text.startswith("`files` of the training data, `order` of the training data of worker/")
        assert "data[i] must be the same sample on all" in text
