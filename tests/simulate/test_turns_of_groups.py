"""Groups of several workers that gossip or average their models train what lost ones have left, too: what is left of a group goes
on as the same group, and each batch of an epoch counts once. The auditor says so of modelled runs (`zmqtrain.simulate.replay`),
and of groups on grids, which really train (`zmqtrain.simulate.groups_alone`); of others with torch it is a replay here, in double
precision."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.simulate.test_turns import EVERYTHING, EXCHANGES, STEPS, equal, modelled, run
from zmqtrain import Task
from zmqtrain.run.faults import Fault, drain, kill, partition, restart, slow
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints
from zmqtrain.train.random_state import seed_everything


def of_two(kind: str, *, groups: int = 4, size: int = 2, **sections: Any) -> Topology:
    """As `modelled`, with groups of several workers."""
    document = modelled(kind, groups=groups).model_dump(mode="json", exclude_unset=True)
    document["hosts"] = [{"name": f"h[1-{groups * size}]", "slots": 1}]
    document["compute"] |= {"group_size": size}
    for name, values in sections.items():
        document[name] = values if isinstance(values, list) else document.get(name, {}) | values
    return Topology.from_dict(document)


def group(*numbers: int, size: int = 2) -> list[str]:
    return [f"worker/{rank}" for number in numbers for rank in range(number * size, (number + 1) * size)]


def lost(number: int, step: int) -> list[Fault]:
    """All of a group, at once."""
    return [kill(peer, step=step) for peer in group(number)]


#: Name -> the exchange, what is lost, and other settings. ``BACK``: lost workers are started again.
BACK: dict[str, Any] = {"job": {"restarts": 3}}
BY_BATCH, EACH, FEW = "gossip by batch", "averaging each step", {"groups": 2}
HYPERCUBE: dict[str, Any] = {"exchange": {"kind": "gossip", "gossip": {"topology": "hypercube"}}}
UNBALANCED: dict[str, Any] = {"exchange": {"kind": "gossip", "gossip": {"topology": "random", "balanced": False}}}
REST = ["h4", "h5", "h6", "h7", "h8"]
ONE_HOST: dict[str, Any] = {"hosts": [{"name": "h[1-2]", "slots": 4}]}
VARIATIONS: dict[str, tuple[str, list[Fault], dict[str, Any]]] = {
    "nobody": ("gossip", [], {}),
    "one of a group": ("gossip", [kill("worker/2", step=6)], {}),
    "one of a group, and back": ("gossip", [kill("worker/2", step=6)], BACK),
    "a whole group": ("gossip", lost(1, 6), {}),
    "a whole group, and back": ("gossip", lost(1, 6), BACK),
    "one after another": ("gossip", [kill("worker/3", step=3), kill("worker/2", step=9)], {}),
    "one, which is back when the other is lost": ("gossip", [kill("worker/3", step=3), kill("worker/2", step=9)], BACK),
    "the first group, at once": ("gossip", lost(0, 0), {}),
    "the first group, in the first step": (EACH, lost(0, 0), BACK),
    "one in the last step": ("gossip", [kill("worker/7", step=STEPS - 1)], {}),
    "all of one in the last step": ("gossip", lost(3, STEPS - 1), {}),
    "in the last step, and back": (EACH, lost(3, STEPS - 1), BACK),
    "in what was left": ("gossip", [*lost(1, STEPS - 1), *lost(2, STEPS)], {}),
    "one in what was left": (EACH, [*lost(1, STEPS - 1), kill("worker/4", step=STEPS)], {}),
    "all but one group": ("gossip", [*lost(0, 4), *lost(2, 6), *lost(3, 8)], {}),
    "all but one worker": (EACH, [*lost(0, 4), *lost(2, 6), *lost(3, 8), kill("worker/3", step=9)], {}),
    "half of each": ("gossip", [kill(f"worker/{rank}", step=2 + rank) for rank in (0, 2, 4, 6)], {}),
    "groups of three": ("gossip", [kill("worker/4", step=3), kill("worker/5", step=5)], {"size": 3, **FEW}),
    "two groups": ("averaging", lost(1, 6), FEW | BACK),
    "five groups": ("gossip", [*lost(1, 3), kill("worker/9", step=5)], {"groups": 5}),
    "by batch": (BY_BATCH, lost(2, 7), {}),
    "by batch, and back": (BY_BATCH, [*lost(2, 7), kill("worker/0", step=7)], BACK),
    "a hypercube": ("gossip", lost(2, 7), HYPERCUBE),
    "unbalanced": ("gossip", [*lost(2, 7), kill("worker/0", step=7)], UNBALANCED),
    "averaging": ("averaging", [*lost(1, 6), kill("worker/6", step=6)], {}),
    "averaging, and back": ("averaging", [*lost(1, 6), kill("worker/6", step=6)], BACK),
    "EASGD": ("elastic averaging", [*lost(1, 6), kill("worker/6", step=6)], BACK),
    "DiLoCo": ("DiLoCo", [*lost(1, 6), kill("worker/6", step=6)], BACK),
    "fragments": ("fragments", [*lost(1, 6), kill("worker/6", step=6)], BACK),
    "workers of a host share memory": ("gossip", [kill("worker/2", step=6)], ONE_HOST | BACK),
    "a host with two groups": ("gossip", [kill("h2", at=0.1)], ONE_HOST),
    "a host leaves": (EACH, [drain("h3", at=0.05)], {}),
    "hosts leave": ("gossip", [drain("h3", at=0.03), drain("h4", at=0.06)], {}),
    "a host is started again": ("gossip", [restart("h4", at=0.05, after=0.02)], BACK),
    "some cannot reach the others": ("gossip", [partition(["h1", "h2", "h3"], REST, at=0.02, lasts=4.0)], BACK),
    "one is slow": ("averaging", [slow("worker/0", 3.0, at=0.0), *lost(2, 5)], {}),
    "two epochs": ("gossip", [*lost(1, STEPS - 1), kill("worker/0", step=STEPS + 2)], {"job": {"epochs": 2, "restarts": 1}}),
    "parts that are not even": ("gossip", lost(1, 6), {"compute": {"batch_size": 999}}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(VARIATIONS))
def test_others_train_what_a_lost_group_has_left(name: str) -> None:
    exchange, faults, sections = VARIATIONS[name]
    given = of_two(exchange, **sections)
    _, account = run(given, *faults)
    due = (given.job.epochs or 1) * (60_000 // (given.compute.groups * given.compute.batch_size))
    due *= given.compute.groups * given.compute.batch_size
    assert account == EVERYTHING | {"due": due, "counted": due}


def test_of_a_number_of_steps_those_that_are_left_train_as_many() -> None:
    _, account = run(of_two("gossip", job={"epochs": None, "steps": STEPS}), *lost(1, 6))
    assert (account["due"], account["repeated"]) == (60_000, 0)
    assert 8_000 <= account["lost"] <= 10_000  # a batch of 1,000 in each step from the sixth or so on
    assert "fewer workers train fewer samples" in account["why"]


def test_one_of_a_group_leaves_nothing_of_a_number_of_steps() -> None:
    _, account = run(of_two("gossip", job={"epochs": None, "steps": STEPS}), kill("worker/2", step=6))
    assert account == EVERYTHING


def test_with_gossip_of_gradients_nobody_trains_what_a_group_has_left() -> None:
    """Gradients that two groups have exchanged are part of no model yet."""
    _, account = run(of_two("gossip", exchange={"kind": "gossip", "gossip": {"exchange": "gradients"}}), *lost(1, 6))
    assert account["lost"] == account["due"] - account["counted"] > 0
    assert "the others do not train them" in account["why"]


# With torch.

GROUPS, SIZE, BATCH, BATCHES = 3, 2, 5, 60  # a batch that is not divided evenly


class Trained:
    """A run of a small model in double precision, what its workers stated, and what one process makes of that, by group."""

    def __init__(self, *, inputs: int = 12, hidden: int = 16) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs, self.hidden = inputs, hidden
        self.x = torch.randn(BATCH * BATCHES, inputs, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (len(self.x),), generator=generator)
        self.models: list[nn.Module] = []
        self.takes: dict[tuple[int, int], int] = {}  # step, group -> its batch
        self.mixed: dict[tuple[int, int], list[int]] = {}
        self.joined: dict[tuple[int, int], int] = {}
        self.averaged: dict[int, list[int]] = {}

    def network(self) -> nn.Module:
        layers = nn.Linear(self.inputs, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 3)
        return nn.Sequential(*layers).double()

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def task(self) -> Task:
        def model() -> nn.Module:
            self.models.append(self.network())
            return self.models[-1]

        data = TensorDataset(self.x, self.y)
        return Task(model=model, loss=nn.functional.cross_entropy, optimizer=self.optimizer, train_data=data)

    @staticmethod
    def of(peer: str) -> int:
        return int(peer.removeprefix("worker/")) // SIZE

    def hear(self, peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "takes":
            self.takes[values["step"], self.of(peer)] = values["slot"]
        elif what == "mixed":
            self.mixed[values["step"], self.of(peer)] = [self.of(source) for source in values["sources"]]
        elif what == "joined" and self.of(values["source"]) != self.of(peer):
            first, own = values["step"], self.of(peer)
            self.joined[first, own] = self.of(values["source"])
            self.takes = {key: slot for key, slot in self.takes.items() if key[1] != own or key[0] < first}  # it was ahead
        elif what == "counted":
            self.averaged[values["step"]] = list(dict.fromkeys(map(self.of, values["members"])))

    def run(
        self, exchange: str, *faults: Fault, folder: Path | None = None, resume: Path | None = None, groups: int = GROUPS,
        **job: Any,
    ) -> str:  # fmt: skip
        """Returns the error with which it has ended, if it has."""
        document: dict[str, Any] = {
            "job": {"task": "given:task", "epochs": 1, "timeout": "5 s", "elastic": True, **job},
            "hosts": [{"name": f"h[1-{groups * SIZE}]", "slots": 1}],
            "compute": {"groups": groups, "group_size": SIZE, "batch_size": BATCH, "bucket_size": "1 MiB"},
            "exchange": EXCHANGES[exchange],
            "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
            "data": {"shuffle": "none"},
            "simulation": {"payload": "real"},
        }
        self.models.clear()
        options = Options(faults=faults, task=self.task(), checkpoints=folder, resume=resume, on_audit=self.hear)
        result = simulate(Topology.from_dict(document), options=options)
        assert result.broken == []
        return "" if result.ending.status == "done" else str(result.ending.error)

    def replayed(self, there: list[int]) -> list[nn.Module]:
        """The groups' models, computed by one process. Those that are ``there`` in the end contain each batch once."""
        has = [frozenset[tuple[int, int, int]]()] * GROUPS
        seed_everything(1)
        first = self.network()
        models = [deepcopy(first) for _ in range(GROUPS)]
        optimizers = [self.optimizer(model.parameters()) for model in models]
        for step in range(1 + max(step for step, _ in self.takes)):
            for number in (number for at, number in self.joined if at == step):
                source = self.joined[step, number]
                models[number], has[number] = deepcopy(models[source]), has[source]
                optimizers[number] = self.optimizer(models[number].parameters())
                optimizers[number].load_state_dict(deepcopy(optimizers[source].state_dict()))
            for number in range(GROUPS):
                if (slot := self.takes.get((step, number))) is not None:
                    rows = slice(slot * BATCH, (slot + 1) * BATCH)
                    optimizers[number].zero_grad()
                    nn.functional.cross_entropy(models[number](self.x[rows]), self.y[rows]).backward()
                    optimizers[number].step()
                    has[number] |= {(slot, number, step)}
            before = [[each.detach().clone() for each in model.parameters()] for model in models]
            means = {number: [number, *sources] for (at, number), sources in self.mixed.items() if at == step}
            averaged = self.averaged.get(step, [])
            means |= dict.fromkeys(averaged, averaged)
            had = list(has)
            for number, of in means.items():
                has[number] = has[number].union(*(had[each] for each in of))
            with torch.no_grad():
                for number, of in means.items():
                    for index, parameter in enumerate(models[number].parameters()):
                        parameter.copy_(sum(before[each][index] for each in of) / len(of))
        together = frozenset[tuple[int, int, int]]().union(*(has[number] for number in there))
        assert sorted(slot for slot, _, _ in together) == list(range(BATCHES))
        return models


