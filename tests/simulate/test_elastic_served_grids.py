"""Groups on grids of several rows, whose parameters model servers have, are lost and come back as a whole: runs in simulated time
that really train, in double precision. The auditor counts every batch (`zmqtrain.simulate.slot_audit`), and computes the model in
one process with plain torch, by the ledger of what was trained with which versions (`zmqtrain.simulate.servers_alone`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.simulate.test_elastic_whole_groups import BATCH, STEPS, X, Y, adam, network, on_grids, sgd, task, workers
from tests.simulate.test_elastic_whole_groups import Told as Heard
from zmqtrain import Task
from zmqtrain.run.faults import Fault, drain, kill, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology


def plain(optimizer: Any = sgd) -> Task:
    """Without buffers, which servers do not keep."""
    return replace(task(optimizer), model=lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double())


def topology(grid: str, groups: int, staleness: Any = "async", *, shards: int = 2, **sections: Any) -> Topology:
    exchange = {"kind": "model_server", "staleness": staleness, "shards": shards}
    optimizer = {"momentum": "task", "look_ahead": "none"} | sections.pop("optimizer", {})
    return on_grids(grid, groups, exchange, servers=shards, optimizer=optimizer, **sections)


@dataclass
class Told(Heard):
    """What a run has told."""

    per_group: int = 1
    """The number of workers."""
    slots: list[int] = field(default_factory=list)
    """The batches that were taken, by the first worker of each group."""

    def audit(self, peer: str, what: str, values: Mapping[str, Any]) -> None:
        super().audit(peer, what, values)
        if what == "takes" and not int(peer.removeprefix("worker/")) % self.per_group:
            self.slots.append(values["slot"])


def tried(given: Topology, *faults: Fault, trained: Task | None = None, **options: Any) -> tuple[Result, Told]:
    told = Told(per_group=given.compute.group_size)
    options |= {"compare_model": True, **told.hears()}
    return simulate(given, options=Options(faults=faults, task=trained or task(), **options)), told


def run(given: Topology, *faults: Fault, trained: Task | None = None, **options: Any) -> Told:
    """A whole run, in which nothing may break, and whose model is what one process makes of it."""
    result, told = tried(given, *faults, trained=trained, **options)
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    return told


#: Ordinary variations: the grid, the number of groups and the staleness; what is lost when; other settings; and which groups are
#: there in the end. A worker is lost for good (`kill`, without ``restarts``), or another process comes in its place.
BACK: dict[str, Any] = {"job": {"restarts": 1}}
TWICE = [kill("worker/3", step=1), kill("worker/2", at=0.06)]
ASYNC, SYNC, NONE, SOME = "async", "sync", {"bound": 0}, {"bound": 2}
EPOCH: dict[str, Any] = {"job": {"epochs": 1, "steps": None, "restarts": 1}}
#: A process ends once it has waited for messages to its lost host: as long as `flush`.
SOON = {"job": {"restarts": 1, "timeout": "250 ms", "steps": 16}}
TWO_EACH = [{"name": "h[1-4]", "slots": 2}]
VARIATIONS: dict[str, tuple[str, int, Any, list[Fault], dict[str, Any], list[int]]] = {
    "the first row, for good": ("2x1", 3, ASYNC, [kill("worker/2", step=2)], {}, [0, 2]),
    "the last row, and back": ("2x1", 3, ASYNC, [kill("worker/3", step=2)], BACK, [0, 1, 2]),
    "the last row and column of 2x2": ("2x2", 2, ASYNC, [kill("worker/7", step=3)], {}, [0]),
    "the first row and column of 2x2, and back": ("2x2", 2, ASYNC, [kill("worker/4", step=2)], BACK, [0, 1]),
    "the middle row of 3x1, and back": ("3x1", 2, ASYNC, [kill("worker/4", step=2)], BACK, [0, 1]),
    "rank 0, for good": ("2x1", 3, ASYNC, [kill("worker/0", step=2)], {"job": {"eval_every": 2}}, [1, 2]),
    "rank 0, and back": ("2x1", 3, ASYNC, [kill("worker/0", step=2)], {"job": {"eval_every": 2, "restarts": 1}}, [0, 1, 2]),
    "in the first step, and back": ("2x1", 3, ASYNC, [kill("worker/5", step=0)], BACK, [0, 1, 2]),
    "in the last step": ("2x1", 3, ASYNC, [kill("worker/2", step=STEPS - 1)], {}, [0, 2]),
    "two of one group": ("2x2", 2, ASYNC, [kill("worker/4", step=2), kill("worker/7", step=2)], BACK, [0, 1]),
    "two of two groups, and back": ("2x1", 3, ASYNC, [kill("worker/0", step=2), kill("worker/5", step=2)], BACK, [0, 1, 2]),
    "all groups but one, one after another": ("2x1", 3, ASYNC, [kill("worker/0", step=1), kill("worker/3", step=4)], {}, [2]),
    "the same twice": ("2x1", 2, ASYNC, TWICE, {"job": {"restarts": 2, "steps": 12}}, [0, 1]),
    "a bound of 0, and back": ("2x2", 2, NONE, [kill("worker/6", step=2)], BACK, [0, 1]),
    "a bound of 2": ("2x1", 3, SOME, [kill("worker/3", step=3)], BACK, [0, 1, 2]),
    "synchronous, and back": ("2x1", 3, SYNC, [kill("worker/3", step=2)], BACK, [0, 1, 2]),
    "synchronous, 2x2, rank 0": ("2x2", 2, SYNC, [kill("worker/0", step=2)], {"job": {"eval_every": 2, "restarts": 1}}, [0, 1]),
    "one shard": ("2x1", 3, ASYNC, [kill("worker/3", step=2)], BACK | {"shards": 1}, [0, 1, 2]),
    "three shards": ("2x2", 2, SOME, [kill("worker/5", step=2)], BACK | {"shards": 3}, [0, 1]),
    "an uneven batch": ("2x2", 2, ASYNC, [kill("worker/6", step=2)], BACK | {"compute": {"batch_size": 5}}, [0, 1]),
    "shuffled samples": ("2x1", 3, ASYNC, [kill("worker/1", step=2)], BACK | {"data": {"shuffle": "global"}}, [0, 1, 2]),
    "epochs": ("2x1", 3, ASYNC, [kill("worker/3", step=2)], EPOCH, [0, 1, 2]),
    "epochs, with a bound": ("2x2", 2, SOME, [kill("worker/3", step=2)], EPOCH, [0, 1]),
    "clipped gradients": ("2x1", 3, ASYNC, [kill("worker/3", step=2)], BACK | {"optimizer": {"clip_norm": 0.3}}, [0, 1, 2]),
    "its host": ("2x1", 3, ASYNC, [restart("h3", at=0.03, after=0.004)], SOON, [0, 1, 2]),
    "the host of a group": ("2x1", 3, ASYNC, [kill("h2", at=0.05)], {"hosts": TWO_EACH}, [0, 2]),
    "a host that leaves": ("2x1", 3, ASYNC, [drain("h3", at=0.055)], {}, [0, 2]),
    "adapted momentum": ("2x1", 3, ASYNC, [kill("worker/3", step=2)], EPOCH | {"optimizer": {"momentum": "auto"}}, [0, 1, 2]),
    "look-ahead": ("2x2", 2, ASYNC, [kill("worker/4", step=2)], EPOCH | {"optimizer": {"look_ahead": "auto"}}, [0, 1]),
    "without overlap": ("2x1", 3, ASYNC, [kill("worker/4", step=2)], BACK | {"compute": {"overlap": False}}, [0, 1, 2]),
    "micro-batches": ("2x1", 3, ASYNC, [kill("worker/4", step=2)], EPOCH | {"compute": {"accumulate": 2}}, [0, 1, 2]),
    "statistics of workers": ("2x2", 2, ASYNC, [kill("worker/4", step=2)], EPOCH | {"parallel": {"statistics": "local"}}, [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(VARIATIONS))
def test_the_others_go_on_without_a_group_and_with_it(name: str) -> None:
    grid, groups, staleness, faults, settings, end = VARIATIONS[name]
    size = math.prod(map(int, grid.split("x")))
    told = run(topology(grid, groups, staleness, **settings), *faults)
    assert sorted(told.finished) == sorted(workers(*end, size=size)), told.members
    for members in told.members:
        assert all(set(members) >= set(workers(group, size=size)) for group in {int(p[7:]) // size for p in members}), (
            "whole groups"
        )


def test_what_a_lost_group_has_left_is_trained_once() -> None:
    """All batches of the epoch. Of those that the lost group had begun, others train what does not count yet."""
    given = topology("2x1", 3, job={"epochs": 1, "steps": None})
    told = run(given, kill("worker/3", step=2))
    due = len(X) // BATCH // 3 * 3
    assert set(told.slots) == set(range(due))
    assert due < len(told.slots) <= due + 2


@pytest.mark.parametrize("part", range(9))
def test_whenever_one_is_lost_also_in_evaluations_and_checkpoints(part: int, tmp_path: Path) -> None:
    """Also between the pushes of the two rows. All batches of the epoch count once."""
    given = topology(
        "2x1",
        2,
        (ASYNC, SOME, SYNC)[part % 3],
        job={"epochs": 1, "steps": None, "restarts": 1, "eval_every": 2, "checkpoint_every": 2},
    )
    told = run(given, kill(f"worker/{part % 4}", at=0.03 + 0.0053 * part), checkpoints=tmp_path / "checkpoints")
    assert len(told.lost) == 2
    assert told.finished == set(workers(0, 1))


def test_adam_is_the_servers() -> None:
    told = run(topology("2x2", 2, **BACK), kill("worker/6", step=2), trained=plain(adam))
    assert told.finished == set(workers(0, 1, size=4))


def test_a_group_sums_the_weights_of_its_loss_itself() -> None:
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    told = run(topology("2x2", 2, **BACK), kill("worker/6", step=2), trained=task(loss=loss))
    assert told.finished == set(workers(0, 1, size=4))


def test_groups_in_step_cannot_sum_the_weights_of_a_loss_if_some_may_be_lost() -> None:
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    result, _ = tried(topology("2x1", 2, SYNC), trained=task(loss=loss))
    assert "none may be lost" in str((result.ending.error or {}).get("message"))


@pytest.mark.parametrize("groups", [1, 2])
def test_all_groups_are_lost_and_go_on_with_what_servers_have(groups: int) -> None:
    faults = [kill(f"worker/{2 * group}", at=0.04) for group in range(groups)]
    told = run(topology("2x1", groups, job={"epochs": 1, "steps": None, "restarts": 1}), *faults, trained=plain())
    assert told.finished == set(workers(*range(groups)))
    assert len(told.lost) == 2 * groups


def test_what_servers_do_not_keep_is_gone_with_the_last_group() -> None:
    result, _ = tried(topology("2x1", 2, job={"restarts": 1}), kill("worker/0", at=0.04), kill("worker/3", at=0.04))
    assert result.broken == []
    assert result.attempts == 2


def test_no_group_can_be_whole_again() -> None:
    """Of each group one worker is gone for good. The others wait for it in vain, so the run begins again, before any time-out."""
    faults = kill("h2", at=0.03), kill("h3", at=0.05), kill("worker/0", at=0.06), kill("worker/3", at=0.07)
    result, _ = tried(topology("2x1", 2, job={"restarts": 1, "steps": 60}), *faults, trained=plain())
    assert (result.ending.status, result.broken) == ("done", [])
    assert result.attempts > 1
    assert result.seconds < 30


def test_buffers_come_from_the_same_row_of_another_group_and_whole_ones_are_alike(tmp_path: Path) -> None:
    """Batch norm's channels are divided among rows, and its count of batches is on all of them. The first group, which is asked for
    them, is then lost: the model that is left has those of the one that has come."""
    given = topology("2x1", 2, job={"restarts": 1, "steps": 16})
    run(given, kill("worker/2", at=0.03), kill("h1", at=0.08), checkpoints=tmp_path / "checkpoints")
    from safetensors.torch import load_file

    left = load_file(tmp_path / "model.safetensors")
    assert 3 < int(left["1.num_batches_tracked"]) <= 16
    fresh = network().state_dict()
    assert not torch.any(left["1.running_mean"] == fresh["1.running_mean"])


@pytest.mark.parametrize(("grid", "groups", "staleness"), [("2x1", 3, ASYNC), ("2x1", 2, SOME), ("1x2", 3, ASYNC)])
def test_a_checkpoint_that_lacks_a_group_is_gone_on_from(grid: str, groups: int, staleness: Any, tmp_path: Path) -> None:
    """By as many groups, others, and other grids of as many workers."""
    folder = tmp_path / "checkpoints"
    first = topology("2x1", 3, staleness, job={"checkpoint_every": 4, "steps": 4})
    run(first, kill("worker/2", step=1), checkpoints=folder)
    then = topology(grid, groups, staleness, job={"checkpoint_every": 4}, compute={"batch_size": 18 // groups})
    faults = [kill("worker/1", step=5)] if groups > 1 and grid == "2x1" else []
    told = run(then, *faults, checkpoints=folder, resume=folder)
    assert len(told.finished) == then.compute.workers - 2 * len(faults)


SEEN: dict[int, list[int]] = {}  # of each process's model, the batches that it has counted before each forward


class Counting(nn.Module):
    """Has a buffer that all rows have whole."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            SEEN.setdefault(id(self), []).append(int(self.count))
            self.count += 1
        found: torch.Tensor = self.layers(inputs)
        return found


