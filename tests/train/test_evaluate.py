"""Evaluation: the same figures however many workers share it, and no trace of it in training."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from tests.train.world import Recipe, data_of, network_of, run, topology_of
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.train.metrics import Metrics, accuracy, require_metric
from zmqtrain.train.task import Task


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_figures_are_those_of_rank_0_s_model_on_all_samples(size: int) -> None:
    recipe = Recipe(model=with_norm, metrics={"confidence": lambda output, target: output.softmax(1).max(1).values.mean()})
    result = await run(topology_of(job={"steps": 4}, compute={"group_size": size, "batch_size": 12}), recipe)
    assert not result.errors
    event = result.recorders["worker/0"].of("eval")[0]
    model = recipe.models["worker/0"].eval()
    inputs, targets = data_of(31).tensors
    with torch.no_grad():
        output = model(inputs)
    assert event["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(output, targets)), rel=1e-12)
    assert event["eval_confidence"] == pytest.approx(float(output.softmax(1).max(1).values.mean()), rel=1e-12)
    assert "eval_accuracy" not in event


async def test_evaluating_often_changes_nothing() -> None:
    parameters = []
    for every in (0, 1):
        recipe = Recipe(model=lambda: with_norm()[:2].append(nn.Linear(8, 3).double()))
        result = await run(topology_of(job={"steps": 5, "eval_every": every}, compute={"group_size": 2, "batch_size": 12}), recipe)
        assert not result.errors
        assert len(result.recorders["worker/0"].of("eval")) == (5 if every else 1)
        parameters.append((recipe.parameters("worker/1"), recipe.models["worker/1"][1].running_mean.clone()))  # type: ignore[index]
    assert torch.equal(parameters[0][0], parameters[1][0])
    assert torch.equal(parameters[0][1], parameters[1][1])


class Noisy(Dataset[Any]):
    """Draws from all three global generators."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + torch.randn(6) + np.random.rand() + random.random(), y