@pytest.mark.parametrize("exchange", ["gossip", "averaging", "averaging each step"])
@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("who", ["one", "all"])
def test_models_are_those_of_one_process_that_trains_the_same_batches(exchange: str, restarts: int, who: str) -> None:
    trained = Trained()
    assert trained.run(exchange, *(lost(1, 4) if who == "all" else [kill("worker/3", step=4)]), restarts=restarts) == ""
    assert bool(trained.joined) == (bool(restarts) and who == "all")
    there = [0, 1, 2] if restarts or who == "one" else [0, 2]
    expected = trained.replayed(there)
    assert [sum(equal(model, expected[number]) for model in trained.models) >= 1 for number in there] == [True] * len(there)


@pytest.mark.parametrize("when", [3, 4, 5])
def test_groups_know_the_same_of_a_model_smaller_than_they_are(when: int) -> None:
    """Some of a group have no part of any bucket, and must hear all the same of what others have trained."""
    trained = Trained(inputs=1, hidden=1)
    trained.run("gossip", *[kill(peer, step=when) for peer in group(1)], kill("worker/0", step=when + 2))
    trained.replayed([0, 2])


def test_what_was_left_is_trained_after_a_checkpoint(tmp_path: Path) -> None:
    first, then = Trained(), Trained()
    assert first.run("gossip", *lost(1, 4), folder=tmp_path / "first", epochs=None, steps=6, checkpoint_every=6) == ""
    (kept,) = find_checkpoints(tmp_path / "first")
    before = {slot for (step, number), slot in first.takes.items() if number != 1 or step < 4}
    assert then.run("gossip", folder=tmp_path / "then", resume=kept, checkpoint_every=100) == ""
    assert sorted([*before, *then.takes.values()]) == list(range(BATCHES))


