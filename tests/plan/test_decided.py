"""The grid and the plan of a run are decided before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.membership.description import RunDescription
from zmqtrain.plan.decided import decided
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

PLAN = [{"layer": "0", "choice": "domain", "grid": "2x2"}, {"layer": "3", "choice": "model", "grid": "2x2"}]


def topology_of(grid: str, **parallel: object) -> Topology:
    compute = {"group_size": 4, "batch_size": 256, "grid": grid}
    plan = {"layers": "alexnet", "pricing": "paper", "flops": 0.0}
    return Topology.model_validate(
        {"job": {"oversubscribe": True}, "compute": compute, "parallel": parallel, "plan": plan, "exchange": {"kind": "allreduce"}}
    )


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    found = decided(topology_of("2x2", plan="plan.json"), tmp_path)
    assert found.parallel.plan is None
    assert [(each.layer, each.choice, each.grid) for each in found.parallel.layers] == [
        ("0", "domain", "2x2"),
        ("3", "model", "2x2"),
    ]
    assert Topology.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "cannot be read"), ("{}", "not a plan, which is a list"), ('[{"layer": "0"}]', "lacks choice, grid")]
)
def test_a_file_that_is_no_plan_is_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=reason):
        decided(topology_of("2x2", plan="plan.json"), tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plan\.json cannot be read"):
        decided(topology_of("2x2", plan="plan.json"), tmp_path)


def test_auto_takes_what_the_planner_finds(tmp_path: Path) -> None:
    """By communication alone AlexNet's linear layers are divided at a small batch, and its convolutions are not by outputs."""
    found = decided(topology_of("auto"), tmp_path)
    assert found.compute.grid not in (None, "auto", "1x4")
    choices = {each.layer: each.choice for each in found.parallel.layers}
    assert choices["fc6"] == choices["fc7"] == "model"
    assert choices["conv1"] != "model"


def test_a_plan_that_the_job_cannot_have_is_an_error(tmp_path: Path) -> None:
    """A merged FC server is for groups that divide only the batch, which is known once there is a plan."""
    topology = topology_of("auto")
    values = {**topology.to_open_dict(), "exchange": {"kind": "model_server", "merged_fc": True}}
    with pytest.raises(UsageError, match=r"the plan that was found divides a group as .*: merged_fc is for groups that"):
        decided(Topology.from_dict(values), tmp_path)


def test_what_is_decided_stays(tmp_path: Path) -> None:
    topology = topology_of("2x2")
    assert decided(topology, tmp_path) is topology


def cluster_of(bandwidth: str, **exchange: object) -> Topology:
    hosts = [{"name": f"h{number}", "address": "10.0.0.1", "slots": 1} for number in range(4)]
    compute = {"group_size": 4, "batch_size": 128, "device": "modelled", "profile": "cifarnet"}
    network = {"bandwidth": bandwidth, "latency": "200 us"}
    values = {"job": {}, "hosts": hosts, "compute": compute, "exchange": {"kind": "allreduce"} | exchange, "network": network}
    return Topology.model_validate(values)


@pytest.mark.parametrize(("bandwidth", "expected"), [("100 Mbit/s", "int8"), ("100 Gbit/s", "none")])
def test_auto_compression_is_what_pays(bandwidth: str, expected: str, tmp_path: Path) -> None:
    said: list[str] = []
    found = decided(cluster_of(bandwidth, compression="auto"), tmp_path, tell=said.append)
    assert (found.exchange.compression, found.undecided) == (expected, False)
    assert said[0].startswith(f'compression = "{expected}": ')
    assert Topology.from_dict(found.to_dict()) == found


def test_auto_compression_keeps_its_rank_only_for_powersgd(tmp_path: Path) -> None:
    """A profile has no shapes, so that PowerSGD is not possible here."""
    found = decided(cluster_of("100 Mbit/s", compression="auto", compression_rank=2), tmp_path)
    assert (found.exchange.compression, found.exchange.compression_rank) == ("int8", 4)


def test_auto_compression_with_nothing_to_send_is_none(tmp_path: Path) -> None:
    values = {"job": {"oversubscribe": True}, "exchange": {"kind": "allreduce", "compression": "auto"}}
    alone = Topology.model_validate(values | {"plan": {"layers": "alexnet"}, "compute": {"group_size": 2}})
    said: list[str] = []
    assert decided(alone, tmp_path, tell=said.append).exchange.compression == "none"
    assert "no gradients pass a network" in said[0]


@pytest.mark.parametrize(
    "open_", [{"compute": {"grid": "auto", "group_size": 2}}, {"exchange": {"compression": "auto", "kind": "allreduce"}}]
)
def test_a_run_does_not_begin_undecided(open_: dict[str, object]) -> None:
    topology = Topology.model_validate({"job": {"oversubscribe": True, "task": "task.py:task"}} | open_)
    with pytest.raises(UsageError, match="all is decided"):
        RunDescription(topology, place(topology), ".")
