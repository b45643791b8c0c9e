"""Weighted losses: any division of the work gives the gradient that one process has of the whole batch."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, default_collate

from tests.data.test_nested import output_of
from tests.pairwise import pairwise
from tests.train.test_worker import alone
from tests.train.world import Recipe, network_of, run, topology_of
from zmqtrain.errors import TaskError
from zmqtrain.train.weighting import ClassWeighted, require_mean, rows_counted, taken_apart

CLASSES = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)


def data(ignored: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(3, (96,), generator=generator)
    if ignored:
        target[torch.rand(96, generator=generator) < 0.4] = -100
    return TensorDataset(torch.randn(96, 6, generator=generator, dtype=torch.float64), target)


def pair(output: Tensor, target: Tensor) -> Any:
    return cross_entropy(output, target, weight=CLASSES, reduction="sum"), CLASSES[target].sum()


async def trained(loss: Any, *, ignored: bool = False, **compute: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    recipe = Recipe(loss=loss, train_data=data(ignored), eval_data=data(ignored))
    sections: dict[str, Any] = {"exchange": {"kind": "allreduce"}, "job": {"steps": 5}}
    if "exchange" in compute:
        sections["exchange"] = compute.pop("exchange")
    result = await run(topology_of(compute=compute, **sections), recipe)
    if result.errors:
        raise next(iter(result.errors.values()))
    return recipe.parameters("worker/0"), result.recorders["worker/0"].of("eval")


WHOLE: dict[tuple[Any, bool, int], tuple[Tensor, list[dict[str, Any]]]] = {}


async def in_one_process(loss: Any, *, ignored: bool = False, batch: int = 16) -> tuple[Tensor, list[dict[str, Any]]]:
    """The same for all divisions of the work."""
    key = loss, ignored, batch
    if key not in WHOLE:
        WHOLE[key] = await trained(loss, ignored=ignored, groups=1, group_size=1, batch_size=batch)
    return WHOLE[key]


SHAPES: list[dict[str, Any]] = [
    {"groups": 2, "group_size": 2, "batch_size": 8},
    {"groups": 2, "group_size": 2, "batch_size": 8, "exchange": {"kind": "model_server", "staleness": "sync"}},
    {"groups": 2, "group_size": 1, "batch_size": 8, "exchange": {"kind": "model_server", "staleness": "sync"}},
    {"groups": 1, "group_size": 1, "batch_size": 16, "exchange": {"kind": "model_server", "staleness": "sync"}},
    {"groups": 1, "group_size": 3, "batch_size": 16, "parts": [1, 2, 5]},
    {"groups": 2, "group_size": 1, "batch_size": 8, "accumulate": 3},
    {"groups": 1, "group_size": 2, "batch_size": 16, "exchange": {"kind": "model_server"}},
    {"groups": 1, "group_size": 1, "batch_size": 16, "accumulate": 4},
]


#: The rows of a grid have the same samples, and its columns others.
GRIDS: list[dict[str, Any]] = [
    {"groups": 1, "group_size": 2, "batch_size": 16, "grid": "2x1"},
    {"groups": 1, "group_size": 4, "batch_size": 16, "grid": "2x2"},
    {"groups": 2, "group_size": 2, "batch_size": 8, "grid": "2x1", "accumulate": 2},
    {"groups": 2, "group_size": 4, "batch_size": 8, "grid": "2x2", "exchange": {"kind": "model_server", "staleness": "sync"}},
]


WEIGHTS, IGNORED = nn.CrossEntropyLoss(weight=CLASSES), partial(cross_entropy, ignore_index=-100)


def _by_hand(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none").sum() / (target != -100).sum().clamp(min=1)


#: Losses of one's own that leave out targets, or have class weights.
NO_MEANS: dict[str, Any] = {
    "weights": lambda output, target: cross_entropy(output, target, weight=CLASSES),
    "ignored": lambda output, target: cross_entropy(output, target),
    "smooth": lambda output, target: cross_entropy(output, target, label_smoothing=0.1),
    "by hand": _by_hand,
    "chosen": lambda output, target: cross_entropy(output[target >= 0], target[target >= 0]),
}


@pytest.mark.parametrize("batch", [16, 48])
async def test_one_process_trains_as_plain_torch(batch: int) -> None:
    """What all divisions of the work are compared with."""
    whole, _ = await in_one_process(WEIGHTS, batch=batch)
    expected = alone(Recipe(loss=WEIGHTS, train_data=data()), 5, batch)
    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "grid"),
    [(WEIGHTS, GRIDS[1]), (WEIGHTS, GRIDS[2]), (pair, GRIDS[0]), (pair, GRIDS[3]), (IGNORED, GRIDS[1]), (IGNORED, GRIDS[2])],
    ids=["weights-2x2", "weights-2x1", "pair-2x1", "pair-2x2", "ignored-2x2", "ignored-2x1"],
)
async def test_weights_on_grids_are_those_of_the_whole_batch(loss: Any, grid: dict[str, Any]) -> None:
    """Each loss on both shapes of a grid; accumulated and not, and each exchange, with one loss at least."""
    ignored = isinstance(loss, partial)
    whole, evaluated = await in_one_process(loss, ignored=ignored)
    recipe = Recipe(loss=loss, train_data=data(ignored), eval_data=data(ignored))
    exchange = grid.get("exchange", {"kind": "allreduce"})
    compute = {key: value for key, value in grid.items() if key != "exchange"}
    with TemporaryDirectory() as folder:
        topology = topology_of(job={"steps": 5}, compute=compute, exchange=exchange, parallel={"verify": True})
        result = await run(topology, recipe, folder=Path(folder))
        assert not result.errors
        kept = load_file(Path(folder, "model.safetensors"))
    ours = torch.cat([kept[name].reshape(-1) for name in network_of().state_dict()])
    torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-12)
    assert result.recorders["worker/0"].of("eval")[-1]["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-10)
    assert ignored or result.recorders["worker/0"].of("verified")  # perhaps no target of the compared samples counts


async def test_targets_that_are_ignored_unawares_are_refused_on_grids_where_samples_are_divided() -> None:
    _, evaluated = await trained(cross_entropy, ignored=True, groups=1, group_size=1, batch_size=16)
    _, evaluated_by_rows = await trained(cross_entropy, ignored=True, **GRIDS[0])
    assert evaluated_by_rows[-1]["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-10)
    with pytest.raises(TaskError, match="targets are -100"):
        await trained(cross_entropy, ignored=True, **GRIDS[1])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.1), pair, nn.NLLLoss(weight=CLASSES)])
@pytest.mark.parametrize("shape", SHAPES)
async def test_class_weights_are_those_of_the_whole_batch(loss: Any, shape: dict[str, Any]) -> None:
    whole, evaluated = await in_one_process(loss)
    parts, evaluated_in_parts = await trained(loss, **shape)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)
    assert evaluated_in_parts[-1]["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
async def test_targets_that_are_ignored_do_not_count(shape: dict[str, Any]) -> None:
    whole, _ = await in_one_process(IGNORED, ignored=True)
    parts, _ = await trained(IGNORED, ignored=True, **shape)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("exchange", [{"kind": "allreduce"}, {"kind": "model_server", "staleness": "sync"}])
async def test_a_run_that_is_asked_to_be_elastic_is_refused(exchange: dict[str, Any]) -> None:
    """By default such a run goes on without being elastic, as those of `SHAPES` do."""
    recipe = Recipe(loss=nn.CrossEntropyLoss(weight=CLASSES))
    shape = {"groups": 2, "group_size": 1, "batch_size": 8}
    result = await run(topology_of(job={"steps": 2, "elastic": True}, compute=shape, exchange=exchange), recipe)
    assert any(r"so that none may be lost: remove [job] elastic" in str(error) for error in result.errors.values())


async def test_the_whole_batch_is_what_torch_makes_of_it() -> None:
    """One worker alone, with class weights, is plain training with torch's own mean."""
    loss = nn.CrossEntropyLoss(weight=CLASSES)
    plain, _ = await trained(lambda output, target: loss(output, target), groups=1, group_size=1, batch_size=16)
    ours, _ = await trained(loss, groups=1, group_size=1, batch_size=16)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