class Drawing(nn.Module):
    """A model that draws, too, while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found * torch.rand(1) * (1 + random.random() + np.random.rand()) if self.training else found


async def test_what_an_evaluation_draws_changes_nothing() -> None:
    """So that a run that is resumed after one goes on as if it had not been."""
    runs = []
    for eval_every in (1, None):
        recipe = Recipe(model=Drawing, eval_data=Noisy(data_of(40)))
        job = {"steps": 5, **({} if eval_every is None else {"eval_every": eval_every})}
        result = await run(topology_of(job=job, compute={"batch_size": 12}), recipe)
        assert not result.errors, result.errors
        runs.append((recipe.parameters("worker/0"), [event["step"] for event in result.recorders["worker/0"].of("eval")]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert [len(steps) for _, steps in runs] == [5, 1]


async def test_fewer_samples_than_workers_and_targets_that_are_no_classes() -> None:
    data = TensorDataset(torch.randn(40, 6).double(), torch.randn(40, 3).double())
    fields: dict[str, Any] = {
        "train_data": data,
        "eval_data": TensorDataset(*(tensor[:2] for tensor in data.tensors)),
        "loss": nn.functional.mse_loss,
    }
    result = await run(topology_of(job={"steps": 2}, compute={"group_size": 3, "batch_size": 12}), Recipe(**fields))
    assert not result.errors
    assert [key for key in result.recorders["worker/0"].of("eval")[0] if key.startswith("eval_")] == ["eval_loss"]


async def test_no_eval_data_means_no_evaluation() -> None:
    result = await run(topology_of(job={"steps": 2}, compute={"batch_size": 12}), Recipe(eval_data=None))
    assert not result.errors
    assert not result.recorders["worker/0"].of("eval")
    assert Task.__dataclass_fields__["eval_data"].default is None


METRICS = {
    "correct": lambda output, target: (output.argmax(1) == target).sum(),
    "rmse": lambda output, target: (output.gather(1, target[:, None]) - 1).square().mean().sqrt().item(),
    "error": lambda output, target: (output.argmax(1) != target).float().mean(),
    "pair": lambda output, target: (output.max(1).values.sum(), len(target)),
}


@pytest.mark.parametrize("size", [1, 2])
async def test_metrics_that_are_no_means_are_left_out_where_samples_are_divided(size: int) -> None:
    result = await run(
        topology_of(job={"steps": 2, "eval_every": 1}, compute={"group_size": size, "batch_size": 12}), Recipe(metrics=METRICS)
    )
    assert not result.errors
    first, last = result.recorders["worker/0"].of("eval")
    assert {"eval_loss", "eval_error", "eval_pair"} == {name for name in last if name.startswith("eval_")}
    texts = [event["text"] for recorder in result.recorders.values() for event in recorder.of("warning")]
    assert [text.split()[0] for text in texts] == ["eval_correct", "eval_rmse"]
    assert first.keys() == last.keys()


def test_a_metric_of_which_the_first_batches_show_nothing_is_looked_at_until_one_does() -> None:
    """The recall of a model that is right in all samples is 1, as a mean would be."""
    task = Recipe(metrics={"recall": lambda output, target: (output.argmax(1) == target)[target == 1].double().mean()})("worker/0")
    metrics, target = Metrics(task), torch.tensor([1, 0, 0, 1, 1, 0, 0, 1])
    right, wrong = torch.eye(2)[target], torch.eye(2)[torch.tensor([0, 0, 0, 1, 1, 0, 0, 1])]
    for _ in range(5):
        metrics.add(metrics.zeros(), right, target, 8)
    sums = metrics.zeros()
    metrics.add(sums, wrong, torch.tensor([1, 0, 0, 0, 1, 0, 0, 1]), 8)
    assert metrics.left_out(sums) == ["eval_recall"]


async def test_all_samples_in_one_batch_may_have_any_metric() -> None:
    recipe = Recipe(metrics=METRICS)
    result = await run(topology_of(job={"steps": 1}, compute={"batch_size": 31}), recipe)
    inputs, target = data_of(31).tensors
    with torch.no_grad():
        output = recipe.models["worker/0"](inputs)
    event = result.recorders["worker/0"].of("eval")[0]
    assert event["eval_rmse"] == pytest.approx(METRICS["rmse"](output, target), rel=1e-12)
    assert event["eval_correct"] == METRICS["correct"](output, target)


def without_some(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample[0][0] > -0.5])


async def test_samples_that_the_collate_function_leaves_out_do_not_count() -> None:
    recipe = Recipe(collate=without_some, train_data=list(data_of()), eval_data=list(data_of(31)))
    result = await run(topology_of(job={"steps": 1}, compute={"batch_size": 12}), recipe)
    inputs, target = without_some(list(data_of(31)))
    with torch.no_grad():
        output = recipe.models["worker/0"](inputs)
    event = result.recorders["worker/0"].of("eval")[0]
    assert event["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(output, target)), rel=1e-12)
    assert event["eval_accuracy"] == pytest.approx(float((output.argmax(1) == target).double().mean()), rel=1e-12)


def raises(output: Any, target: Any) -> float:
    raise ValueError("no such class")


@pytest.mark.parametrize("exchange", [{"kind": "allreduce"}, {"staleness": "async"}, {"kind": "gossip"}], ids=str)
async def test_a_model_is_kept_though_the_last_evaluation_fails_on_one_worker(exchange: dict[str, Any], tmp_path: Path) -> None:
    fine = Recipe(metrics={"own": lambda output, target: 0.5})
    bad = Recipe(metrics={"own": raises})
    topology = topology_of(job={"steps": 4}, compute={"groups": 2, "batch_size": 12}, exchange=exchange)
    result = await run(topology, lambda peer: (bad if peer == "worker/1" else fine)(peer), folder=tmp_path)
    assert list(result.errors) == ["worker/1"]
    assert "the metric 'own'(output, target) raised ValueError: no such class" in str(result.errors["worker/1"])
    assert not result.recorders["worker/0"].of("eval")  # a part of the samples is not the evaluation
    model = network_of(torch.float64)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert json.loads((tmp_path / "model.json").read_text())["step"] == 4


@pytest.mark.parametrize("groups", [1, 2])
async def test_a_divided_model_is_kept_though_a_metric_fails_on_the_workers_that_compute_it(groups: int, tmp_path: Path) -> None:
    shape = {"groups": groups, "group_size": 2, "grid": "2x1", "batch_size": 12}
    topology = topology_of(job={"steps": 2}, compute=shape, exchange={"kind": "allreduce"})
    async with asyncio.timeout(30):  # the other row used to wait for its sums
        result = await run(topology, Recipe(metrics={"own": raises}), folder=tmp_path)
    assert all("the metric 'own'(output, target) raised ValueError" in str(error) for error in result.errors.values())
    assert sorted(result.errors) == [f"worker/{2 * group}" for group in range(groups)]
    assert json.loads((tmp_path / "model.json").read_text())["step"] == 2


async def test_a_metric_that_is_nan_is_a_string_in_the_models_description(tmp_path: Path) -> None:
    metrics = {"own": lambda output, target: output.sum() * math.nan}
    result = await run(topology_of(job={"steps": 1}, compute={"batch_size": 12}), Recipe(metrics=metrics), folder=tmp_path)
    assert not result.errors
    assert json.loads((tmp_path / "model.json").read_text())["metrics"]["eval_own"] == "NaN"


class Stream(IterableDataset[tuple[torch.Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(data_of(31))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (data_of(3), "each group gets 1 sample of the task's eval_data, too few for the 2 columns of its grid"),
        (Stream(), "Task.eval_data is a stream, and the workers of a grid cannot tell beforehand who has which"),
    ],
    ids=["few", "stream"],
)
async def test_what_a_grid_cannot_divide_in_an_evaluation_is_refused_before_the_first_step(data: Any, said: str) -> None:
    shape = {"groups": 2, "group_size": 4, "grid": "2x2", "batch_size": 12}
    result = await run(topology_of(job={"steps": 1}, compute=shape), Recipe(eval_data=data))
    refused = [error for error in result.errors.values() if isinstance(error, UsageError)]
    assert said in str(refused[0])
    assert not any(recorder.of("step") for recorder in result.recorders.values())


@pytest.mark.parametrize("value", ["0.5", None, torch.zeros(2), torch.zeros(1, dtype=torch.complex64), [1.0]], ids=str)
def test_a_metric_that_is_no_number(value: Any) -> None:
    recipe = Recipe(metrics={"own": lambda output, target: value})
    metrics = Metrics(recipe("worker/0"))
    with pytest.raises(TaskError, match=r"metric 'own'.* returned .*: let it return one number, or the pair \(sum, weight\)"):
        metrics.add(metrics.zeros(), torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), 4)


@pytest.mark.parametrize(
    ("metric", "fields", "said"),
    [
        ("acuracy", {}, "there is no metric 'acuracy'; did you mean 'eval_accuracy'"),
        ("f1", {"metrics": {"top5": accuracy}}, "there is no metric 'f1'; the task has loss, top5"),
        ("accuracy", {"metrics": {}}, "there is no metric 'accuracy'; the task has loss"),
        ("loss", {"eval_data": None}, "give the task eval_data"),
        ("top5", {"metrics": {"top5": accuracy}}, None),
        ("eval_accuracy", {}, None),
    ],
)
def test_a_metric_to_train_until_is_looked_for_before_the_first_step(metric: str, fields: dict[str, Any], said: str | None) -> None:
    job = topology_of(job={"until": {"metric": metric, "reaches": 0.5}, "eval_every": 5}).job
    with nullcontext() if said is None else pytest.raises(UsageError, match=said):
        require_metric(Recipe(**fields)("worker/0"), job)


def test_evaluations_without_data_are_refused() -> None:
    job = topology_of(job={"steps": 9, "eval_every": 5}).job
    with pytest.raises(UsageError, match=r"\[job\] eval_every needs an evaluation: give the task eval_data"):
        require_metric(Recipe(eval_data=None)("worker/0"), job)


async def test_a_model_that_needs_gradients_in_evaluations_is_told_how() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            inputs = inputs.detach().requires_grad_()
            output: torch.Tensor = self.layer(inputs)
            torch.autograd.grad(output.sum(), inputs, create_graph=True)
            return output

    result = await run(topology_of(job={"steps": 1}, compute={"batch_size": 12}), Recipe(model=Slope))
    with pytest.raises(TaskError, match=r"in evaluation raised RuntimeError.*within torch\.enable_grad\(\)"):
        raise result.errors["worker/0"]


def f1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    found, there = output.argmax(1) == 1, target == 1
    return 2 * (found & there).sum().double() / (found.sum() + there.sum())


def determination(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """R2: minus infinity where all targets are the same."""
    return 1 - (output[:, 0] - target).square().sum() / (target - target.double().mean()).square().sum()


@pytest.mark.parametrize(("samples", "there"), [(6, True), (7, True), (20, False)])
async def test_any_metric_is_right_in_a_single_batch(samples: int, there: bool) -> None:
    recipe = Recipe(metrics={"f1": f1, "r2": determination}, eval_data=data_of(samples))
    result = await run(topology_of(job={"steps": 2}, compute={"group_size": 2, "batch_size": 12}), recipe)
    assert not result.errors
    event = result.recorders["worker/0"].of("eval")[0]
    assert ("eval_f1" in event, "eval_r2" in event) == (there, there)
    if there:
        inputs, targets = data_of(samples).tensors
        with torch.no_grad():
            output = recipe.models["worker/0"](inputs)
        assert event["eval_f1"] == pytest.approx(float(f1(output, targets)), rel=1e-12)
        assert event["eval_r2"] == pytest.approx(float(determination(output, targets)), rel=1e-9)


@pytest.mark.parametrize("measure", [determination, lambda output, target: (output.argmax(1) >= 0).sum()], ids=["r2", "count"])
@pytest.mark.parametrize("each", [1, 2])
def test_what_is_infinite_or_a_count_of_few_samples_is_no_mean(measure: Any, each: int) -> None:
    metrics = Metrics(Recipe(metrics={"what": measure})("alone"))
    sums = metrics.zeros()
    target = torch.tensor([0, 0, 1, 1])  # each half's are the same
    output = torch.eye(3)[target] + 0.25
    for first in range(0, 4, each if measure is not determination else 4):
        some = slice(first, first + (each if measure is not determination else 4))
        metrics.add(sums, output[some], target[some], len(target[some]))
    assert "eval_what" not in metrics.means(sums)
    assert metrics.left_out(sums) == ["eval_what"]


def test_weights_that_add_up_to_nothing_make_not_a_number() -> None:
    precision = {"precision": lambda output, target: ((output.argmax(1) == target).sum(), (output.argmax(1) == 7).sum())}
    metrics = Metrics(Recipe(metrics=precision)("alone"))
    sums = metrics.zeros()
    metrics.add(sums, torch.eye(3), torch.arange(3), 3)
    assert math.isnan(metrics.means(sums)["eval_precision"])


def test_batches_of_one_sample_show_together_that_a_metric_is_no_mean() -> None:
    perplexity = {"perplexity": lambda output, target: nn.functional.cross_entropy(output, target).exp(), "hits": accuracy}
    metrics = Metrics(Recipe(metrics=perplexity)("alone"))
    sums = metrics.zeros()
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for output in outputs.split(1):
        metrics.add(sums, output, torch.zeros(1, dtype=torch.long), 1)
    assert metrics.left_out(sums) == ["eval_perplexity"]
    assert metrics.means(sums)["eval_hits"] == float(accuracy(outputs, torch.zeros(6, dtype=torch.long)))


@pytest.mark.parametrize(
    "outputs", [[torch.tensor(1.0)] * 2, [{"scores": torch.ones(1, 3)}] * 2, [torch.ones(1, 3), torch.ones(1, 4)]]
)
def test_outputs_that_cannot_be_joined_are_left_alone(outputs: list[Any]) -> None:
    metrics = Metrics(Recipe(loss=lambda output, target: torch.tensor(0.5), metrics={})("alone"))
    sums = metrics.zeros()
    for output in outputs:
        metrics.add(sums, output, torch.zeros(1, dtype=torch.long), 1)
    assert metrics.means(sums) == {"eval_loss": 0.5}
