"""A grid of several rows goes on without workers that are lost, and with those that come: whole runs in simulated time, whose
models are compared with one process, in double precision. Each step is trained once, on its whole batch, whoever is lost when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.run.again import Again
from zmqtrain.run.ending import Ending
from zmqtrain.run.faults import Fault, kill, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.random_state import seed_everything

STEPS, BATCH = 6, 12
_GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(BATCH * STEPS, 12, dtype=torch.float64, generator=_GENERATOR)
Y = torch.randint(3, (len(X),), generator=_GENERATOR)


def network() -> nn.Module:
    """With buffers, which a forward changes, and parameters that all rows have whole."""
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def task() -> Task:
    return Task(
        model=network,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        train_data=TensorDataset(X, Y),
        schedule=lambda own: torch.optim.lr_scheduler.StepLR(own, 2, 0.5),
    )


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Tensor]:
    return of_one_process()


def of_one_process(clip_norm: float = 0.0) -> Mapping[str, Tensor]:
    """What it makes of the model."""
    seed_everything(1)
    model = network()
    own = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(own, 2, 0.5)
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        own.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        own.step()
        schedule.step()
    return model.state_dict()


def topology(grid: str, clip_norm: float = 0.0, smaller: tuple[str, ...] = (), **job: Any) -> Topology:
    rows, columns = map(int, grid.split("x"))
    return Topology.from_dict(
        {
            "job": {"task": "given:task", "steps": STEPS, "timeout": "5 s", "elastic": True, **job},
            "hosts": [{"name": f"h[1-{rows * columns}]", "slots": 1}],
            "compute": {
                "group_size": rows * columns,
                "grid": grid,
                "batch_size": BATCH,
                "bucket_size": 512,
                "smaller_grids": smaller,
            },
            "exchange": {"kind": "allreduce"},
            "optimizer": {"clip_norm": clip_norm},
            "parallel": {"verify": False},
            "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
            "data": {"shuffle": "none"},
            "simulation": {"payload": "real"},
        }
    )


@dataclass
class Trained:
    """What a run has left, and told."""

    result: Result
    model: Mapping[str, Tensor]
    grids: list[tuple[int, str, tuple[str, ...]]] = field(default_factory=list)
    """The first step of each grid but the first one, its form, and its workers."""
    steps: dict[str, list[int]] = field(default_factory=dict)
    """The steps that each worker has reported."""
    took_s: list[float] = field(default_factory=list)
    """How long they took."""
    restarts: list[int | None] = field(default_factory=list)
    """The checkpoints from which the run as a whole has begun again."""


def trained(
    folder: Path, grid: str, *faults: Fault, status: str = "done", preempt_at_s: float | None = None, **job: Any
) -> Trained:
    told = Trained(None, {})  # type: ignore[arg-type]

    def report(peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            values = event.get("values") or {}
            if event["kind"] == "step":
                told.steps.setdefault(peer, []).append(event["step"])
                told.took_s.append(values["seconds"])
            elif event["kind"] == "view":
                found = (event["step"], values["reason"].rpartition(" ")[2], tuple(values["members"]))
                told.grids += [found] if found not in told.grids else []

    def again(_again: Again, _ending: Ending, step: int | None) -> None:
        told.restarts.append(step)

    folder.mkdir(exist_ok=True)
    options = Options(
        faults=faults,
        task=task(),
        checkpoints=folder / "checkpoints",
        on_report=report,
        on_restart=again,
        preempt_at_s=preempt_at_s,
    )
    told.result = simulate(topology(grid, **job), options=options)
    assert (told.result.ending.status, told.result.broken) == (status, []), told.result.ending.error
    told.grids.sort()  # workers report at different times
    told.model = load_file(folder / "model.safetensors")
    return told


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)  # sums in another order


def test_the_others_form_a_smaller_grid_and_take_its_parts_from_another_column(alone: Mapping[str, Tensor], tmp_path: Path) -> None:
    run = trained(tmp_path, "2x2", kill("worker/1", step=3))
    assert run.grids == [(3, "2x1", ("worker/0", "worker/3"))]
    assert run.steps["worker/0"] == run.steps["worker/3"] == list(range(STEPS)), "no step again, and none from a checkpoint"
    assert run.steps["worker/2"] == [0, 1, 2], "a spare"
    assert run.result.seconds < 1, "nobody waits for a time-out"
    require_equal(run.model, alone)


@pytest.mark.parametrize("moment", range(6))
def test_whenever_it_is_lost(alone: Mapping[str, Tensor], tmp_path: Path, moment: int) -> None:
    """A step takes 8 ms, a checkpoint as long: in forward and backward, in the sums, while all wait to count it, in between."""
    victim = f"worker/{moment % 4}"
    run = trained(tmp_path, "2x2", kill(victim, at=0.045 + 0.0022 * moment), checkpoint_every=2)
    assert len(run.grids) == 1
    assert victim not in run.grids[0][2]
    require_equal(run.model, alone)


@pytest.mark.parametrize("after_ms", [1, 15, 21])
def test_another_one_is_lost_while_the_next_grid_is_formed(alone: Mapping[str, Tensor], tmp_path: Path, after_ms: int) -> None:
    """Worker 2 is of the same row as worker 0: the last one that has this row gives its part to two others."""
    run = trained(tmp_path, "2x3", kill("worker/0", at=0.05), kill("worker/2", at=0.05 + 1e-3 * after_ms))
    assert run.grids[-1][1:] == ("2x2", ("worker/4", "worker/1", "worker/5", "worker/3"))
    require_equal(run.model, alone)


def test_one_after_another_down_to_one_column(alone: Mapping[str, Tensor], tmp_path: Path) -> None:
    run = trained(tmp_path, "3x3", *(kill(f"worker/{rank}", step=step) for rank, step in ((0, 1), (4, 2), (1, 4))))
    assert [form for _, form, _ in run.grids] == ["3x2", "3x2", "3x2"]
    assert set(run.grids[-1][2]) == {f"worker/{rank}" for rank in (2, 3, 5, 6, 7, 8)}
    require_equal(run.model, alone)
    run = trained(tmp_path / "again", "2x2", kill("worker/3", step=0), kill("worker/2", step=STEPS - 1))
    assert [form for _, form, _ in run.grids][:1] == ["2x1"]
    require_equal(run.model, alone)


def test_one_that_comes_back_makes_the_grid_larger_again(alone: Mapping[str, Tensor], tmp_path: Path) -> None:
    run = trained(tmp_path, "2x2", restart("worker/1", step=1, after=0.025))
    (lost_at, smaller, _), (back_at, larger, workers) = run.grids
    assert (smaller, larger) == ("2x1", "2x2")
    assert lost_at < back_at
    assert set(workers) == {f"worker/{rank}" for rank in range(4)}
    assert run.steps["worker/0"] == list(range(STEPS)), "nothing is given up for it"
    require_equal(run.model, alone)


def test_without_the_last_worker_of_a_row_the_run_begins_again_from_its_checkpoint(
    alone: Mapping[str, Tensor], tmp_path: Path
) -> None:
    lost = kill("worker/0", step=4), kill("worker/2", step=4)
    run = trained(tmp_path, "2x2", *lost, status="failed", checkpoint_every=2)
    error = run.result.ending.error or {}
    assert "no worker is left that has the part of the model of row 0" in error["message"]
    assert run.result.ending.exit_code >= 128, "worth another try"
    assert run.result.seconds < 2, "nobody waits for a time-out"
    back = restart("worker/0", at=0.08, after=0.001), restart("worker/2", at=0.08, after=0.001)
    run = trained(tmp_path / "again", "2x2", *back, checkpoint_every=2, restarts=1)
    assert run.restarts in ([2], [4])
    require_equal(run.model, alone)


@pytest.mark.parametrize(("at_ms", "smaller"), [(54, ""), (62, ""), (72, ""), (72, "3x1"), (72, "1x3")])
def test_all_stop_together_also_while_the_next_grid_is_formed(
    alone: Mapping[str, Tensor], tmp_path: Path, at_ms: int, smaller: str
) -> None:
    """And what they have kept is resumed on the first grid."""
    asked_s, others = 1e-3 * at_ms, (smaller,) if smaller else ()
    run = trained(tmp_path, "2x2", kill("worker/1", at=0.055), status="preempted", preempt_at_s=asked_s, smaller=others)
    assert run.result.seconds < 1
    options = Options(faults=(), task=task(), checkpoints=tmp_path / "checkpoints", resume=tmp_path / "checkpoints")
    result = simulate(topology("2x2"), options=options)
    assert (result.ending.status, result.broken) == ("done", [])
    require_equal(load_file(tmp_path / "model.safetensors"), alone)


def test_its_price_is_that_all_wait_for_all_in_each_step(tmp_path: Path) -> None:
    """Two messages one after another, for four workers."""
    usual, elastic = (trained(tmp_path / str(choice), "2x2", elastic=choice) for choice in (False, True))
    assert median(elastic.took_s) - median(usual.took_s) == pytest.approx(2e-3, rel=0.1)


@pytest.mark.parametrize("moment", range(6))
def test_gradients_are_clipped_by_the_norm_of_the_whole_whenever_a_worker_is_lost(tmp_path: Path, moment: int) -> None:
    """Which needs a worker of each row: it is done before a step counts."""
    run = trained(tmp_path, "2x2", kill(f"worker/{moment % 4}", at=0.045 + 0.002 * moment), clip_norm=0.3)
    assert len(run.grids) == 1
    require_equal(run.model, of_one_process(0.3))


@pytest.mark.parametrize("smaller", ["3x1", "1x3"])
@pytest.mark.parametrize("moment", range(3))
def test_they_may_form_a_grid_of_other_rows_and_come_back_to_the_first(
    alone: Mapping[str, Tensor], tmp_path: Path, smaller: str, moment: int
) -> None:
    run = trained(
        tmp_path, "2x2", restart("worker/1", at=0.03 + 0.003 * moment, after=0.03), smaller=(smaller,), checkpoint_every=2
    )
    assert [form for _, form, _ in run.grids] == [smaller, "2x2"]
    assert len(run.grids[0][2]) == 3
    require_equal(run.model, alone)


def test_on_a_grid_of_one_row_each_has_all_that_the_others_need(alone: Mapping[str, Tensor], tmp_path: Path) -> None:
    """So whoever is lost, the last one trains on."""
    smaller = ("1x3", "1x2", "1x1")
    run = trained(tmp_path, "2x2", *(kill(f"worker/{rank}", step=step) for rank, step in ((1, 1), (0, 2), (2, 4))), smaller=smaller)
    assert [form for _, form, _ in run.grids] == ["1x3", "1x2", "1x1"]
    require_equal(run.model, alone)


@pytest.mark.parametrize("smaller", ["3x1", "1x3"])
def test_gradients_are_clipped_on_other_rows(tmp_path: Path, smaller: str) -> None:
    run = trained(tmp_path, "2x2", kill("worker/3", at=0.05), clip_norm=0.3, smaller=(smaller,))
    assert [form for _, form, _ in run.grids] == [smaller]
    require_equal(run.model, of_one_process(0.3))


def test_several_groups_that_sum_are_as_one_on_a_wider_grid(tmp_path: Path) -> None:
    """As the refusal of several elastic groups says; but for batch norm."""
    plain = replace(task(), model=lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double())
    one, several = topology("2x4", elastic=False), topology("2x4", elastic=False).to_dict()
    several["compute"] |= {"groups": 2, "group_size": 4, "grid": "2x2", "batch_size": BATCH // 2}
    models = []
    for number, given in enumerate((one, Topology.from_dict(several))):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = simulate(given, options=Options(faults=(), task=plain, checkpoints=folder / "checkpoints"))
        assert (result.ending.status, result.broken) == ("done", [])
        models.append(load_file(folder / "model.safetensors"))
    require_equal(*models)
