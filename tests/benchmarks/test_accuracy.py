"""Whole trainings by each exchange end with an evaluation of the run's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import accuracy
from benchmarks.accuracy import PARTS, WAYS, Problem, bench_accuracy
from zmqtrain import Task
from zmqtrain.errors import UsageError


def small() -> Task:
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        train_data=data,
        eval_data=data,
    )


@pytest.fixture(params=["eval_accuracy", "eval_loss"])
def metric(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(accuracy.PROBLEMS, "small", Problem(batch=32, epochs=3, lr=0.5, metric=request.param))
    monkeypatch.setattr(accuracy, "PARTS", ("small",))
    monkeypatch.setattr(accuracy, "SEEDS", (1,))
    monkeypatch.setattr(accuracy, "task_of", lambda problem, data: small())
    return str(request.param)


@pytest.mark.parametrize("metric", ["eval_accuracy"], indirect=True)
def test_each_way_is_trained_to_its_end(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    few = {name: way for name, way in WAYS.items() if way.workers <= 4}
    monkeypatch.setattr(accuracy, "WAYS", few)
    cases: dict[str, Any] = {case["case"]: case for case in bench_accuracy(data="unused")}
    for way in few:
        case = cases[f"small, {way}"]
        assert case["unit"] == "%"
        assert case["peer"] == (None if way == "one process" else "one process")
        assert 90.0 < case["value"] <= 100.0
        assert cases[f"small, {way}, the lowest seed"]["value"] == case["value"]


def test_some_ways_are_compared_with_one_process(metric: str) -> None:
    found = list(bench_accuracy(data="unused", ways=["all-reduce, 4 workers"]))
    one, all_reduce = found[::3]
    assert [one["case"], all_reduce["case"]] == ["small, one process", "small, all-reduce, 4 workers"]
    assert all_reduce["value"] == pytest.approx(one["value"], rel=1e-3)  # the same steps, in float32
    assert all_reduce["unit"] == ("%" if metric == "eval_accuracy" else "nats")


def test_the_learning_rate_rises_and_falls_to_almost_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    schedule = accuracy._schedule(torch.optim.SGD([parameter], lr=1.0), steps=1000)
    rates = []
    for _ in range(1000):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == pytest.approx(0.91)
    assert rates[-1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": ["cifra"], "data": "."}, "no part 'cifra'"),
        ({"ways": ["telepathy"], "data": "."}, "no system 'telepathy'"),
        ({}, "needs --data"),
    ],
)
def test_what_there_is_not(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        next(bench_accuracy(**arguments))
    assert PARTS == ("mnist", "cifar", "lstm", "transformer")
