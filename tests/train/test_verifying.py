"""A group compares its divided model with the task's ordinary one before the first step."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.train.test_divided import data_of, network, plan_of, recipe_of
from tests.train.world import Recipe, run, topology_of
from zmqtrain.errors import DifferentModelError, PeerLostError, TaskError, UsageError
from zmqtrain.parallel.deferred import Tape, deferred, is_deferred
from zmqtrain.train.task import build_model
from zmqtrain.train.verifying import Ordinary

MUON = {"optimizer": lambda parameters: torch.optim.Muon([each for each in parameters if each.dim() == 2], 0.1)}


def topology(grid: str = "2x1", **parallel: Any) -> Any:
    rows, columns = map(int, grid.split("x"))
    return topology_of(
        job={"steps": 2},
        compute={"group_size": rows * columns, "batch_size": 8, "grid": grid},
        parallel={"verify": True, "layers": plan_of("model", grid), **parallel},
        exchange={"kind": "allreduce"},
    )


@pytest.mark.parametrize("grid", ["2x1", "2x2"])
async def test_every_worker_says_what_it_has_compared(grid: str) -> None:
    result = await run(topology(grid), recipe_of())
    assert not result.errors, result.errors
    for recorder in result.recorders.values():
        (event,) = recorder.of("verified")
        assert event["precision"] == "float64"
        assert event["samples"] == 2 * int(grid.split("x")[1])


async def test_without_it_nothing_is_compared() -> None:
    result = await run(topology(verify=False), recipe_of())
    assert not result.errors, result.errors
    for recorder in result.recorders.values():
        assert not recorder.of("verified")
        assert recorder.of("not verified")[0]["reason"] == "[parallel] verify = false"


@pytest.mark.parametrize("grid", ["2x1", "2x2"])
async def test_samples_may_require_a_gradient(grid: str) -> None:
    """Their batch has a graph, through which both models go backward."""
    inputs, targets = data_of(72).tensors
    plain, recipe = (
        Recipe(model=network, train_data=TensorDataset(each, targets), eval_data=None)
        for each in (inputs, inputs.clone().requires_grad_())
    )
    for each in (recipe, plain):
        result = await run(topology(grid), each)
        assert not result.errors, result.errors
        assert result.recorders["worker/0"].of("verified")
    assert torch.equal(recipe.parameters("worker/0"), plain.parameters("worker/0"))


async def test_lists_of_samples_of_different_lengths_are_refused_by_name() -> None:
    """Columns' lists have other shapes; the comparison gathers none of them, and the forward says what it was given."""

    class OfList(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3, dtype=torch.float64)

        def forward(self, samples: list[Tensor]) -> Tensor:
            return torch.stack([self.layer(each).mean(0) for each in samples])

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
        return [x.expand(3 + int(x[0] > 0), 6) for x, _ in samples], torch.stack([y for _, y in samples])

    recipe = Recipe(model=OfList, collate=collate)
    sections = {"compute": {"group_size": 4, "batch_size": 8, "grid": "2x2"}, "exchange": {"kind": "allreduce"}}
    result = await run(topology_of(job={"steps": 2}, parallel={"verify": True}, **sections), recipe)
    said = [str(error) for error in result.errors.values() if isinstance(error, UsageError)]
    assert said, result.errors
    assert all("was given a tensor of shape" in each and "pad them" in each for each in said)


async def test_an_optimizer_of_whole_parameters_ends_the_run_before_it_trains() -> None:
    result = await run(topology(), recipe_of(**MUON))
    errors = [error for error in result.errors.values() if isinstance(error, DifferentModelError)]
    assert errors, result.errors
    assert "the optimizer Muon updates parts of a parameter other than the whole" in str(errors[0])


