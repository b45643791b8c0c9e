"""Merged FC servers go on without workers that are lost, and with those that come back: whole runs in simulated time. The auditor
counts every batch in the merged layers as in any piece of the model (`zmqtrain.simulate.slot_audit`). With torch, synchronous
training is compared with one process, in double precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.simulate import merged_model
from tests.simulate.merged_model import STEPS_OF_TORCH, Recipe, close, require
from tests.simulate.worlds import POLICIES, STEPS, merged_topology, run
from zmqtrain.run.faults import Fault, drain, kill, pause, restart
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints


@pytest.mark.parametrize("staleness", POLICIES)
def test_the_others_train_what_a_lost_worker_has_left(staleness: str) -> None:
    """The auditor requires all batches of the epoch."""
    steps, views, seconds = run(merged_topology(staleness, epochs=True), kill("worker/1", step=4))
    assert views == [("worker/0", "worker/2")]
    assert len(steps["worker/0"]) > 10
    assert seconds < 1  # nobody waits for a time-out


@pytest.mark.parametrize("staleness", POLICIES)
def test_a_group_goes_on_with_fewer(staleness: str) -> None:
    shape = merged_topology(staleness, groups=2, size=3, epochs=True, fc_servers=2)
    steps, views, seconds = run(shape, kill("worker/1", step=3), kill("worker/3", step=6))
    assert len(views[-1]) == 4
    assert steps["worker/0"][-1] > 8
    assert seconds < 1


@pytest.mark.parametrize(("staleness", "size"), list(zip(POLICIES, (1, 2, 1, 2), strict=True)))
def test_those_that_come_back_take_part_again(staleness: str, size: int) -> None:
    shape = merged_topology(staleness, groups=2, size=size, epochs=True, job="restarts = 1")
    steps, views, _ = run(shape, kill("worker/0", step=2), kill(f"worker/{size}", at=0.04))
    assert len(views[-1]) == 2 * size
    assert steps["worker/0"][-1] > 8


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_at_the_beginning_at_the_end_and_all_at_once(staleness: str) -> None:
    run(merged_topology(staleness), kill("worker/2", step=0))
    run(merged_topology(staleness), kill("worker/1", step=STEPS - 1))
    all_of_them = (kill(f"worker/{rank}", at=0.04) for rank in range(3))
    run(merged_topology(staleness, epochs=True, job="restarts = 1"), *all_of_them)


@pytest.mark.parametrize("staleness", POLICIES)
def test_a_model_server_leaves_meanwhile(staleness: str) -> None:
    """Its shard moves to the other one. The FC server is told of losses as before."""
    shape = merged_topology(staleness, epochs=True, job="restarts = 1")
    steps, views, _ = run(shape, drain("s2", at=0.03), kill("worker/1", at=0.032))
    assert len(views[-1]) == 3
    assert steps["worker/0"][-1] > 8


def test_a_lost_fc_server_ends_the_run_and_is_named() -> None:
    result = simulate(merged_topology('"async"'), options=Options(faults=[kill("fc/0", at=0.02)]))
    assert result.ending.status == "failed"
    assert "fc/0" in str((result.ending.error or {}).get("message"))


def faults_of(draw: random.Random, workers: int) -> list[Fault]:
    faults = []
    for _ in range(draw.randint(1, 4)):
        peer, at, after = f"worker/{draw.randrange(workers)}", draw.uniform(0.001, 0.12), draw.choice((0.002, 0.03))
        faults.append(draw.choice((kill(peer, at=at), restart(peer, at=at, after=after), pause(peer, 0.01, at=at))))
    return faults


@pytest.mark.parametrize("seed", range(8))
def test_random_losses_break_nothing(seed: int) -> None:
    size, draw = 1 + seed % 2, random.Random(seed)
    shape = merged_topology(POLICIES[seed // 2], groups=3, size=size, epochs=True, job="restarts = 2\neval_every = 3")
    run(shape, *faults_of(draw, 3 * size))


def test_random_faults_break_nothing() -> None:
    shape = merged_topology('"sync"', groups=2, size=2, job="restarts = 1")
    assert [each.broken for each in explore(shape, range(2), faults="random") if each.broken] == []


# With torch.

trained = partial(merged_model.trained, hosts=8, size=2, exchange={}, elastic=True)


@pytest.mark.parametrize(
    ("faults", "restarts"),
    [
        ([kill("worker/1", step=0)], 1),
        ([kill("worker/0", step=2)], 0),
        ([kill("worker/0", step=2)], 1),
        ([kill("worker/3", step=STEPS_OF_TORCH - 1)], 0),
        ([kill("worker/1", step=2), kill("worker/2", step=2)], 1),
        ([kill("worker/1", step=2), kill("worker/2", step=3)], 0),
    ],
    ids=["beginning-1", "middle-0", "middle-1", "last step-0", "one of each group-1", "one after the other-0"],
)
def test_a_lost_worker_changes_nothing(faults: Sequence[Fault], restarts: int) -> None:
    recipe = Recipe()
    trained(recipe, *faults, restarts=restarts)
    require(recipe, recipe.alone(), 4 if restarts else 4 - len(faults))


@pytest.mark.parametrize("norm", [False, True])
def test_at_any_moment_also_during_evaluations_and_checkpoints(norm: bool, tmp_path: Path) -> None:
    """Batch norm in the merged layers has seen each batch once. (With several groups it depends on who comes first.)"""
    recipe, job = Recipe(norm=norm), {"checkpoint_every": 2, "eval_every": 2, "restarts": 1, "groups": 1 if norm else 2}
    seconds = trained(recipe, folder=tmp_path / "0", **job).seconds
    expected = recipe.alone()
    for part in (2, 7) if norm else (5, 10):
        trained(recipe, kill("worker/1", at=seconds * part / 12), folder=tmp_path / str(part), **job)
        require(recipe, expected, 2 if norm else 4)
        model = Checkpoint(find_checkpoints(tmp_path / str(part))[-1]).part("model")[0]
        for name, its in expected.state_dict().items():
            kept = model[name].tensor.view(its.shape)
            assert close(kept, its), (part, name)
