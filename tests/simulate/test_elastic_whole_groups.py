"""Groups on grids of several rows, which average or mix their models, are lost and come back as a whole: runs in simulated time
that really train, in double precision. The auditor trains the same in one process with plain torch, by the ledger of which groups
an average was over, what was mixed with what, and with whose state a group began (`zmqtrain.simulate.groups_alone`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.run.faults import Fault, drain, kill, restart
from zmqtrain.simulate.groups_alone import GroupsAlone
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

STEPS, BATCH, EVERY = 7, 6, 2
_GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(4 * BATCH * STEPS, 12, dtype=torch.float64, generator=_GENERATOR)
Y = torch.randint(3, (len(X),), generator=_GENERATOR)


def network() -> nn.Module:
    """With buffers, which a forward changes, and parameters that all rows have whole."""
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def task(optimizer: Any = sgd, loss: Any = nn.functional.cross_entropy) -> Task:
    return Task(
        model=network,
        loss=loss,
        optimizer=optimizer,
        train_data=TensorDataset(X, Y),
        eval_data=TensorDataset(X[:20], Y[:20]),
        schedule=lambda own: torch.optim.lr_scheduler.StepLR(own, 2, 0.7),
    )


def topology(grid: str, groups: int, method: Mapping[str, Any], **sections: Any) -> Topology:
    """``method``: of averaging; or ``gossip``, and its settings."""
    averaging = {"kind": "averaging", "every": EVERY, "averaging": method}
    return on_grids(grid, groups, {"kind": "gossip", **method} if "gossip" in method else averaging, **sections)


def on_grids(grid: str, groups: int, exchange: Mapping[str, Any], /, *, servers: int = 0, **sections: Any) -> Topology:
    """Elastic groups on hosts of one worker each; ``servers`` have hosts of their own."""
    rows, columns = map(int, grid.split("x"))
    size = rows * columns
    served = [{"name": f"s[1-{servers}]", "slots": 1}] if servers else []
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": STEPS, "timeout": "5 s", "elastic": True},
        "hosts": [{"name": f"h[1-{groups * size}]", "slots": 1}, *served],
        "compute": {"groups": groups, "group_size": size, "grid": grid, "batch_size": BATCH, "bucket_size": 512},
        "exchange": dict(exchange),
        "parallel": {"verify": False},
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "data": {"shuffle": "none"},
        "simulation": {"payload": "real"},
    }
    for name, values in sections.items():
        document[name] = values if isinstance(values, list) else document.get(name, {}) | values
    return Topology.from_dict(document)


@dataclass
class Told:
    """What a run has told."""

    members: list[tuple[str, ...]] = field(default_factory=list)
    """Who trains, after each change."""
    joined: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Who has come: the first step, and whose state it began with."""
    lost: list[str] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    evaluations: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def report(self, peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "view" and (members := tuple(event["values"]["members"])) not in self.members[-1:]:
                self.members.append(members)
            elif event["kind"] == "finish":
                self.finished.add(peer)
            elif event["kind"] == "eval":
                self.evaluations.append(event["step"])

    def audit(self, peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "joined":
            self.joined[peer] = values["step"], values["source"]

    def happened(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "lost":
            self.lost.append(values["peer"])

    def hears(self) -> dict[str, Any]:
        """The options of a run that tells it."""
        return {"on_report": self.report, "on_audit": self.audit, "on_event": self.happened}


def run(given: Topology, *faults: Fault, trained: Task | None = None, folder: Path | None = None, **options: Any) -> Told:
    """A whole run, in which nothing may break, and whose model is what one process makes of it."""
    told = Told()
    options |= {"checkpoints": folder, "compare_model": True, **told.hears()}
    result = simulate(given, options=Options(faults=faults, task=trained or task(), **options))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    told.seconds = result.seconds
    return told


def workers(*groups: int, size: int = 2) -> list[str]:
    return [f"worker/{rank}" for group in groups for rank in range(group * size, (group + 1) * size)]


def rank_of(peer: str) -> int:
    return int(peer.removeprefix("worker/"))


#: Ordinary variations: the grid and the number of groups, the method, what is lost when, other settings, and which groups are there
#: in the end. A worker is lost for good (`kill`, without ``restarts``), or another process comes in its place.
BACK: dict[str, Any] = {"job": {"restarts": 1}}
TWICE = [kill("worker/3", step=1), kill("worker/2", at=0.06)]
#: A process ends once it has waited for messages to its lost host: as long as `flush`.
SOON = {"job": {"restarts": 1, "timeout": "250 ms", "steps": 16}}
ELASTIC, OUTER = {"method": "elastic"}, {"method": "outer", "outer_lr": 0.7, "outer_momentum": 0.9}
STREAMING = OUTER | {"overlap_steps": 1, "fragments": 2, "mix": 0.25}
GOSSIP: dict[str, Any] = {"gossip": {}}
BY_BATCH: dict[str, Any] = {"gossip": {"granularity": "batch"}}
EPOCH: dict[str, Any] = {"job": {"epochs": 1, "steps": None}}
BACK_IN_EPOCH: dict[str, Any] = {"job": {"epochs": 1, "steps": None, "restarts": 1}}
#: The second one when the others train what the first one has left, after the last step that there was before.
ONE_BY_ONE = [kill("worker/5", step=8), kill("worker/0", step=9)]
GRADIENTS, HYPERCUBE = {"gossip": {"exchange": "gradients"}}, {"gossip": {"topology": "hypercube"}}
VARIATIONS: dict[str, tuple[str, int, dict[str, Any], list[Fault], dict[str, Any], list[int]]] = {
    "the first row, for good": ("2x1", 3, {}, [kill("worker/2", step=2)], {}, [0, 2]),
    "the last row, and back": ("2x1", 3, {}, [kill("worker/3", step=2)], BACK, [0, 1, 2]),
    "the last row and column of 2x2": ("2x2", 2, {}, [kill("worker/7", step=3)], {}, [0]),
    "the first row and column of 2x2, and back": ("2x2", 2, {}, [kill("worker/4", step=2)], BACK, [0, 1]),
    "the middle row of 3x1, and back": ("3x1", 2, {}, [kill("worker/4", step=2)], BACK, [0, 1]),
    "rank 0, for good": ("2x1", 3, {}, [kill("worker/0", step=2)], {"job": {"eval_every": 2}}, [1, 2]),
    "rank 0, and back": ("2x1", 3, {}, [kill("worker/0", step=2)], {"job": {"eval_every": 2, "restarts": 1}}, [0, 1, 2]),
    "in the first step": ("2x1", 3, {}, [kill("worker/5", step=0)], {}, [0, 1]),
    "in the first step, and back": ("2x1", 3, {}, [kill("worker/5", step=0)], BACK, [0, 1, 2]),
    "in the last step": ("2x1", 3, {}, [kill("worker/2", step=STEPS - 1)], {}, [0, 2]),
    "two of one group": ("2x2", 2, {}, [kill("worker/4", step=2), kill("worker/7", step=2)], BACK, [0, 1]),
    "two of two groups": ("2x1", 3, {}, [kill("worker/0", step=2), kill("worker/5", step=2)], {}, [1]),
    "two of two groups, and back": ("2x1", 3, {}, [kill("worker/0", step=2), kill("worker/5", step=2)], BACK, [0, 1, 2]),
    "a whole group": ("2x1", 3, {}, [kill("worker/2", step=2), kill("worker/3", step=2)], BACK, [0, 1, 2]),
    "all groups but one, one after another": ("2x1", 3, {}, [kill("worker/0", step=1), kill("worker/3", step=4)], {}, [2]),
    "the same twice": ("2x1", 2, {}, TWICE, {"job": {"restarts": 2, "steps": 12}}, [0, 1]),
    "EASGD": ("2x1", 3, ELASTIC, [kill("worker/2", step=2)], {}, [0, 2]),
    "EASGD, and back": ("2x1", 3, ELASTIC, [kill("worker/2", step=2)], BACK, [0, 1, 2]),
    "DiLoCo, and back": ("2x2", 2, OUTER, [kill("worker/5", step=2)], BACK, [0, 1]),
    "streaming DiLoCo, and back": ("2x1", 3, STREAMING, [kill("worker/4", step=2)], BACK, [0, 1, 2]),
    "every step": ("2x1", 3, {}, [kill("worker/4", step=2)], BACK | {"exchange": {"every": 1}}, [0, 1, 2]),
    "an uneven batch": ("2x2", 2, {}, [kill("worker/6", step=2)], BACK | {"compute": {"batch_size": 5}}, [0, 1]),
    "shuffled samples": ("2x1", 3, {}, [kill("worker/1", step=2)], BACK | {"data": {"shuffle": "global"}}, [0, 1, 2]),
    "the sample ring": ("2x2", 2, {}, [kill("worker/1", step=2)], BACK | {"data": {"shuffle": "ring"}}, [0, 1]),
    "the ring of three, for good": ("2x1", 3, {}, [kill("worker/3", step=2)], {"data": {"shuffle": "ring"}}, [0, 2]),
    "epochs": ("2x1", 3, {}, [kill("worker/3", step=2)], {"job": {"epochs": 1, "steps": None, "restarts": 1}}, [0, 1, 2]),
    "epochs, in what was left": ("2x1", 3, {}, ONE_BY_ONE, EPOCH, [1]),
    "an epoch of EASGD": ("2x1", 3, ELASTIC, [kill("worker/3", step=2)], EPOCH, [0, 2]),
    "an epoch of streaming DiLoCo": ("2x1", 3, STREAMING, [kill("worker/3", step=5)], EPOCH | BACK_IN_EPOCH, [0, 1, 2]),
    "clipped gradients": ("2x1", 3, {}, [kill("worker/3", step=2)], BACK | {"optimizer": {"clip_norm": 0.3}}, [0, 1, 2]),
    "its host": ("2x1", 3, {}, [restart("h3", at=0.03, after=0.004)], SOON, [0, 1, 2]),
    "a host with two groups": ("2x1", 3, {}, [kill("h2", at=0.05)], {"hosts": [{"name": "h[1-2]", "slots": 3}]}, [0]),
    "a host that leaves": ("2x1", 3, {}, [drain("h3", at=0.055)], {}, [0, 2]),
    "gossip: the first row, for good": ("2x1", 3, GOSSIP, [kill("worker/2", step=2)], {}, [0, 2]),
    "gossip: the last row, and back": ("2x1", 3, GOSSIP, [kill("worker/3", step=2)], BACK, [0, 1, 2]),
    "gossip: of 2x2, and back": ("2x2", 2, GOSSIP, [kill("worker/6", step=2)], BACK, [0, 1]),
    "gossip: of 3x1, and back": ("3x1", 2, GOSSIP, [kill("worker/1", step=2)], BACK, [0, 1]),
    "gossip: rank 0": ("2x1", 3, GOSSIP, [kill("worker/0", step=2)], {"job": {"eval_every": 2, "restarts": 1}}, [0, 1, 2]),
    "gossip: in the first step": ("2x1", 3, GOSSIP, [kill("worker/5", step=0)], BACK, [0, 1, 2]),
    "gossip: in the last step": ("2x1", 3, GOSSIP, [kill("worker/2", step=STEPS - 1)], {}, [0, 2]),
    "gossip: two groups": ("2x1", 3, GOSSIP, [kill("worker/0", step=2), kill("worker/5", step=2)], BACK, [0, 1, 2]),
    "gossip: a whole group": ("2x1", 3, GOSSIP, [kill("worker/2", step=2), kill("worker/3", step=2)], BACK, [0, 1, 2]),
    "gossip: all but one": ("2x1", 3, GOSSIP, [kill("worker/0", step=1), kill("worker/3", step=4)], {}, [2]),
    "gossip: the ring": ("2x2", 2, GOSSIP, [kill("worker/1", step=2)], BACK | {"data": {"shuffle": "ring"}}, [0, 1]),
    "gossip: on a hypercube": ("2x1", 4, HYPERCUBE, [kill("worker/3", step=2)], BACK, [0, 1, 2, 3]),
    "gossip: of gradients": ("2x2", 2, GRADIENTS, [kill("worker/5", step=2)], BACK, [0, 1]),
    "gossip: an epoch": ("2x1", 3, GOSSIP, [kill("worker/3", step=2)], EPOCH, [0, 2]),
    "gossip: an epoch, and back": ("2x2", 2, GOSSIP, [kill("worker/5", step=4)], EPOCH | BACK_IN_EPOCH, [0, 1]),
    "gossip: in what was left": ("2x1", 3, GOSSIP, ONE_BY_ONE, EPOCH, [1]),
    "gossip: an epoch by batch": ("2x1", 3, BY_BATCH, [kill("worker/0", step=5)], EPOCH, [1, 2]),
    "gossip: an uneven batch": ("2x2", 2, GOSSIP, [kill("worker/4", step=2)], BACK | {"compute": {"batch_size": 5}}, [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(VARIATIONS))
def test_the_others_go_on_without_a_group_and_with_it(name: str) -> None:
    grid, groups, method, faults, settings, end = VARIATIONS[name]
    size = math.prod(map(int, grid.split("x")))
    told = run(topology(grid, groups, method, **settings), *faults)
    assert sorted(told.finished) == sorted(workers(*end, size=size)), (told.members, told.joined)
    for members in told.members:
        assert all(set(members) >= set(workers(group, size=size)) for group in {int(p[7:]) // size for p in members}), (
            "whole groups"
        )
    for peer, (step, source) in told.joined.items():
        rank, of = rank_of(peer), rank_of(source)
        assert rank % size == of % size, "each row begins with that row of another group"
        mates = workers(rank // size, size=size)
        assert {told.joined[mate][0] for mate in mates} == {step}
        assert {rank_of(told.joined[mate][1]) // size for mate in mates} == {of // size}


def test_what_adam_keeps_comes_with_the_state() -> None:
    plain = replace(task(adam), model=lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double())
    told = run(topology("2x2", 2, OUTER, **BACK), kill("worker/6", step=2), trained=plain)
    assert set(told.joined) == set(workers(1, size=4))


def test_a_group_sums_the_weights_of_its_loss_itself() -> None:
    """Which other elastic runs refuse, as they sum them over workers of which some may be lost."""
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    told = run(topology("2x2", 2, {}, **BACK), kill("worker/6", step=2), trained=task(loss=loss))
    assert set(told.joined) == set(workers(1, size=4))


BUSY: dict[str, Any] = {"job": {"restarts": 1, "eval_every": 2, "checkpoint_every": 2}}


@pytest.mark.parametrize("part", range(9))
def test_whenever_one_is_lost_also_in_evaluations_and_checkpoints(part: int, tmp_path: Path) -> None:
    given = topology("2x1", 2, ({}, STREAMING, GOSSIP)[part % 3], **BUSY)
    told = run(given, kill(f"worker/{part % 4}", at=0.03 + 0.005 * part), folder=tmp_path / "checkpoints")
    assert len(told.lost) == 2
    assert STEPS in told.evaluations


@pytest.mark.parametrize("at_ms", [49, 51, 53])
@pytest.mark.parametrize("method", [{}, GOSSIP], ids=["averaging", "gossip"])
def test_the_group_is_lost_with_whose_state_another_one_begins(method: Mapping[str, Any], at_ms: int) -> None:
    """That one counts as lost again, and begins with the state of the third."""
    given = topology("2x1", 3, method, job={"restarts": 3, "steps": 14})
    told = run(given, kill("worker/2", at=0.03), kill("worker/1", at=1e-3 * at_ms))
    assert {"worker/0", "worker/1", "worker/2", "worker/3"} <= set(told.lost)
    assert told.finished == set(workers(0, 1, 2))


@pytest.mark.parametrize("at_ms", [35, 40, 45])
def test_another_of_a_group_is_lost_while_it_comes_back(at_ms: int) -> None:
    told = run(
        topology("2x2", 2, {}, job={"restarts": 3, "steps": 14}), kill("worker/4", at=0.03), kill("worker/6", at=1e-3 * at_ms)
    )
    assert told.finished == set(workers(0, 1, size=4))


def test_others_end_while_a_group_waits_for_one_of_its_own() -> None:
    """Nobody comes in place of the one whose host is gone: its mate waits, and ends with the others."""
    told = run(topology("2x1", 2, {}, job={"restarts": 1}), kill("h4", at=0.03))
    assert told.finished == set(workers(0))
    assert set(told.lost) >= {"worker/2", "agent/h4"}


def test_no_group_is_whole_any_more() -> None:
    """Those that wait for others have nothing of the model, so the run ends at once, and tries to begin again."""
    faults = kill("h2", at=0.03), kill("h4", at=0.05)
    given = topology("2x1", 2, {}, job={"restarts": 1, "min_workers_wait": 0.01})
    result = simulate(given, options=Options(faults=faults, task=task(), compare_model=True))
    assert (result.ending.status, result.broken) == ("failed", [])
    assert result.ending.exit_code >= 128, "worth another try"
    assert result.attempts == 2


def test_a_launcher_dies_while_a_group_is_away() -> None:
    told = run(topology("2x1", 2, {}, job={"restarts": 1, "steps": 12}), kill("worker/3", at=0.03), launcher_deaths=[(0.032, 0.01)])
    assert told.finished == set(workers(0, 1))


@pytest.mark.parametrize(("method", "elastic"), [("average", True), ("elastic", False), ("outer", True)])
def test_a_checkpoint_that_lacks_a_group_is_gone_on_from(method: str, elastic: bool, tmp_path: Path) -> None:
    """The lost group begins with the state of the one before it, each row with that row."""
    job = {"checkpoint_every": 4}
    first = topology("2x1", 3, {"method": method}, job=job | {"steps": 4})
    alone = GroupsAlone(first, place(first), task(), None)
    taken = set[int]()

    def hear(peer: str, what: str, values: Mapping[str, Any]) -> None:
        alone.hear(peer, what, values)
        taken.update({values["slot"]} if what == "takes" else ())

    options = Options(faults=[kill("worker/2", step=1)], task=task(), checkpoints=tmp_path / "checkpoints", on_audit=hear)
    result = simulate(first, options=options)
    assert (result.ending.status, result.broken) == ("done", [])
    for rank in (2, 3):
        alone.hear(f"worker/{rank}", "joined", {"step": 4, "source": f"worker/{rank - 2}"})
    then = topology("2x1", 3, {"method": method}, job=job | {"elastic": True})
    if not elastic:  # fixed groups state nothing: these are over all, and go on with the batches after those that were trained
        then = topology("2x1", 3, {"method": method}, job=job | {"elastic": False})
        names = [name for name, _ in network().named_parameters()]
        alone.hear("worker/0", "counted", {"step": 5, "names": names, "members": workers(0, 1, 2)})
        assert taken == {*range(len(taken))}
        for step, group in product(range(4, STEPS), range(3)):
            slot = len(taken) + (step - 4) * 3 + group
            alone.hear(f"worker/{2 * group}", "takes", {"step": step, "slot": slot})
    options = Options(
        faults=(), task=task(), checkpoints=tmp_path / "checkpoints", resume=tmp_path / "checkpoints", on_audit=alone.hear
    )
    result = simulate(then, options=options)
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    assert alone.differs(STEPS, load_file(tmp_path / "model.safetensors")) is None


def test_a_checkpoint_of_gossip_that_lacks_a_group_is_gone_on_from(tmp_path: Path) -> None:
    """The lost group begins with the run's model, and what the group before it keeps."""
    first = topology("2x1", 3, GOSSIP, job={"checkpoint_every": 4, "steps": 4})
    run(first, kill("worker/2", step=1), folder=tmp_path / "checkpoints")
    then = topology("2x1", 3, GOSSIP, job={"checkpoint_every": 4})
    folder, began, taken = tmp_path / "checkpoints", dict[str, float](), dict[tuple[int, str], int]()

    def report(peer: str, events: list[dict[str, Any]]) -> None:
        began.update((peer, event["values"]["loss"]) for event in events if (event["kind"], event["step"]) == ("step", 4))

    def hear(peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "takes":
            taken[values["step"], peer] = values["slot"]

    options = Options(faults=(), task=task(), checkpoints=folder, resume=folder, on_report=report, on_audit=hear)
    result = simulate(then, options=options)
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    model = network()
    model.load_state_dict(load_file(folder / "step-00000004" / "model.safetensors"))
    slot = taken[4, "worker/2"]
    assert slot == taken[4, "worker/3"]
    rows = slice(slot * BATCH, (slot + 1) * BATCH)
    loss = nn.functional.cross_entropy(model(X[rows]), Y[rows]).item()
    assert (began["worker/2"], began["worker/3"]) == (pytest.approx(loss, rel=1e-9), pytest.approx(loss, rel=1e-9))


@pytest.mark.parametrize(("grid", "groups"), [("2x1", 2), ("1x2", 3)])
def test_it_is_gone_on_from_by_other_groups_and_grids(grid: str, groups: int, tmp_path: Path) -> None:
    first = topology("2x1", 3, {}, job={"checkpoint_every": 4, "steps": 4})
    run(first, kill("worker/2", step=1), folder=tmp_path / "checkpoints")
    then = topology(grid, groups, {}, job={"checkpoint_every": 4, "elastic": False}, compute={"batch_size": 18 // groups})
    folder = tmp_path / "checkpoints"
    result = simulate(then, options=Options(faults=(), task=task(), checkpoints=folder, resume=folder))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error


def test_few_are_enough_only_if_they_train() -> None:
    """``min_workers``: one that waits for others of its group does not."""
    given = topology(
        "2x1", 3, {}, job={"restarts": 1, "steps": 60, "min_workers": 5, "min_workers_wait": 0.05, "checkpoint_every": 60}
    )
    result = simulate(given, options=Options(faults=[kill("h4", at=0.03)], task=task()))
    assert result.ending.status == "preempted"