def test_rows_that_come_agree_on_what_all_of_them_have_whole() -> None:
    """Whatever each has got from its own row of another group, of which one may be a step ahead."""
    SEEN.clear()
    given = topology("2x1", 2, job={"restarts": 1, "steps": 12})
    run(given, kill("worker/3", at=0.0352), trained=replace(task(), model=Counting))
    late = [counts for counts in SEEN.values() if counts[0]]
    assert len(late) == 2
    assert late[0] == late[1]


def test_a_launcher_dies_while_a_group_is_away() -> None:
    told = run(topology("2x1", 2, job={"restarts": 1, "steps": 12}), kill("worker/3", at=0.03), launcher_deaths=[(0.032, 0.01)])
    assert told.finished == set(workers(0, 1))


def test_few_are_enough_only_if_they_train(tmp_path: Path) -> None:
    """``min_workers``: one that waits for others of its group does not."""
    job = {"restarts": 1, "steps": 60, "min_workers": 5, "min_workers_wait": 0.05, "checkpoint_every": 60}
    result, _ = tried(topology("2x1", 3, SYNC, job=job), kill("h4", at=0.03), checkpoints=tmp_path / "checkpoints")
    assert result.ending.status == "preempted"


def test_a_server_is_not_replaced() -> None:
    """Its shard is nowhere else: copies need groups of one worker."""
    result, _ = tried(topology("2x1", 2), kill("s1", at=0.04))
    assert (result.ending.status, result.broken) == ("failed", [])


def test_the_group_that_evaluates_is_lost_and_another_one_does_from_then_on() -> None:
    given = topology("2x2", 2, job={"eval_every": 2, "steps": 12})
    told = run(given, kill("worker/3", step=5), trained=replace(task(), eval_data=TensorDataset(X[:20], Y[:20])))
    assert told.evaluations[-2:] == [10, 12]
