"""Losses that the model itself computes, of which a task's groups or micro-batches have parts: means over samples, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.train.world import Recipe, network_of, run, topology_of
from zmqtrain.data.partition import Partition
from zmqtrain.errors import TaskError
from zmqtrain.train.random_state import seed_everything

pytestmark = pytest.mark.asyncio
CLASSES = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)


def each(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none")


def balance(output: Tensor, target: Tensor) -> Tensor:
    load = (output.argmax(1)[:, None] == torch.arange(3)).to(output).mean(0)
    return cross_entropy(output, target) + (output.softmax(1).mean(0) * load).sum()


MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": cross_entropy,
    "mean of weighted ones": lambda o, t: (each(o, t) * CLASSES[t]).mean(),
    "divided by the samples": lambda o, t: cross_entropy(o, t, reduction="sum") / len(t),
}
OTHERS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "class weights": ("class weights", lambda o, t: cross_entropy(o, t, weight=CLASSES)),
    "sum": ("sum over the samples", lambda o, t: cross_entropy(o, t, reduction="sum")),
    "a mask": ("", lambda o, t: (each(o, t) * (t > 0)).sum() / (t > 0).sum()),
    "balance of experts": ("what it multiplies a mean by", balance),
    "the hardest": ("it chooses among the samples", lambda o, t: each(o, t).topk(3).values.mean()),
}


class Scored(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = network_of(), loss

    def forward(self, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
        output = self.layers(inputs)
        return {"loss": self.loss(output, target), "scores": output}


def recipe_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Recipe:
    return Recipe(
        model=lambda: Scored(loss),
        forward=lambda model, batch: model(*batch),
        loss=lambda output, _: output["loss"],
        eval_data=None,
    )


SHAPES = {
    "groups": {"groups": 2, "group_size": 2, "grid": "2x1", "batch_size": 8},
    "micro-batches": {"groups": 1, "group_size": 2, "grid": "2x1", "batch_size": 16, "accumulate": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OTHERS)
async def test_what_is_no_mean_is_refused_on_grids(name: str, shape: str) -> None:
    why, loss = OTHERS[name]
    result = await run(topology_of(job={"steps": 4}, compute=SHAPES[shape], exchange={"kind": "allreduce"}), recipe_of(loss))
    error = next(error for error in result.errors.values() if isinstance(error, TaskError))
    assert f"not a mean over samples: {why}" in str(error) or why in str(error)
    assert "return the pair (loss * n, n) from Task.loss" in str(error)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MEANS)
async def test_means_are_those_of_one_process_on_grids(name: str, shape: str) -> None:
    recipe = recipe_of(MEANS[name])
    result = await run(topology_of(job={"steps": 3}, compute=SHAPES[shape], exchange={"kind": "allreduce"}), recipe)
    assert not result.errors, result.errors
    seed_everything(1)
    task = recipe("alone")
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    inputs, target = task.train_data.tensors
    partition = Partition(len(inputs), 1, 1, 16, 1)
    for step in range(3):
        rows = torch.from_numpy(partition.indices(step, 0, 0).copy())
        optimizer.zero_grad()
        model(inputs[rows], target[rows])["loss"].backward()
        optimizer.step()
    for name, parameter in recipe.models["worker/0"].named_parameters():
        whole = dict(model.named_parameters())[name]
        if parameter.shape == whole.shape:  # it is not divided
            torch.testing.assert_close(parameter.detach(), whole.detach(), rtol=0, atol=1e-12)


async def test_a_choice_of_more_samples_than_a_half_has_is_refused() -> None:
    recipe = recipe_of(OTHERS["the hardest"][1])
    result = await run(topology_of(job={"steps": 2}, compute={"group_size": 2, "batch_size": 8}), recipe)
    assert any("it chooses among the samples" in str(error) for error in result.errors.values())
