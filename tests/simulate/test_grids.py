"""Groups that divide their model, in simulated time: the arithmetic of one process, in the time that the profile gives to parts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from tests.simulate.test_training import STEP_S, run, topology_of
from zmqtrain import Task
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.profiled import with_times
from zmqtrain.plan.trace import trace_layers
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.testing.threads import run_ranks
from zmqtrain.topology.links import MEMORY_BYTE_S
from zmqtrain.train.device.profile import Profile


def rows_of(model: nn.Module, alone: nn.Module) -> set[int]:
    """The rows whose parts of one process's parameters a model has, all of them."""
    found = {0, 1}
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        parts = [whole] * 2 if mine.shape == whole.shape else [whole[: -(-len(whole) // 2)], whole[-(-len(whole) // 2) :]]
        near = [part.shape == mine.shape and torch.allclose(mine, part, rtol=1e-12, atol=1e-13) for part in parts]
        found &= {row for row, is_near in enumerate(near) if is_near}
    return found


@pairwise(
    {
        "exchange": [{"staleness": "sync"}, {"kind": "allreduce", "staleness": "async"}],
        "grid": [(2, 1), (1, 2), (2, 2)],
        "groups": [1, 2],
    }
)
def test_equals_one_process_in_the_time_of_its_parts(
    exchange: dict[str, Any], grid: tuple[int, int], groups: int, tmp_path: Path
) -> None:
    rows, columns = grid
    topology = topology_of(
        tmp_path,
        groups,
        rows * columns,
        compute={"grid": f"{rows}x{columns}"},
        exchange=exchange,
        hosts=[{"name": "h[1-8]", "slots": 1}],
        parallel={"verify": False},
    )
    result, recipe, events = run(topology)
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    found = Counter(frozenset(rows_of(model, recipe.alone())) for model in recipe.models)
    each = {frozenset({0}): columns * groups, frozenset({1}): columns * groups}
    assert found == (each if rows == 2 else {frozenset({0, 1}): columns * groups})
    steps = [event["values"]["seconds"] for event in events if event["kind"] == "step"]
    least = 0.45 * STEP_S if rows == 2 else 0.99 * STEP_S  # parts are of 16, 8 and 2 of 3 outputs
    assert all(least <= seconds <= 1.2 * least + 0.005 for seconds in steps[1:]), steps


@pytest.mark.parametrize("choice", ["model", "batch"])
def test_the_same_times_each_time(choice: str, tmp_path: Path) -> None:
    layers = [{"layer": name, "choice": choice, "grid": "2x1"} for name in "024"]
    found = []
    for _ in range(2):
        topology = topology_of(tmp_path, 1, 2, compute={"grid": "2x1"}, exchange={"kind": "allreduce", "staleness": "async"})
        topology = topology.model_copy(
            update={"parallel": type(topology.parallel).model_validate({"layers": layers, "verify": False})}
        )
        result, _, events = run(topology)
        assert result.ending.status == "done", result.ending.error
        found.append([(event["time"], event["values"]["seconds"]) for event in events if event["kind"] == "step"])
    assert found[0] == found[1]


PRICED = [("whole", "4x1", 2), ("whole", "2x2", 1), ("model", "4x1", 1), ("model", "2x2", 2)]


@pytest.mark.parametrize(("choice", "grid", "slots"), PRICED)
def test_a_step_takes_what_it_is_priced_at(choice: Choice, grid: str, slots: int, tmp_path: Path) -> None:
    """By the code that trains, also where a host has several processes."""
    names, width, batch = [str(2 * number) for number in range(10)], 128, 32
    profile = tmp_path / "layers.json"
    layers = [{"name": name, "numel": width * (width + 1), "forward_s": 1e-3, "backward_s": 2e-3} for name in names]
    profile.write_text(json.dumps({"layers": layers, "batch_size": batch}))
    topology = topology_of(
        tmp_path,
        1,
        4,
        hosts=[{"name": f"h[1-{4 // slots}]", "slots": slots}],
        exchange={"kind": "allreduce", "staleness": "async"},
        compute={"grid": grid, "batch_size": batch, "bucket_size": "64 KiB", "profile": str(profile)},
        network={"bandwidth": "100 Mbit/s", "latency": "50 us"},
        parallel={"verify": False, "layers": [{"layer": name, "choice": choice, "grid": grid} for name in names]},
    )

    def model() -> nn.Module:
        return nn.Sequential(*(each for _ in names for each in (nn.Linear(width, width), nn.Tanh())))

    data = TensorDataset(torch.randn(64, width), torch.randn(64, width))
    task = Task(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        train_data=data,
    )
    events: list[dict[str, Any]] = []
    result = simulate(topology, options=Options(task=task, on_report=lambda _, reported: events.extend(reported)))
    assert result.ending.status == "done", result.ending.error
    ends = sorted(event["time"] for event in events if event["kind"] == "step")
    traced = with_times(trace_layers(model(), [torch.empty(2, width)]), Profile.load(str(profile)), batch)
    link = Link(topology.network.latency or 0.0, 8 / 100e6, MEMORY_BYTE_S)
    problem = Problem(stages(traced), batch, 4, link, Ours(per_host=slots), overlap=1.0)
    plan = Plan(tuple(LayerPlan(name, choice, Grid.parse(grid)) for name in names))
    assert ends[-1] - ends[-5] == pytest.approx(price(problem, placed_of(problem, plan)).step_s, rel=0.15)


def test_parts_of_a_layers_work() -> None:
    """Of channels, of strips, and of samples; and of what every row does."""
    choices: dict[str, Choice] = {"0": "domain", "1": "batch", "3": "model", "4": "whole"}
    plan = Plan(tuple(LayerPlan(name, choice, Grid(2, 2)) for name, choice in choices.items()))

    def rank(fabric: Any) -> dict[str, float]:
        layers = [nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 7), nn.Linear(7, 3)]
        return parallelize(nn.Sequential(*layers), "2x2", plan, fabric=fabric).shares

    ranks, _ = run_ranks(4, rank)
    assert ranks[0] == {"0": 0.5, "1": 0.5, "3": 4 / 7, "4": 1.0}
    assert ranks[3] == {"0": 0.5, "1": 0.5, "3": 3 / 7, "4": 1.0}