class Locked(nn.Module):
    """A layer that cannot be copied, with a buffer of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("used", torch.tensor([True, True, False, True, True, True]))

    def forward(self, inputs: Tensor) -> Tensor:
        with self.lock:
            return self.linear(inputs * self.used)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda output, target: None, "a NoneType"),
        (lambda output, target: 1.0, "a float"),
        (lambda output, target: {"loss": output.sum()}, "a dict"),
        (lambda output, target: output.sum().detach(), r"a tensor of shape \[\] that does not require a gradient"),
        (lambda output, target: nn.functional.cross_entropy(output, target, reduction="none"), r"a tensor of shape \[\d\]"),
    ],
)
async def test_a_loss_that_is_none_is_refused_as_without_a_grid(loss: Any, what: str) -> None:
    result = await run(topology(), recipe_of(loss=loss))
    for error in result.errors.values():
        assert isinstance(error, TaskError | PeerLostError), error
    assert any(re.search(rf"Task.loss\(output, target\) returned {what}; it must", str(error)) for error in result.errors.values())


async def test_a_model_with_a_lock_is_built_once_more() -> None:
    topology = topology_of(job={"steps": 2}, compute={"group_size": 2, "batch_size": 8, "grid": "2x1"}, parallel={"verify": True})
    result = await run(topology, Recipe(model=lambda: Locked().double()))
    assert not result.errors, result.errors
    assert [len(recorder.of("verified")) for recorder in result.recorders.values()] == [1, 1]


async def test_large_layers_are_divided_too() -> None:
    """Where a replica has gradients of weights written directly into buckets."""
    topology = topology_of(job={"steps": 2}, compute={"group_size": 2, "batch_size": 8, "grid": "2x1"}, parallel={"verify": True})
    result = await run(
        topology, Recipe(model=lambda: nn.Sequential(nn.Linear(6, 1024), nn.Linear(1024, 512), nn.Linear(512, 3)).double())
    )
    assert not result.errors, result.errors


class Watched(nn.Module):
    """A model whose forward uses what a hook, which knows the model, has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(6, 4), nn.Linear(4, 3), dict[str, Tensor]()
        self.first.register_forward_hook(lambda module, inputs, output: self.seen.__setitem__("first", output))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs))) + self.seen["first"].mean(1, keepdim=True)  # type: ignore[no-any-return]


class Patched(nn.Module):
    """A model that has another forward for one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)
        before = self.first.forward
        self.first.forward = lambda x: before(x) * 2  # type: ignore[method-assign, assignment, misc]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Watched, Patched])
async def test_a_model_whose_functions_refer_to_it_is_built_once_more(kind: type[nn.Module]) -> None:
    topology = topology_of(job={"steps": 2}, compute={"group_size": 2, "batch_size": 8, "grid": "2x1"}, parallel={"verify": True})
    result = await run(topology, Recipe(model=lambda: kind().double()))
    assert not result.errors, result.errors
    assert [len(recorder.of("verified")) for recorder in result.recorders.values()] == [1, 1]


def test_numbers_that_are_drawn_once_are_those_of_a_model_that_is_made_anew() -> None:
    recipe, cpu = recipe_of()("worker/0"), torch.device("cpu")
    with deferred(Tape(smallest_bytes=1)) as tape:
        model = build_model(recipe)
    ordinary = Ordinary(recipe, 1, model, tape)
    expected = ordinary(cpu).state_dict()
    given: list[tuple[nn.Module, Any]] = []
    for and_whole in (False, True):
        ordinary.divided(cpu, lambda *each: given.append(each), and_whole=and_whole)  # type: ignore[arg-type,return-value]
    whole, another = ordinary(cpu), ordinary(cpu)
    (parts, with_tape), (copied, without) = given
    assert with_tape is tape
    assert without is None  # it has its numbers
    assert any(is_deferred(each) for each in parts.parameters())
    for found in (copied, whole, another):
        assert all(torch.equal(each, expected[name]) for name, each in found.state_dict().items())
    tensors = [each.data_ptr() for found in (copied, whole, another) for each in found.parameters()]
    assert len(set(tensors)) == len(tensors)
