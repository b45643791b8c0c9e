"""Checkpoints of runs that lose workers: complete with those who are left, and gone on from by as many as there were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.simulate.test_training import Recipe, topology_of
from zmqtrain.run.faults import Fault, kill, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.train.checkpoint.folder import Checkpoint, RunShape, find_checkpoints

STEPS = 25
GOSSIP = {"kind": "gossip", "staleness": "async"}


class Kept:
    """A simulated gossip run of four, and what it tells."""

    def __init__(
        self,
        folder: Path,
        faults: Sequence[Fault] = (),
        resume: Path | None = None,
        exchange: Mapping[str, Any] = GOSSIP,
        **job: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder / "checkpoints"
        self.recipe = Recipe()
        self.told: list[tuple[str, int]] = []
        self.steps: dict[str, list[int]] = {}
        topology = topology_of(folder, 4, 1, job={"steps": STEPS, "checkpoint_every": 5, **job}, exchange=dict(exchange))
        options = Options(
            faults=faults,
            task=self.recipe.task(),
            checkpoints=self.folder,
            resume=resume,
            on_report=self._report,
            on_checkpoint=lambda kind, values: self.told.append((kind, values["step"])),
        )
        self.result: Result = simulate(topology, options=options)
        assert self.result.broken == []

    def _report(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step":
                self.steps.setdefault(peer, []).append(event["step"])

    @property
    def newest(self) -> Checkpoint:
        return Checkpoint(find_checkpoints(self.folder)[-1])


def model_of(checkpoint: Checkpoint) -> torch.Tensor:
    return torch.cat([payload.tensor.reshape(-1) for payload in checkpoint.part("model")[0].values()])


@pytest.mark.parametrize("lost", [0, 3])
def test_checkpoints_go_on_without_a_worker_that_is_lost(lost: int, tmp_path: Path) -> None:
    run = Kept(tmp_path / "run", [kill(f"worker/{lost}", step=13)])
    assert run.result.ending.status == "done"
    complete = [step for kind, step in run.told if kind == "checkpoint complete"]
    assert set(complete) >= {5, 10, 20, 25}
    checkpoint = run.newest
    assert checkpoint.step == STEPS
    assert {rank for rank in range(4) if checkpoint.stands_in(f"worker-{rank}") is None} == {0, 1, 2, 3} - {lost}
    assert checkpoint.stands_in(f"group-{lost}") == (lost - 1) % 4
    # All four go on: the lost one with the run's model and its neighbour's momentum.
    again = Kept(tmp_path / "again", resume=checkpoint.folder, steps=STEPS + 10)
    assert again.result.ending.status == "done"
    assert all(again.steps[f"worker/{rank}"] == list(range(STEPS, STEPS + 10)) for rank in range(4))
    assert {rank for rank in range(4) if again.newest.stands_in(f"worker-{rank}") is None} == {0, 1, 2, 3}


def test_one_that_comes_back_is_in_checkpoints_again(tmp_path: Path) -> None:
    run = Kept(tmp_path / "run", [restart("worker/2", step=6, after=0.05)])
    assert run.result.ending.status == "done"
    assert run.newest.step == STEPS
    assert run.newest.stands_in("worker-2") is None
    run = Kept(tmp_path / "agent", [kill("worker/2", step=6)], restarts=1)
    assert run.newest.stands_in("worker-2") is None


def test_the_lost_one_begins_with_the_run_s_model(tmp_path: Path) -> None:
    run = Kept(tmp_path / "run", [kill("worker/3", step=13)])
    again = Kept(tmp_path / "again", resume=run.newest.folder, steps=STEPS + 1, checkpoint_every=1)
    assert again.result.ending.status == "done"
    part, _ = again.newest.part("group-3")
    momentum = [payload.tensor for name, payload in part.items() if name.startswith("optimizer/momentum_buffer/")]
    assert len(momentum) == sum(1 for _ in nn.ParameterList(again.recipe.models[0].parameters()))
    assert all(tensor.abs().sum() > 0 for tensor in momentum)


@pytest.mark.parametrize("at", [0.2, 0.217])
def test_a_loss_at_any_moment_leaves_whole_checkpoints(at: float, tmp_path: Path) -> None:
    run = Kept(tmp_path / "run", [kill("worker/2", at=at), kill("worker/0", at=at + 0.2)], checkpoint_every=1)
    assert run.result.ending.status == "done"
    for folder in find_checkpoints(run.folder):
        Checkpoint(folder).require(RunShape("gossip", 4, 1, 0))
    assert run.newest.step == STEPS
    assert not list(run.folder.glob(".*"))


def test_a_run_goes_on_without_checkpoints_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file, in which there can be no folder")
    run = Kept(tmp_path / "run")
    assert run.result.ending.status == "done"
    assert {kind for kind, _ in run.told} == {"checkpoint failed"}
    assert {step for _, step in run.told} == set(range(5, STEPS + 1, 5))


@pytest.mark.parametrize(("staleness", "lost"), [("async", 0), ("sync", 3)])
def test_with_servers_a_resumed_run_trains_what_was_left(staleness: str, lost: int, tmp_path: Path) -> None:
    servers = {"kind": "model_server", "staleness": staleness, "shards": 2}
    run = Kept(tmp_path / "run", [kill(f"worker/{lost}", step=13)], exchange=servers)
    assert run.result.ending.status == "done"
    assert {step for kind, step in run.told if kind == "checkpoint complete"} >= {5, 10, 20, 25}
    checkpoint = run.newest
    data = [checkpoint.part(f"worker-{rank}")[1]["data"] for rank in range(4) if rank != lost]
    assert data[0] == data[1] == data[2]
    assert data[0]["first"] < 4 * STEPS  # three workers have trained fewer batches
    again = Kept(tmp_path / "again", resume=checkpoint.folder, steps=STEPS + 10, exchange=servers)
    assert again.result.ending.status == "done", again.result.ending.error
    assert all(again.steps[f"worker/{rank}"] == list(range(STEPS, STEPS + 10)) for rank in range(4))
    assert again.newest.part("worker-0")[1]["data"]["first"] == data[0]["first"] + 4 * 10 - len(data[0]["left"])


def test_servers_that_begin_with_kept_optimizers_go_on_counting(tmp_path: Path) -> None:
    servers = {"kind": "model_server", "staleness": "sync"}
    run = Kept(tmp_path / "run", exchange=servers)
    job = {"weights": str(run.folder), "optimizer_state": "kept"}
    again = Kept(tmp_path / "again", exchange=servers, **job)
    assert (again.result.ending.status, again.result.broken) == ("done", [])


def test_a_run_that_has_already_done_more_steps_lacks_none(tmp_path: Path) -> None:
    run = Kept(tmp_path / "run")
    again = Kept(tmp_path / "again", resume=run.newest.folder, steps=STEPS - 5)
    assert (again.result.ending.status, again.result.broken, again.steps) == ("done", [], {})
