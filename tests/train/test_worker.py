"""Whole runs: however the batch is divided, training equals one process on all of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.pairwise import pairwise
from tests.precision import close
from tests.train.world import Recipe, data_of, network_of, run, topology_of
from zmqtrain.data.partition import Partition
from zmqtrain.errors import CheckpointError, NonFiniteLossError, TaskError, UsageError
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints
from zmqtrain.train.random_state import seed_everything

ADAM = {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01)}
SCHEDULED = {"schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6)}


def alone(recipe: Recipe, steps: int, batch: int, *, clip: float = 0.0, judge: bool = False) -> torch.Tensor:
    """The parameters after plain torch training on whole batches; in float64 for a ``judge`` of others."""
    seed_everything(1)
    task = recipe("alone")
    model = task.model().double() if judge else task.model()
    optimizer = task.optimizer(list(model.parameters()))
    schedule = task.schedule(optimizer) if task.schedule else None
    inputs, targets = task.train_data.tensors
    inputs = inputs.double() if judge else inputs
    partition = Partition(len(inputs), 1, 1, batch, 1)
    for step in range(steps):
        rows = torch.from_numpy(partition.indices(step, 0, 0).copy())
        optimizer.zero_grad(set_to_none=False)
        task.loss(model(inputs[rows]), targets[rows]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule:
            schedule.step()
    return recipe.parameters("alone")


KINDS: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "server": {"kind": "model_server", "staleness": "sync", "shards": 1},
    "servers": {"kind": "model_server", "staleness": "sync", "shards": 3, "split_size": 128},
    "averaging": {"kind": "averaging"},
}


@pairwise(
    {
        "groups, size": [(1, 1), (1, 3), (2, 2), (4, 1), (3, 2)],
        "kind": ["allreduce", "server", "servers"],
        "fields": {"sgd": {}, "adam": ADAM, "schedule": SCHEDULED},
        "dtype": [torch.float64, torch.float32],
    }
)
async def test_groups_of_workers_equal_one_process(
    groups: int, size: int, kind: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    recipe = Recipe(dtype, **fields)
    batch = 24 // groups
    topology = topology_of(
        job={"steps": 5}, compute={"groups": groups, "group_size": size, "batch_size": batch}, exchange=KINDS[kind]
    )
    result = await run(topology, recipe)
    assert not result.errors
    plain, exact = (alone(recipe, 5, batch * groups, judge=judge) for judge in (False, True))
    for worker in range(groups * size):
        close(recipe.parameters(f"worker/{worker}").to(dtype), plain.to(dtype), exact=exact)
    finish = result.recorders["worker/0"].of("finish")[0]
    assert finish["replica_spread"] == 0
    assert set(result.recorders["worker/0"].of("eval")[0]) >= {"eval_loss", "eval_accuracy"}


@pytest.mark.parametrize("kind", ["allreduce", "servers"])
@pytest.mark.parametrize("overlap", [True, False])
async def test_clipping_accumulation_and_uneven_parts(kind: str, overlap: bool) -> None:
    recipe = Recipe()
    topology = topology_of(
        job={"steps": 4},
        compute={"groups": 2, "group_size": 3, "batch_size": 11, "accumulate": 2, "overlap": overlap},
        exchange=KINDS[kind],
        optimizer={"clip_norm": 0.05},
    )
    result = await run(topology, recipe)
    assert not result.errors
    expected = alone(recipe, 4, 22, clip=0.05)
    assert (recipe.parameters("worker/5") - expected).norm() <= 1e-12 * expected.norm()


async def test_images_with_channels_last_train_alike() -> None:
    seen: list[bool] = []

    class Watching(nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images.is_contiguous(memory_format=torch.channels_last))
            return super().forward(images)

    def model() -> nn.Module:
        return nn.Sequential(Watching(2, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)).double()

    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(24, 2, 8, 8, generator=generator).double(), torch.arange(24) % 3)
    found = []
    for last in (False, True):
        recipe = Recipe(model=model, train_data=data, eval_data=data)
        seen.clear()
        compute = {"batch_size": 12, "group_size": 2, "channels_last": last, "keep_memory": False}
        assert not (await run(topology_of(job={"steps": 3}, compute=compute), recipe)).errors
        assert set(seen) == {last}
        found.append(recipe.parameters("worker/1"))
    assert torch.allclose(*found, rtol=1e-10, atol=1e-12)


async def test_asynchronous_groups_learn() -> None:
    recipe = Recipe()
    topology = topology_of(
        job={"epochs": 20, "eval_every": 10},
        compute={"groups": 2, "group_size": 2, "batch_size": 16},
        exchange={"kind": "model_server", "staleness": "async", "shards": 2},
    )
    result = await run(topology, recipe)
    assert not result.errors
    assert len(result.losses("worker/0")) == 20 * 3
    losses = result.losses("worker/3")
    assert sum(losses[-6:]) < sum(losses[:6])
    assert len(result.recorders["worker/0"].of("eval")) == 6
    assert len(result.recorders["worker/2"].of("eval")) == 0
    assert result.recorders["worker/0"].of("step")[-1]["staleness"] is not None


@pytest.mark.parametrize("staleness", ["sync", "async", {"bound": 1}])
async def test_training_ends_when_the_metric_is_reached(staleness: Any) -> None:
    topology = topology_of(
        job={"until": {"metric": "eval_loss", "reaches": 1e9, "max_steps": 40}, "eval_every": 4},
        compute={"groups": 2, "group_size": 2, "batch_size": 16},
        exchange={"kind": "model_server", "staleness": staleness},
    )
    result = await run(topology, Recipe())
    assert not result.errors
    assert len(result.losses("worker/0")) == len(result.losses("worker/1")) == 4
    assert len(result.losses("worker/2")) == len(result.losses("worker/3")) < 40


@pytest.mark.parametrize("exchange", [{"kind": "allreduce"}, {"kind": "model_server"}, {"kind": "gossip"}], ids=str)
async def test_a_metric_that_is_not_reached_is_said(exchange: dict[str, Any]) -> None:
    until = {"metric": "eval_loss", "reaches": 1e-9, "max_steps": 5}
    topology = topology_of(
        job={"until": until, "eval_every": 2}, compute={"groups": 2, "group_size": 2, "batch_size": 16}, exchange=exchange
    )
    result = await run(topology, Recipe())
    texts = [event["text"] for recorder in result.recorders.values() for event in recorder.of("warning")]
    value = result.recorders["worker/0"].of("eval")[-1]["eval_loss"]
    assert texts == [f"eval_loss has not reached 1e-09: that of the run's model is {value:.6g}"]


@pytest.mark.parametrize(("kind", "adam"), [(kind, number % 2 == 1) for number, kind in enumerate(KINDS)])
async def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(kind: str, adam: bool, tmp_path: Path) -> None:
    """With Adam, or with momentum and a schedule. Each exchange with both, from one grid to another: test_resume_on_grids.py."""
    fields = ADAM if adam else SCHEDULED
    compute = {"groups": 2, "group_size": 2, "batch_size": 12}
    exchange = KINDS[kind] | ({"every": 3} if kind == "averaging" else {})
    job = {"checkpoint_every": 4, "keep_checkpoints": 3}
    whole = Recipe(**fields)
    first = await run(
        topology_of(job=job | {"steps": 10}, compute=compute, exchange=exchange), whole, folder=tmp_path / "checkpoints"
    )
    assert not first.errors
    found = [path.name for path in find_checkpoints(tmp_path / "checkpoints")]
    assert found == ["step-00000004", "step-00000008", "step-00000010"]
    again = Recipe(**fields)
    resumed = await run(
        topology_of(job=job | {"steps": 10}, compute=compute, exchange=exchange),
        again,
        folder=tmp_path / "again",
        resume=tmp_path / "checkpoints" / "step-00000004",
    )
    assert not resumed.errors
    for worker in range(4):
        assert torch.equal(whole.parameters(f"worker/{worker}"), again.parameters(f"worker/{worker}"))
        assert first.losses(f"worker/{worker}")[4:] == resumed.losses(f"worker/{worker}")
    assert [path.name for path in find_checkpoints(tmp_path / "again")] == ["step-00000008", "step-00000010"]


@pytest.mark.parametrize(
    ("compute", "steps"),
    [({}, (1, 2, 3, 7)), ({"accumulate": 2}, (2, 7)), ({"group_size": 2, "grid": "2x1"}, (1, 5))],
    ids=["plain", "accumulate", "grid"],
)
async def test_gradients_that_wait_for_their_exchange_are_resumed_too(
    compute: dict[str, Any], steps: tuple[int, ...], tmp_path: Path
) -> None:
    """A checkpoint between two exchanges has those of the steps since."""
    topology = topology_of(
        job={"steps": 9, "checkpoint_every": 1, "keep_checkpoints": 20},
        compute={"groups": 2, "batch_size": 12, **compute},
        exchange={"kind": "allreduce", "every": 3},
    )
    whole = Recipe()
    assert not (await run(topology, whole, folder=tmp_path)).errors
    for step in steps:
        again = Recipe()
        resumed = await run(topology, again, folder=tmp_path / f"again {step}", resume=tmp_path / f"step-{step:08d}")
        assert not resumed.errors
        assert len(resumed.losses("worker/0")) == 9 - step
        for peer in whole.models:
            assert torch.equal(whole.parameters(peer), again.parameters(peer))


async def test_the_end_of_a_run_between_exchanges_has_them_too(tmp_path: Path) -> None:
    """Also after the last evaluation."""

    def topology(steps: int) -> Any:
        compute = {"groups": 2, "batch_size": 12}
        return topology_of(job={"steps": steps, "eval_every": 1}, compute=compute, exchange={"kind": "allreduce", "every": 3})

    whole, again = Recipe(), Recipe()
    assert not (await run(topology(8), whole, folder=tmp_path / "whole")).errors
    assert not (await run(topology(5), Recipe(), folder=tmp_path / "part")).errors
    assert not (await run(topology(8), again, folder=tmp_path / "again", resume=tmp_path / "part")).errors
    for peer in whole.models:
        assert torch.equal(whole.parameters(peer), again.parameters(peer))


async def test_a_checkpoint_between_exchanges_is_refused_by_a_run_that_exchanges_at_others(tmp_path: Path) -> None:
    def topology(every: int) -> Any:
        job = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 20}
        return topology_of(job=job, compute={"batch_size": 12}, exchange={"kind": "allreduce", "every": every})

    assert not (await run(topology(3), Recipe(), folder=tmp_path)).errors
    for step, every in ((2, 4), (2, 2), (3, 2)):
        result = await run(topology(every), Recipe(), folder=tmp_path / "x", resume=tmp_path / f"step-{step:08d}")
        with pytest.raises(CheckpointError, match=r"old value of \[exchange\] every"):
            raise result.errors["worker/0"]
    result = await run(topology(1), Recipe(), folder=tmp_path / "y", resume=tmp_path / "step-00000003")
    assert not result.errors


async def test_random_states_and_statistics_of_layers_are_resumed_too(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3)).double()

    def noisy(batch: Any) -> Any:
        return batch[0] + 0.1 * np.random.randn() + 0.1 * random.random(), batch[1]

    topology = topology_of(
        job={"steps": 9, "checkpoint_every": 4, "keep_checkpoints": 3}, compute={"batch_size": 12, "accumulate": 2}
    )
    whole, again = Recipe(model=model, transform=noisy), Recipe(model=model, transform=noisy)
    first = await run(topology, whole, folder=tmp_path)
    resumed = await run(topology, again, folder=tmp_path / "again", resume=tmp_path / "step-00000004")
    assert not first.errors
    assert not resumed.errors
    assert first.losses("worker/0")[4:] == resumed.losses("worker/0")
    for name, value in whole.models["worker/0"].state_dict().items():
        assert torch.equal(value, again.models["worker/0"].state_dict()[name]), name


def spoiled(rank: int, step: int) -> Any:
    """A loss that is NaN on one worker at one step."""

    def make(peer: str) -> Any:
        recipe = Recipe()
        calls = 0

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            value = nn.functional.cross_entropy(output, target)
            return value * float("nan") if peer == f"worker/{rank}" and calls == step + 1 else value

        recipe.fields["loss"] = loss
        return recipe(peer)

    return make


@pytest.mark.parametrize("kind", ["allreduce", "servers", "async"])
@pytest.mark.parametrize("rank", [0, 3])
async def test_a_bad_loss_stops_the_run_and_keeps_the_last_good_step(kind: str, rank: int, tmp_path: Path) -> None:
    exchange = KINDS.get(kind, {"kind": "model_server", "staleness": "async"})
    topology = topology_of(job={"steps": 10}, compute={"groups": 2, "group_size": 2, "batch_size": 12}, exchange=exchange)
    result = await run(topology, spoiled(rank, 3), folder=tmp_path)
    assert list(result.errors) == [f"worker/{rank}"]
    error = result.errors[f"worker/{rank}"]
    assert isinstance(error, NonFiniteLossError)
    assert "step 3. A checkpoint of step 3 was kept." in str(error)
    assert Checkpoint(tmp_path / "step-00000003").step == 3
    if kind != "async":
        good = Recipe()
        await run(topology_of(job={"steps": 3}, compute=topology.compute.model_dump(), exchange=exchange), good, folder=tmp_path)
        kept = Checkpoint(tmp_path / "step-00000003").part("model")[0]
        ours = torch.cat([payload.tensor.reshape(-1) for payload in kept.values()])
        assert torch.equal(ours, good.parameters("worker/0"))


@pytest.mark.parametrize("rank", [0, 3])
async def test_a_bad_loss_between_exchanges_leaves_the_last_one(rank: int, tmp_path: Path) -> None:
    """Others have added the bad step's gradients to those before."""
    exchange = {"kind": "allreduce", "every": 3}
    compute = {"groups": 2, "group_size": 2, "batch_size": 12}
    result = await run(topology_of(job={"steps": 10}, compute=compute, exchange=exchange), spoiled(rank, 4), folder=tmp_path)
    assert list(result.errors) == [f"worker/{rank}"]
    assert "A checkpoint of step 3 was kept" in str(result.errors[f"worker/{rank}"])
    whole, again = Recipe(), Recipe()
    assert not (await run(topology_of(job={"steps": 8}, compute=compute, exchange=exchange), whole)).errors
    resumed = topology_of(job={"steps": 8}, compute=compute, exchange=exchange)
    assert not (await run(resumed, again, folder=tmp_path / "again", resume=tmp_path)).errors
    assert all(torch.equal(whole.parameters(f"worker/{each}"), again.parameters(f"worker/{each}")) for each in range(4))