async def test_targets_that_are_ignored_unawares_are_an_error() -> None:
    with pytest.raises(TaskError, match="targets are -100"):
        await trained(cross_entropy, ignored=True, groups=2, group_size=1, batch_size=8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: cross_entropy(output, target, weight=CLASSES),
        lambda output, target: cross_entropy(output, target, reduction="sum"),
        lambda output, target: cross_entropy(output @ output.T, torch.arange(len(output))),
    ],
)
async def test_a_loss_that_is_no_mean_over_samples_is_refused_where_samples_are_divided(loss: Any) -> None:
    for shape in ({"groups": 2, "group_size": 1}, {"groups": 1, "group_size": 1, "accumulate": 2}):
        with pytest.raises(TaskError, match="is not a mean over samples"):
            await trained(loss, batch_size=8, **shape)
    await trained(loss, groups=1, group_size=1, batch_size=8)
    await trained(lambda output, target: (loss(output, target) * len(target), len(target)), groups=2, group_size=1, batch_size=8)


@pytest.mark.parametrize("shape", [GRIDS[2], GRIDS[1]], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["weights", "ignored", "by hand"])
async def test_a_loss_that_is_no_mean_over_samples_is_refused_on_grids_where_samples_are_divided(
    name: str, shape: dict[str, Any]
) -> None:
    with pytest.raises(TaskError, match="is not a mean over samples"):
        await trained(NO_MEANS[name], ignored=name != "weights", **shape)