@pytest.mark.parametrize("groups", [2, 4])
def test_other_groups_go_on_when_all_that_was_left_is_trained(groups: int, tmp_path: Path) -> None:
    first, then = Trained(), Trained()
    assert first.run("averaging", *lost(1, 4), folder=tmp_path / "first", epochs=None, steps=16, checkpoint_every=16) == ""
    (kept,) = find_checkpoints(tmp_path / "first")
    before = {*first.takes.values()}
    assert before == {*range(len(before))}
    assert then.run("averaging", resume=kept, groups=groups) == ""
    assert len(then.takes) == (BATCHES - len(before)) // groups * groups  # what does not fill a step of all groups is left out


def test_fixed_groups_go_on_when_all_that_was_left_is_trained(tmp_path: Path) -> None:
    first, then = Trained(), Trained()
    assert first.run("averaging", *lost(1, 4), folder=tmp_path / "first", epochs=None, steps=16, checkpoint_every=16) == ""
    (kept,) = find_checkpoints(tmp_path / "first")
    assert then.run("averaging", resume=kept, elastic=False) == ""


def test_what_is_left_is_for_as_many_groups(tmp_path: Path) -> None:
    first = Trained()
    assert first.run("gossip", *lost(1, 4), folder=tmp_path / "first", epochs=None, steps=5, checkpoint_every=5) == ""
    (kept,) = find_checkpoints(tmp_path / "first")
    assert "what these had left is counted in the batches of 3 groups" in Trained().run("gossip", resume=kept, groups=2)
    assert "resume with the same data, in a run that may lose workers" in Trained().run("gossip", resume=kept, elastic=False)