async def test_a_bad_loss_of_which_nothing_can_be_kept_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where checkpoints should lie")
    topology = topology_of(job={"steps": 5}, compute={"batch_size": 12})
    result = await run(topology, spoiled(0, 3), folder=tmp_path / "file")
    assert "No checkpoint of the last good step could be kept" in str(result.errors["worker/0"])


async def test_a_bad_loss_may_be_passed_over(tmp_path: Path) -> None:
    topology = topology_of(job={"steps": 5, "on_nan": "continue"}, compute={"batch_size": 12})
    result = await run(topology, spoiled(0, 3), folder=tmp_path)
    assert not result.errors
    assert len(result.losses("worker/0")) == 5


@pytest.mark.parametrize(
    ("fields", "compute", "error", "said"),
    [
        ({"model": lambda: nn.Tanh()}, {}, TaskError, "has no parameters"),
        ({"model": lambda: network_of().requires_grad_(False)}, {}, TaskError, "requires a gradient"),
        ({"model": lambda: 3}, {}, TaskError, "must return a torch.nn.Module"),
        ({"model": lambda: 1 / 0}, {}, TaskError, "ZeroDivisionError"),
        ({"loss": lambda output, target: output}, {}, TaskError, "tensor of one element"),
        ({"loss": lambda output, target: 1 / 0}, {}, TaskError, "Task.loss.*ZeroDivisionError"),
        ({"optimizer": lambda p: None}, {}, TaskError, "must return a torch.optim.Optimizer"),
        ({}, {"batch_size": 500}, UsageError, "96 samples, but one step of 1 group with batch_size = 500"),
        ({"train_data": [1, 2, 3]}, {"batch_size": 2}, TaskError, "must be .input, target."),
    ],
)
async def test_what_is_wrong_with_a_task_is_said(
    fields: dict[str, Any], compute: dict[str, Any], error: type[Exception], said: str
) -> None:
    result = await run(topology_of(job={"steps": 3}, compute={"batch_size": 12} | compute), Recipe(**fields))
    with pytest.raises(error, match=said):
        raise result.errors["worker/0"]


async def test_a_task_that_raises_on_one_worker_ends_the_others(tmp_path: Path) -> None:
    def make(peer: str) -> Any:
        recipe = Recipe()
        data = data_of()

        class Broken:
            def __len__(self) -> int:
                return len(data)

            def __getitem__(self, index: int) -> Any:
                if peer == "worker/1":
                    raise KeyError("lost sample")
                return data[index]

        recipe.fields["train_data"] = Broken()
        return recipe(peer)

    topology = topology_of(job={"steps": 3}, compute={"groups": 1, "group_size": 2, "batch_size": 12})
    result = await run(topology, make)
    assert isinstance(result.errors["worker/1"], TaskError)
    assert isinstance(result.errors["worker/1"].__cause__, KeyError)
    assert result.errors["worker/0"].consequence  # type: ignore[attr-defined]