@pytest.mark.parametrize("shape", [{"groups": 1, "group_size": 2, "batch_size": 16}, GRIDS[2]], ids=["workers", "grid"])
@pytest.mark.parametrize("name", ["ignored", "smooth", "by hand", "chosen"])
async def test_a_loss_that_is_no_mean_only_of_later_batches_is_refused_then(name: str, shape: dict[str, Any]) -> None:
    inputs, target = data().tensors
    target = target.clone()
    target[64:] = data(ignored=True).tensors[1][64:]
    recipe = Recipe(loss=NO_MEANS[name], train_data=TensorDataset(inputs, target), eval_data=None)
    topology = topology_of(job={"steps": 6}, compute=shape, data={"shuffle": "none"}, exchange={"kind": "allreduce"})
    result = await run(topology, recipe)
    assert any(re.search(r"is not a mean over samples|elements of \d+ samples", str(e)) for e in result.errors.values())
    steps = [len(recorder.of("step")) for peer, recorder in result.recorders.items() if peer.startswith("worker")]
    assert max(steps) == 4, "it trains on the samples whose targets all count"


class Named(nn.Module):
    """Returns more than the scores, as transformers' models do: a cache, the states of layers, a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network_of()

    def forward(self, inputs: Tensor) -> Any:
        scores = self.network(inputs)
        return output_of(scores=scores, cache=object(), states=(inputs, scores), usage=scores.detach().mean(0))


async def test_a_loss_of_a_part_of_the_output_is_tried_whatever_else_the_model_returns() -> None:
    async def left_out(loss: Any, *, ignored: bool) -> list[Any]:
        recipe = Recipe(model=Named, loss=loss, train_data=data(), eval_data=data(ignored), metrics={})
        shape = {"groups": 2, "group_size": 1, "batch_size": 8}
        result = await run(topology_of(compute=shape, job={"steps": 2}, exchange={"kind": "allreduce"}), recipe)
        if result.errors:
            raise next(iter(result.errors.values()))
        events = [event for recorder in result.recorders.values() for event in recorder.of("warning")]
        return [event["text"] for event in events if "is left out" in event["text"]]

    def plain(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output.scores, target)

    assert not await left_out(plain, ignored=False)
    assert await left_out(plain, ignored=True)
    with pytest.raises(TaskError, match="is not a mean over samples"):
        await left_out(lambda output, target: cross_entropy(output.scores, target, weight=CLASSES), ignored=False)


async def test_a_root_of_a_mean_is_no_mean() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - nn.functional.one_hot(target, 3)).square().mean().sqrt()

    with pytest.raises(TaskError, match="is not a mean over samples"):
        await trained(loss, groups=2, group_size=1, batch_size=8)


async def test_a_mean_over_some_samples_is_no_mean_if_a_half_has_none_of_them() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output[target == 1].square().mean()

    output = torch.ones(4, 3)
    for target in (torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 0, 1])):
        with pytest.raises(TaskError, match="is not a mean over samples"):
            require_mean(loss, output, target, 4, loss(output, target))
    infinite = torch.full((4, 3), torch.inf)
    assert require_mean(cross_entropy, infinite, torch.zeros(4, dtype=torch.long), 4, torch.tensor(torch.nan))


async def test_a_loss_computed_in_single_precision_of_any_output_is_a_mean() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        output, target = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(64) % 3
        for loss in (cross_entropy, lambda output, target: cross_entropy(output.float(), target)):
            assert require_mean(loss, output, target, 64, loss(output, target))


def without_some(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample[0][0] > -0.5])


async def test_targets_with_other_rows_than_samples_need_a_weight() -> None:
    async def run_with(loss: Any, **compute: Any) -> Tensor:
        recipe = Recipe(loss=loss, train_data=list(data()), eval_data=None, collate=without_some)
        result = await run(topology_of(job={"steps": 3}, exchange={"kind": "allreduce"}, compute=compute), recipe)
        if result.errors:
            raise next(iter(result.errors.values()))
        return recipe.parameters("worker/0")

    def weighted(output: Tensor, target: Tensor) -> Any:
        return cross_entropy(output, target, reduction="sum"), len(target)

    with pytest.raises(TaskError, match=r"the target of 8 samples has \d rows"):
        await run_with(cross_entropy, groups=2, group_size=1, batch_size=8)
    whole = await run_with(cross_entropy, groups=1, group_size=1, batch_size=16)
    parts = await run_with(weighted, groups=2, group_size=1, batch_size=8)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


def test_rows_of_targets() -> None:
    boxes = [{"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)} for _ in range(8)]
    images = [torch.zeros(3, 16, 16) for _ in range(8)]
    for target in (torch.zeros(8), torch.zeros(24), torch.zeros(5, 8), boxes, (images, boxes), {"x": torch.zeros(8, 2), "n": 1}, 7):
        assert rows_counted(target, 8) == 8
    for target in (torch.zeros(7), {"labels": torch.zeros(7, 2), "mask": torch.zeros(7)}):
        assert rows_counted(target, 8) == 7


class Tokens(nn.Module):
    """Computes its loss, a mean over tokens, as Hugging Face's models do."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 3).double(), nn.Dropout(drop)
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        scores = self.layer(self.drop(x))
        losses = cross_entropy(scores, labels, reduction="none")
        if mask is None:
            return {"loss": cross_entropy(scores, labels), "scores": scores}
        loss = (losses * mask).sum() / mask.sum() + 0.0 * self.norm(x).sum()
        return {"loss": loss, "scores": scores, "cache": object()}


