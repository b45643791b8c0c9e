"""What asynchrony adds to the momentum, and how the optimizer's own makes up for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zmqtrain import Task
from zmqtrain.errors import TaskError, TopologyError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.momentum import (
    Compensation,
    compensated,
    expected_staleness,
    explicit_of,
    gradients_of,
    implicit_momentum,
    total_momentum,
    with_momentum,
)
from zmqtrain.exchange.optimizer import build_optimizer, describe_optimizer
from zmqtrain.observe.live import closing_lines
from zmqtrain.observe.summary import Summary
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.train.task import build_optimizer_of


@pytest.mark.parametrize(
    ("policy", "groups", "bound", "staleness"),
    [("sync", 8, 0, 0.0), ("async", 8, 0, 7.0), ("async", 1, 0, 0.0), ("bound", 4, 2, 3.0), ("bound", 4, 0, 1.5)],
)
def test_expected_staleness(policy: Any, groups: int, bound: int, staleness: float) -> None:
    assert expected_staleness(policy, groups, bound) == staleness


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("target", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_both_act_like_the_target_or_come_as_near_as_they_can(target: float, groups: int) -> None:
    implicit = implicit_momentum(groups - 1)
    assert implicit == pytest.approx(1 - 1 / groups)
    explicit = compensated(target, implicit)
    assert 0 <= explicit <= target
    assert total_momentum(explicit, implicit) == pytest.approx(max(target, implicit))


FLAVOURS: dict[str, Any] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0.9, 0.6),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.6, nesterov=True), 0.6, 0.0),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9), 0.9, 0.6),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99)), 0.9, 0.6),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), None, None),
}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_of_all_optimizers_that_have_one(flavour: str) -> None:
    """Four groups act like 0.75: 0.9 leaves 0.6, and 0.6 leaves nothing."""
    make, target, explicit = FLAVOURS[flavour]
    spec = describe_optimizer(make([torch.nn.Parameter(torch.zeros(3))]))
    assert explicit_of(spec.groups[0]) == target
    changed = Compensation(3.0, on=True).of(spec)
    assert explicit_of(changed.groups[0]) == (None if explicit is None else pytest.approx(explicit))
    assert changed.groups[0].get("lr") == 0.1
    assert build_optimizer(changed, [[torch.nn.Parameter(torch.zeros(3))]]).param_groups[0]["lr"] == 0.1
    for same in (Compensation(3.0, on=False), Compensation(0.0, on=True)):
        assert same.of(spec) == spec
    told = Compensation(3.0, on=True).describe(spec)
    assert told["target"] == target
    assert told["total"] == pytest.approx(max(target or 0.0, 0.75))
    assert told["total"] == pytest.approx(1 - (1 - (explicit or 0.0)) * 0.25)


def test_groups_without_momentum_stay_as_they_are() -> None:
    assert with_momentum({"lr": 0.1}, 0.5) == {"lr": 0.1}
    two = OptimizerSpec("torch.optim:SGD", ({"lr": 1.0, "momentum": 0.9}, {"lr": 1.0, "momentum": 0.0}))
    assert [explicit_of(each) for each in Compensation(1.0, on=True).of(two).groups] == [pytest.approx(0.8), 0.0]


def topology_of(folder: Path, staleness: Any, momentum: Any, look_ahead: str, steps: int = 200) -> Topology:
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"layers": [{"name": "0", "numel": 256, "forward_s": 0.01, "backward_s": 0.02}]}))
    return Topology.from_dict(
        {
            "job": {"task": "given:task", "steps": steps},
            "hosts": [{"name": "h[1-4]", "slots": 1}],
            "compute": {
                "groups": 4,
                "batch_size": 4,
                "noise": {"kind": "exponential"},
                "device": "modelled",
                "profile": str(profile),
            },
            "exchange": {"kind": "model_server", "staleness": staleness},
            "simulation": {"payload": "real"},
            "optimizer": {"momentum": momentum, "look_ahead": look_ahead},
        }
    )


def task(momentum: float) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 256, generator=generator)

    class Point(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w - x

    return Task(
        model=lambda: torch.nn.Sequential(Point()),
        loss=lambda output, target: output.square().sum(1).mean() / 2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=momentum),
        train_data=torch.utils.data.TensorDataset(x, torch.zeros(4096)),
    )


@pytest.mark.parametrize(
    ("staleness", "momentum", "look_ahead", "explicit", "fitted", "steps"),
    [  # what is fitted needs many updates, but without noise in when they come
        ("async", "auto", "none", 0.6, 0.9, 300),
        ("async", 0.15, "none", 0.15, None, 80),
        ("async", "task", "none", 0.9, None, 80),
        ("sync", "auto", "auto", 0.9, 0.9, 150),
        ("async", 0.0, "auto", 0.0, 0.75, 300),
        ("async", "auto", "auto", 0.9**0.25, None, 80),
        ("async", 0.15, "auto", 0.15, None, 80),
    ],
)
def test_a_run_says_what_its_momentum_is(
    tmp_path: Path, staleness: str, momentum: Any, look_ahead: str, explicit: float, fitted: float | None, steps: int
) -> None:
    """The theorem's case: a noisy quadratic, and groups that take as long as chance will have it."""
    summary = Summary()

    def hear(peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event.get("kind") not in ("span", "log"):
                role, _, rank = peer.partition("/")
                summary.add(peer, {"values": {}, **event, "role": role, "rank": int(rank) if rank else None})

    topology = topology_of(tmp_path, staleness, momentum, look_ahead, steps)
    assert simulate(topology, options=Options(task=task(0.9), on_report=hear)).ending.status == "done"
    told = summary.to_dict()["momentum"]
    implicit = 0.75 if staleness == "async" else 0.0
    assert told["explicit"] == pytest.approx(explicit)
    assert told["implicit"] == implicit
    assert told["compensated"] == (momentum == "auto")
    spread = look_ahead == momentum == "auto" and staleness == "async"
    assert told["total"] == pytest.approx(0.9 if spread else 1 - (1 - explicit) * (1 - implicit))
    assert told["total_measured"] == pytest.approx(told["total"], abs=0.05)
    if staleness == "async" and look_ahead == "auto" and momentum:
        assert told["look_ahead"]["updates"] == 5
        assert told["look_ahead"]["steps"] == pytest.approx(sum(explicit**k for k in range(1, 6)))
        assert told["look_ahead"]["lr_factor"] == pytest.approx((1 - explicit) / 0.1 / 4 if spread else 1.0)
    else:
        assert told["look_ahead"] is None
    assert told["implicit_measured"] == pytest.approx(implicit, abs=0.08)  # some groups end before others
    if fitted is not None:
        assert told["fitted"] == pytest.approx(fitted, abs=0.12)  # of 1,200 updates; longer runs come nearer
        assert told["fitted_updates"] > 100


def test_a_run_without_momentum_says_what_its_rate_is(tmp_path: Path) -> None:
    summary = Summary()

    def hear(peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event.get("kind") not in ("span", "log"):
                role, _, rank = peer.partition("/")
                summary.add(peer, {"values": {}, **event, "role": role, "rank": int(rank) if rank else None})

    topology = topology_of(tmp_path, "async", "auto", "auto")
    assert simulate(topology, options=Options(task=task(0.0), on_report=hear)).ending.status == "done"
    told = summary.to_dict()["momentum"]
    rate = {"lr_factor": 0.25, "rise": 0.0, "norm_limit": None, "recovery": None}
    assert told["look_ahead"] == {"updates": 0.0, "steps": 0.0, **rate}
    assert (told["target"], told["explicit"], told["total"]) == (0.0, 0.0, 0.75)
    assert told["total_measured"] == pytest.approx(0.75, abs=0.05)
    assert told["fitted"] == pytest.approx(0.75, abs=0.15)
    (line,) = (line for line in closing_lines(summary, 1.0, "here") if "momentum" in line)
    assert line.startswith("momentum 0.00, by asynchrony 0.75, together like 0.75; fitted ")
    assert line.endswith(", learning rate times 0.25")


def test_what_replaces_the_tasks_own() -> None:
    recipe = Task(
        model=lambda: torch.nn.Linear(2, 2),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(
            [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1, momentum=0.9, nesterov=True
        ),
        train_data=[0],
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
    )
    optimizer, schedule = build_optimizer_of(recipe, torch.nn.Linear(2, 2), lr=0.02, momentum=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.1])
    assert [group["momentum"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert not optimizer.param_groups[0]["nesterov"]
    assert schedule is None
    without = Task(
        model=lambda: torch.nn.Linear(2, 2),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.0),
        train_data=[0],
    )
    with pytest.raises(TaskError, match="Adagrad has neither"):
        build_optimizer_of(without, torch.nn.Linear(2, 2), momentum=0.5)
    with pytest.raises(TaskError, match="which is 0"):
        build_optimizer_of(without, torch.nn.Linear(2, 2), lr=0.5)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "allreduce"}, "averaged, one update for all groups"),
        ({"kind": "model_server", "staleness": "sync"}, "averaged, one update for all groups"),
        ({"kind": "model_server", "staleness": "async"}, "applied one by one"),
        ({"kind": "gossip"}, "each group's optimizer applies its own"),
        ({"kind": "gossip", "gossip": {"exchange": "gradients", "granularity": "batch"}}, "averaged with another's"),
        ({"kind": "averaging"}, "each group's optimizer applies its own"),
    ],
)
def test_whether_gradients_are_summed_or_averaged(section: dict[str, Any], words: str) -> None:
    topology = Topology.from_dict({"job": {}, "hosts": [{"name": "h", "slots": 4}], "compute": {"groups": 4}, "exchange": section})
    stated = gradients_of(topology)
    assert words in stated["among_groups"]
    assert "averaged over the group's batch" in stated["in_a_group"]


@pytest.mark.parametrize("value", ["1.0", "-0.1", '"none"', "true"])
def test_no_momentum(value: str) -> None:
    with pytest.raises(TopologyError, match=r'write "auto", "task", or a number from 0 to below 1'):
        parse_topology(f"[job]\n[optimizer]\nmomentum = {value}\n", file="job.toml", name="job")
    parsed = parse_topology("[job]\n[optimizer]\nmomentum = 0.5\nlr = 0.1\n", file="job.toml", name="job")
    assert (parsed.optimizer.momentum, parsed.optimizer.explicit_momentum, parsed.optimizer.lr) == (0.5, 0.5, 0.1)
    assert Topology.from_dict(json.loads(json.dumps(parsed.to_dict()))) == parsed


def test_the_shipped_asynchronous_files_say_what_they_want() -> None:
    for name, momentum in (("digits", 0.5), ("mnist-async", 0.3), ("cifar10", "task")):
        text = (Path(__file__).parents[2] / "launch" / f"{name}.toml").read_text()
        assert parse_topology(text, file=name, name=name).optimizer.momentum == momentum
