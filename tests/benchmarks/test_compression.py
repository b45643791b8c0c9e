"""What is trained with compression, and how long a host is said to take for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import compression
from benchmarks.compression import FLOPS, PARTS, WAYS, Problem, arithmetic_s, bench_compression, profile_of
from zmqtrain import Task
from zmqtrain.errors import UsageError


def small(lr: float = 0.5) -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        train_data=data,
        eval_data=data,
    )


def test_a_layer_takes_two_operations_for_each_weight_and_place_and_four_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 10))
    data = TensorDataset(torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))
    task = Task(model=lambda: model, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD, train_data=data, eval_data=data)
    first, last = profile_of(task, 2)["layers"]
    assert (first["name"], first["numel"], last["name"], last["numel"]) == ("0", 112, "2", 2570)
    assert first["forward_s"] * FLOPS == pytest.approx(2 * 112 * 64 * 2)
    assert last["backward_s"] * FLOPS == pytest.approx(4 * 2570 * 2)


def test_a_problem_is_trained_in_each_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(compression.PROBLEMS, "small", Problem(batch=4, loss=10.0, rates=(0.5, 0.1), evaluated=64))
    monkeypatch.setattr(compression, "task_of", lambda problem, data, lr: small(lr))
    monkeypatch.setattr(compression, "PARTS", ("small",))
    monkeypatch.setattr(compression, "SEEDS", (1, 2))
    monkeypatch.setattr(compression, "WAYS", {way: WAYS[way] for way in ("none", "int8")})
    torch.manual_seed(0)
    cases: dict[str, Any] = {case["case"]: case for case in bench_compression(data=str(tmp_path))}
    for way in compression.WAYS:
        case = cases[f"small, {way}, seconds to a loss of 10"]
        assert 0 < case["value"] < compression.CAP_S
        assert case["peer"] == (None if way == "none" else "none")
        assert cases[f"small, {way}, steps to it"]["value"] == compression.EVALUATE_EVERY
        assert cases[f"small, {way}, learning rate"]["value"] == 0.5  # the first of two that are equally fast


def test_its_own_arithmetic_is_measured() -> None:
    assert all(arithmetic_s(small(), setting) > 0 for setting in WAYS.values() if setting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": ["mnist"]}, f"no part 'mnist'; there are {PARTS[0]}"),
        ({"ways": ["zip"]}, "no system 'zip'; there are none, int8"),
        ({}, "needs --data"),
    ],
)
def test_what_it_needs_is_said(arguments: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(bench_compression(**arguments))  # type: ignore[arg-type]