async def test_a_model_s_own_loss_that_is_no_mean_over_samples_is_refused() -> None:
    async def run_with(loss: Any, train_data: Any, drop: float = 0.0, **compute: Any) -> Tensor:
        fields = {"forward": lambda model, batch: model(**batch), "train_data": train_data, "eval_data": train_data}
        recipe = Recipe(loss=loss, model=lambda: Tokens(drop), **fields)
        result = await run(topology_of(job={"steps": 3}, exchange={"kind": "allreduce"}, compute=compute), recipe)
        if result.errors:
            raise next(iter(result.errors.values()))
        return recipe.parameters("worker/0")

    ignoring = [{"x": x, "labels": label} for x, label in data(ignored=True)]
    masked = [{"x": x, "labels": label, "mask": x[0] > 0} for x, label in data()]
    plain = [{"x": x, "labels": label} for x, label in data()]

    def loss(output: Any, batch: Any) -> Tensor:
        own: Tensor = output["loss"]
        return own

    def counted(output: Any, batch: Any) -> Any:
        count = (batch["labels"] != -100).sum()
        return output["loss"] * count, count

    shape = {"groups": 2, "group_size": 1, "batch_size": 8}
    with pytest.raises(TaskError, match="some of 'labels' are -100"):
        await run_with(loss, ignoring, **shape)
    with pytest.raises(TaskError, match="the loss that the model computes is not a mean over samples"):
        await run_with(loss, masked, drop=0.5, **shape)
    await run_with(loss, plain, drop=0.5, **shape)
    parts, whole = await run_with(counted, ignoring, **shape), await run_with(loss, ignoring, groups=1, batch_size=16)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


