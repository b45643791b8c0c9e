"""Groups of one worker that gossip or average their models train what lost ones have left: each batch of an epoch counts once,
whoever is lost and whenever. The auditor says so of modelled runs (`zmqtrain.simulate.replay`); with torch it is a replay in plain
PyTorch, in double precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task
from zmqtrain.observe.account import SampleAccount
from zmqtrain.run.faults import Fault, drain, kill, partition, restart, slow
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints
from zmqtrain.train.random_state import seed_everything

#: What groups do with their models.
EXCHANGES: dict[str, dict[str, Any]] = {
    "gossip": {"kind": "gossip"},
    "gossip by batch": {"kind": "gossip", "gossip": {"granularity": "batch", "rotation": False}},
    "averaging": {"kind": "averaging", "every": 4},
    "averaging each step": {"kind": "averaging", "every": 1},
    "elastic averaging": {"kind": "averaging", "every": 3, "averaging": {"method": "elastic"}},
    "DiLoCo": {"kind": "averaging", "every": 5, "averaging": {"method": "outer"}},
    "fragments": {"kind": "averaging", "every": 4, "averaging": {"method": "outer", "overlap_steps": 2, "fragments": 2}},
}
#: The steps of an epoch of LeNet's profile: 60,000 samples.
STEPS = 15


def modelled(exchange: str, *, groups: int = 4, **job: Any) -> Topology:
    return Topology.from_dict(
        {
            "job": {"epochs": 1, "timeout": "5 s", "elastic": True, **job},
            "hosts": [{"name": f"h[1-{groups}]", "slots": 1}],
            "compute": {
                "groups": groups,
                "batch_size": 60_000 // (groups * STEPS),
                "device": "modelled",
                "profile": "lenet",
                "bucket_size": "1 MiB",
            },
            "exchange": EXCHANGES[exchange],
            "network": {"bandwidth": "1 Gbit/s", "latency": "100 us"},
            "simulation": {"payload": "small", "time_limit": 300},
            "observe": {"trace_steps": 0},
        }
    )


def run(shape: Topology, *faults: Fault) -> tuple[Result, dict[str, Any]]:
    """A run without a violation, and the account of its samples."""
    account = SampleAccount()

    def report(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            account.add(peer, {"step": None, **event, "values": event.get("values") or {}})

    result = simulate(shape, options=Options(faults=faults, on_report=report))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    found = account.to_dict(shape, done=True)
    assert found is not None
    return result, found


EVERYTHING = {"due": 60_000, "counted": 60_000, "repeated": 0, "lost": 0, "why": None}


LOSSES: dict[str, list[Fault]] = {
    "nobody": [],
    "one": [kill("worker/1", step=6)],
    "at once": [kill("worker/0", step=0)],
    "in the last step": [kill("worker/3", step=STEPS - 1)],
    "in what was left": [kill("worker/1", step=STEPS - 1), kill("worker/2", step=STEPS)],
    "all but one": [kill("worker/0", step=5), kill("worker/1", step=5), kill("worker/2", step=5)],
    "drained": [drain("h2", step=7)],
}
#: With these exchanges every loss is tried, with the others the one that leaves most to do.
TWO = ("gossip", "averaging each step")
TRIED = [(each, loss) for each in EXCHANGES for loss in LOSSES if each in TWO or loss == "in what was left"]


@pytest.mark.parametrize(("exchange", "loss"), TRIED)
def test_others_train_what_a_lost_group_has_left(exchange: str, loss: str) -> None:
    _, account = run(modelled(exchange), *LOSSES[loss])
    assert account == EVERYTHING


@pytest.mark.parametrize(
    ("exchange", "faults"),
    [
        ("gossip", [restart("worker/0", at=0.02, after=0.01), kill("worker/3", step=9)]),
        ("gossip", [kill("worker/1", step=3), kill("worker/2", step=8), kill("worker/1", step=11)]),
        ("averaging", [kill("worker/1", step=6)]),
        ("averaging each step", [kill("worker/1", step=STEPS - 2), kill("worker/2", step=STEPS - 1)]),
        ("elastic averaging", [kill("worker/1", step=3), kill("worker/2", step=8), kill("worker/1", step=11)]),
    ],
    ids=["two", "again", "one", "at the end", "all"],
)
def test_those_that_come_back_take_turns_again(exchange: str, faults: list[Fault]) -> None:
    _, account = run(modelled(exchange, restarts=3), *faults)
    assert account == EVERYTHING


def test_of_a_number_of_steps_those_that_are_left_train_as_many() -> None:
    _, account = run(modelled("gossip", epochs=None, steps=STEPS), kill("worker/1", step=6))
    assert (account["due"], account["repeated"]) == (60_000, 0)
    assert account["lost"] == account["due"] - account["counted"]
    assert 8_000 <= account["lost"] <= 10_000  # a batch of 1,000 in each step from the sixth or so on
    assert "fewer workers train fewer samples" in account["why"]


@pytest.mark.parametrize(("exchange", "groups"), [("gossip", 2), ("gossip", 5), ("averaging", 3)])
def test_any_number_of_groups(exchange: str, groups: int) -> None:
    _, account = run(modelled(exchange, groups=groups), kill("worker/1", step=4), slow("worker/0", 3.0, at=0.0))
    assert account["lost"] == account["repeated"] == 0


def test_groups_that_cannot_reach_each_other_for_a_while() -> None:
    cut = partition(["h1", "h2"], ["h3", "h4"], at=0.02, lasts=4.0)
    _, account = run(modelled("gossip", restarts=3), cut)
    assert account == EVERYTHING


@pytest.mark.parametrize("exchange", ["gossip", "averaging each step", "DiLoCo"])
def test_random_faults_break_nothing(exchange: str) -> None:
    found = list(explore(modelled(exchange, restarts=2), range(2), faults="random"))
    assert [each.broken for each in found if each.broken] == []


# With torch.

GROUPS, BATCH, BATCHES = 3, 4, 90
MIXING = [name for name in EXCHANGES if name not in ("elastic averaging", "DiLoCo", "fragments")]


class Trained:
    """A run of a small model in double precision, what its workers stated, and what one process makes of that."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(BATCH * BATCHES, 12, dtype=torch.float64, generator=generator)
        self.y = torch.randint(3, (len(self.x),), generator=generator)
        self.models: list[nn.Module] = []
        self.takes: dict[tuple[int, str], int] = {}  # step, worker -> its batch
        self.mixed: dict[tuple[int, str], list[str]] = {}
        self.joined: dict[tuple[int, str], str] = {}
        self.averaged: dict[int, list[str]] = {}
        self.final: list[str] = []  # the workers at the end

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    @staticmethod
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def task(self) -> Task:
        def model() -> nn.Module:
            self.models.append(self.network())
            return self.models[-1]

        data = TensorDataset(self.x, self.y)
        return Task(model=model, loss=nn.functional.cross_entropy, optimizer=self.optimizer, train_data=data)

    def hear(self, peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "takes":
            self.takes[values["step"], peer] = values["slot"]
        elif what == "mixed":
            self.mixed[values["step"], peer] = list(values["sources"])
        elif what == "joined":
            self.joined[values["step"], peer] = values["source"]
        elif what == "counted":
            self.averaged[values["step"]] = list(values["members"])

    def run(
        self,
        exchange: str,
        *faults: Fault,
        folder: Path | None = None,
        resume: Path | None = None,
        groups: int = GROUPS,
        **job: Any,
    ) -> None:
        document: dict[str, Any] = {
            "job": {"task": "given:task", "epochs": 1, "timeout": "5 s", "elastic": True, **job},
            "hosts": [{"name": f"h[1-{groups}]", "slots": 1}],
            "compute": {"groups": groups, "batch_size": BATCH, "bucket_size": "1 MiB"},
            "exchange": EXCHANGES[exchange],
            "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
            "data": {"shuffle": "none"},
            "simulation": {"payload": "real"},
        }
        self.models.clear()
        options = Options(faults=faults, task=self.task(), checkpoints=folder, resume=resume, on_audit=self.hear)
        result = simulate(Topology.from_dict(document), options=options)
        assert (result.ending.status, result.broken) == ("done", []), result.ending.error

    def replayed(self) -> dict[str, nn.Module]:
        """The workers' models, computed by one process."""
        seed_everything(1)
        first = self.network()
        workers = [f"worker/{rank}" for rank in range(GROUPS)]
        models = {worker: deepcopy(first) for worker in workers}
        optimizers = {worker: self.optimizer(models[worker].parameters()) for worker in workers}
        for step in range(1 + max(step for step, _ in self.takes)):
            for peer in (peer for at, peer in self.joined if at == step):
                source = self.joined[step, peer]
                models[peer] = deepcopy(models[source])
                optimizers[peer] = self.optimizer(models[peer].parameters())
                optimizers[peer].load_state_dict(deepcopy(optimizers[source].state_dict()))
            for peer in workers:
                if (slot := self.takes.get((step, peer))) is not None:
                    rows = slice(slot * BATCH, (slot + 1) * BATCH)
                    optimizers[peer].zero_grad()
                    nn.functional.cross_entropy(models[peer](self.x[rows]), self.y[rows]).backward()
                    optimizers[peer].step()
            before = {worker: [each.detach().clone() for each in models[worker].parameters()] for worker in workers}
            groups = {peer: [peer, *sources] for (at, peer), sources in self.mixed.items() if at == step}
            averaged = self.averaged.get(step, [])
            groups |= dict.fromkeys(averaged, averaged)
            with torch.no_grad():
                for peer, group in groups.items():
                    for index, parameter in enumerate(models[peer].parameters()):
                        parameter.copy_(sum(before[each][index] for each in group) / len(group))
        return models


def equal(model: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(mine, its, rtol=1e-11, atol=1e-12) for mine, its in pairs)


@pytest.mark.parametrize("exchange", MIXING)
@pytest.mark.parametrize("restarts", [0, 1])
def test_models_are_those_of_one_process_that_trains_the_same_batches(exchange: str, restarts: int) -> None:
    run = Trained()
    run.run(exchange, kill("worker/1", step=4), restarts=restarts)
    assert bool(run.joined) == bool(restarts)
    there = ["worker/0", "worker/2", *(["worker/1"] if restarts else [])]
    counts = [slot for (step, peer), slot in run.takes.items() if peer in there or step < 4]
    assert sorted({*counts}) == list(range(BATCHES))
    expected = run.replayed()
    assert [sum(equal(model, expected[worker]) for model in run.models) >= 1 for worker in there] == [True] * len(there)


@pytest.mark.parametrize("exchange", ["gossip", "averaging"])
def test_what_was_left_is_trained_after_a_checkpoint(exchange: str, tmp_path: Path) -> None:
    first = Trained()
    first.run(exchange, kill("worker/1", step=4), folder=tmp_path / "first", epochs=None, steps=7, checkpoint_every=7)
    (kept,) = find_checkpoints(tmp_path / "first")
    before = set(first.takes.values())
    then = Trained()
    then.run(exchange, folder=tmp_path / "then", resume=kept, checkpoint_every=100)
    trained = sorted(then.takes.values())
    lost = {slot for (step, peer), slot in first.takes.items() if peer == "worker/1" and step == 4}
    assert {*trained} | before == {*range(BATCHES)}
    assert {*trained} & before <= lost
    assert len({*trained}) == len(trained)


def test_other_groups_go_on_when_all_that_was_left_is_trained(tmp_path: Path) -> None:
    first, then = Trained(), Trained()
    first.run("gossip", kill("worker/1", step=4), folder=tmp_path / "first", epochs=None, steps=20, checkpoint_every=20)
    (kept,) = find_checkpoints(tmp_path / "first")
    before = set(first.takes.values())
    assert before == {*range(len(before))}
    then.run("gossip", resume=kept, groups=2)
    (step, _), slot = min(then.takes.items())
    assert (step, slot) == (20, 20 * 2)
    # The rest of the epoch: what does not fill a step of all groups is left out.
    assert len(then.takes) == (BATCHES - len(before)) // 2 * 2