async def test_a_loss_that_counts_its_calls_counts_no_trials() -> None:
    calls = 0

    def counting(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        return cross_entropy(output, target)

    def counting_all(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(output, target)

    await trained(counting, groups=1, group_size=1, batch_size=8, accumulate=2)
    assert calls == 10
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    require_mean(counting_all, output, target, 4, cross_entropy(output, target))
    assert calls == 10


STATE = {"calls": 0}
CALLS = 0


def counting_globally(output: Tensor, target: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    STATE["calls"] += 1
    counting_globally.calls += 1  # type: ignore[attr-defined]
    return counted_below(output, target)


def counted_below(output: Tensor, target: Tensor) -> Tensor:
    STATE["calls"] += 1
    return cross_entropy(output, target)


class Counting:
    """Counts by an attribute, in its call and in a method."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(target))
        return cross_entropy(output, target)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


def test_trials_leave_no_trace() -> None:
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    value = cross_entropy(output, target)
    counting_globally.calls = 0  # type: ignore[attr-defined]
    counter = Counting()
    for loss in (counting_globally, partial(counting_globally), counter, counter.loss, partial(counter.loss)):
        require_mean(loss, output, target, 4, value)
    assert (CALLS, STATE["calls"], counting_globally.calls, counter.calls, counter.seen) == (0, 0, 0, 0, [])  # type: ignore[attr-defined]

    def drawing(output: Tensor, target: Tensor) -> Tensor:
        torch.rand(1)
        return cross_entropy(output, target)

    drawn = []
    for tried in (False, True):
        torch.manual_seed(1)
        if tried:
            require_mean(drawing, output, target, 4, value)
        drawn.append(float(torch.rand(1)))
    assert drawn[0] == drawn[1]


def test_a_loss_in_another_shape_is_tried_all_the_same() -> None:
    output, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    summed = partial(cross_entropy, reduction="sum")
    for loss in (summed, lambda output, target: summed(output, target)):
        with pytest.raises(TaskError, match="is not a mean over samples"):
            require_mean(loss, output, target, 4, summed(output, target))


async def test_random_losses_and_those_of_whole_outputs_only_are_left_alone() -> None:
    def random(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(nn.functional.dropout(output), target)

    def whole(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.view(4, 3), target)

    for loss in (random, whole):
        await trained(loss, groups=2, group_size=1, batch_size=4)


@pairwise(
    {
        "loss": {"module": WEIGHTS, "pair": pair},
        "shape": {
            "groups": {"groups": 2, "group_size": 1, "batch_size": 8},
            "accumulating": {"groups": 1, "group_size": 3, "batch_size": 16, "accumulate": 2},
            "grid": {"groups": 1, "group_size": 4, "batch_size": 16, "grid": "2x2"},
            "alone": {"groups": 1, "group_size": 1, "batch_size": 16},
        },
        "resumes": [False, True],
    }
)
async def test_weights_over_several_steps_are_those_of_all_their_samples(
    loss: Any, shape: dict[str, Any], resumes: bool, tmp_path: Path
) -> None:
    """``[exchange] every`` makes one step of several, also if a run stops between two exchanges."""
    whole, _ = await in_one_process(loss, batch=48)
    recipe = Recipe(loss=loss, train_data=data())
    stops = [4, 15] if resumes else [15]
    for number, steps in enumerate(stops):
        topology = topology_of(job={"steps": steps}, compute=shape, exchange={"kind": "allreduce", "every": 3})
        resume = tmp_path / str(number - 1) if number else None
        result = await run(topology, recipe, folder=tmp_path / str(number), resume=resume)
        assert not result.errors
    kept = load_file(tmp_path / str(len(stops) - 1) / "model.safetensors")
    ours = torch.cat([kept[name].reshape(-1) for name in network_of().state_dict()])
    torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-12)


def test_only_means_that_are_weighted_are_taken_apart() -> None:
    weighted = [
        nn.CrossEntropyLoss(weight=CLASSES),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.NLLLoss(weight=CLASSES),
        partial(cross_entropy, weight=CLASSES),
        partial(cross_entropy, ignore_index=-100),
    ]
    assert all(isinstance(taken_apart(loss), ClassWeighted) for loss in weighted)
    others = [cross_entropy, nn.CrossEntropyLoss(), nn.MSELoss(), pair, partial(cross_entropy, label_smoothing=0.1)]
    assert all(taken_apart(loss) is loss for loss in others)


def test_probabilities_as_targets_keep_their_plain_mean() -> None:
    module = nn.CrossEntropyLoss(weight=CLASSES)
    output, target = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    assert taken_apart(module)(output, target) == module(output, target)


def supervised_contrastive(output: Tensor, target: Tensor) -> Tensor:
    """It is 0 for samples without another one of their class."""
    alike = output @ output.T
    own = torch.eye(len(target), dtype=torch.bool)
    positive = ((target[:, None] == target[None]) & ~own).to(output.dtype)
    logs = alike - torch.logsumexp(alike.masked_fill(own, -1e9), 1, keepdim=True)
    return -((positive * logs).sum(1) / positive.sum(1).clamp(min=1)).mean()


@pytest.mark.parametrize("accumulate", [2, 4])
async def test_a_loss_of_pairs_is_refused_if_parts_have_none(accumulate: int) -> None:
    """Micro-batches of two samples, whose halves are one, or of one, each of another class than the other's."""
    target = torch.tensor([0, 1, 2] * 32)
    one_each = TensorDataset(data().tensors[0], target)
    recipe = Recipe(loss=supervised_contrastive, train_data=one_each, eval_data=None)
    shape = {"groups": 2, "group_size": 1, "batch_size": 4, "accumulate": accumulate}
    result = await run(
        topology_of(job={"steps": 3}, compute=shape, data={"shuffle": "none"}, exchange={"kind": "allreduce"}), recipe
    )
    assert any(
        "not a mean over samples" in str(error) and "if each of them comes 3 times" in str(error)
        for error in result.errors.values()
    )


def test_an_output_with_as_many_fields_as_samples_is_tried() -> None:
    output = (torch.randn(2, 3, requires_grad=True), torch.randn(2, 3))

    def total(output: Any, target: Tensor) -> Tensor:
        return (output[0] - output[1]).square().sum()

    with pytest.raises(TaskError, match="not a mean over samples"):
        require_mean(total, output, torch.zeros(2), 2, total(output, torch.zeros(2)))


class Experts(nn.Module):
    """Its balance is a product of two means over all samples that it gets; or a mean of its own, a penalty."""

    def __init__(self, *, balanced: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.balanced, self.penalty = balanced, torch.zeros(())
        self.register_buffer("positions", torch.arange(6))  # which backward needs
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        shares = self.gate(inputs[:, self.positions]).softmax(1)
        load = nn.functional.one_hot(shares.argmax(1), 2).double().mean(0)
        self.penalty = (shares.mean(0) * load).sum() if self.balanced else shares.square().mean()
        return sum((shares[:, [k]] * expert(inputs) for k, expert in enumerate(self.experts)), torch.zeros(()))


@pytest.mark.parametrize("returned", [True, False])
async def test_the_balance_of_experts_is_refused_and_a_mean_is_not(returned: bool) -> None:
    async def errors(*, balanced: bool) -> list[BaseException]:
        kept: list[Experts] = []

        def model() -> nn.Module:
            kept.append(Experts(balanced=balanced))
            return kept[-1]

        def forward(model: Any, batch: Any) -> Any:
            output = model(batch[0])
            return output, (model.penalty if returned else model)

        def loss(output: Any, batch: Any) -> Tensor:
            scores, penalty = output
            return cross_entropy(scores, batch[1]) + 0.01 * (penalty if returned else penalty.penalty)

        recipe = Recipe(loss=loss, model=model, forward=forward, eval_data=None)
        shape = {"groups": 2, "group_size": 1, "batch_size": 8}
        result = await run(topology_of(job={"steps": 4}, compute=shape, exchange={"kind": "allreduce"}), recipe)
        return list(result.errors.values())

    assert any("what the model computes of all samples together" in str(error) for error in await errors(balanced=True))
    assert not await errors(balanced=False)


@pytest.mark.parametrize("of_all", [True, False])
async def test_what_the_model_computes_of_its_own_scores_is_tried_too(of_all: bool) -> None:
    """The entropy of the mean prediction is of all samples; the mean of the entropies is not."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).double()

        def forward(self, inputs: Tensor) -> Any:
            scores = self.layer(inputs)
            shares = scores.softmax(1).mean(0) if of_all else scores.softmax(1)
            return scores, (shares * shares.log()).sum(-1).mean()

    def loss(output: Any, target: Tensor) -> Tensor:
        return cross_entropy(output[0], target) + 0.1 * output[1]

    recipe = Recipe(loss=loss, model=Scores, eval_data=None)
    result = await run(topology_of(job={"steps": 2}, compute={"group_size": 2, "batch_size": 8}), recipe)
    said = [str(error) for error in result.errors.values()]
    assert any("what the model computes of all samples together" in text for text in said) if of_all else not said


class Lengths(torch.utils.data.Dataset[Any]):
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        length = 1 + number % 5
        return torch.randn(length, 6, generator=generator, dtype=torch.float64), torch.randint(3, (length,), generator=generator)


@pytest.mark.parametrize("by_sample", [True, False])
async def test_a_mean_over_tokens_of_batches_with_lengths_of_their_own_is_refused(by_sample: bool) -> None:
    def padded(samples: list[Any]) -> Any:
        inputs, target = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(list(inputs), batch_first=True), pad(list(target), batch_first=True, padding_value=-1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        tokens = cross_entropy(output.flatten(0, 1), target.flatten().clamp(min=0), reduction="none").view(target.shape)
        there = target >= 0
        return ((tokens * there).sum(1) / there.sum(1)).mean() if by_sample else tokens.mean()

    recipe = Recipe(loss=loss, train_data=Lengths(), eval_data=None, collate=padded)
    shape = {"groups": 2, "group_size": 1, "batch_size": 4}
    result = await run(
        topology_of(job={"steps": 3}, compute=shape, data={"shuffle": "none"}, exchange={"kind": "allreduce"}), recipe
    )
    assert by_sample != any(re.search(r"elements of \d+ samples", str(error)) is not None for error in result.errors.values())


def figure(output: Tensor, target: Tensor) -> Any:
    return cross_entropy(output, target), (output.argmax(1) == target).double().mean()


@pytest.mark.parametrize("compute", [{"groups": 1, "group_size": 1}, {"groups": 1, "group_size": 2}])
async def test_a_figure_beside_the_loss_is_not_taken_for_its_weight(compute: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"is no weight of its samples: it is 0.* for 8 samples, and .* for their halves"):
        await trained(figure, batch_size=8 * compute["group_size"], **compute)


async def test_a_second_loss_beside_the_loss_is_not_taken_for_its_weight() -> None:
    def losses(output: Tensor, target: Tensor) -> Any:
        return cross_entropy(output, target), output.pow(2).mean()

    with pytest.raises(TaskError, match="depends on the model's parameters"):
        await trained(losses, groups=1, group_size=1, batch_size=8)


async def test_the_mean_of_each_part_itself_may_be_meant() -> None:
    def own(output: Tensor, target: Tensor) -> Any:
        return output.std() * len(target), len(target)

    await trained(own, groups=1, group_size=2, batch_size=16)


async def test_pairs_of_metrics_are_numbers_or_tensors_and_weights_add_up() -> None:
    def right(output: Tensor, target: Tensor) -> Any:
        return (output.argmax(1) == target).sum().item(), len(target)

    recipe = Recipe(
        loss=cross_entropy,
        train_data=data(),
        eval_data=data(),
        metrics={"right": right, "two": figure, "mean": lambda o, t: right(o, t)[0] / len(t)},
    )
    result = await run(topology_of(compute={"group_size": 2, "batch_size": 8}, job={"steps": 2}), recipe)
    assert not result.errors
    (metrics,) = result.recorders["worker/0"].of("eval")
    assert metrics["eval_right"] == pytest.approx(metrics["eval_mean"])
    assert "eval_two" not in metrics
