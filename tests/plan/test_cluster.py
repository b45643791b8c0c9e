"""A cluster that was measured: its links and its hosts' speeds reach the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli.plan import run_plan
from zmqtrain.collectives.choose import ALPHA_S, BETA_S
from zmqtrain.plan.cluster import measured_link, worker_speeds
from zmqtrain.plan.setup import link_of, link_source
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

LINKS = [
    {"source": "a", "target": "b", "bandwidth": 2e9, "latency_s": 3e-4},
    {"source": "b", "target": "a", "bandwidth": 1e9, "latency_s": 2e-4},
    {"source": "a", "target": "elsewhere", "bandwidth": 1e6, "latency_s": 1.0},
]
HOSTS = [{"name": "a", "flops": 200e9}, {"name": "b", "flops": 50e9}]


def topology_of(folder: Path, measured: dict[str, Any], slots: int = 1, **network: Any) -> Topology:
    layers = [{"name": f"layer{number}", "numel": 250_000, "forward_s": 0.004, "backward_s": 0.008} for number in range(4)]
    (folder / "profile.json").write_text(json.dumps({"layers": layers, "batch_size": 32, "measured": measured}))
    document: dict[str, Any] = {
        "job": {"steps": 4},
        "hosts": [{"name": name, "slots": slots} for name in "ab"],
        "compute": {"group_size": 2 * slots, "device": "modelled", "profile": str(folder / "profile.json")},
    }
    return Topology.from_dict(document | ({"network": network} if network else {}))


def test_the_slowest_measured_link_counts_where_the_file_says_nothing(tmp_path: Path) -> None:
    topology = topology_of(tmp_path, {"links": LINKS})
    link = link_of(topology)
    assert (8 / link.byte_s, link.alpha_s) == (pytest.approx(1e9), 3e-4)
    assert link_source(topology) == f"links measured in {tmp_path / 'profile.json'}"


def test_the_file_goes_before_measurements(tmp_path: Path) -> None:
    topology = topology_of(tmp_path, {"links": LINKS}, bandwidth="5 Gbit/s")
    link = link_of(topology)
    assert (8 / link.byte_s, link.alpha_s) == (pytest.approx(5e9), 3e-4)
    assert link_source(topology).startswith("[network] and links measured")
    both = topology_of(tmp_path, {"links": LINKS}, bandwidth="5 Gbit/s", latency="1 ms")
    assert (link_of(both).alpha_s, link_source(both)) == (1e-3 + ALPHA_S, "[network]")


def test_links_of_other_hosts_say_nothing(tmp_path: Path) -> None:
    topology = topology_of(tmp_path, {"links": LINKS[:1]})
    assert measured_link(topology) is None
    assert (link_of(topology).byte_s, link_source(topology)) == (BETA_S, "a typical 10 Gbit/s network")


@pytest.mark.parametrize(("slots", "speeds"), [(1, {"a": 2.0, "b": 0.5}), (2, {"a": 1.0, "b": 0.25})])
def test_hosts_are_as_fast_as_they_were_measured(tmp_path: Path, slots: int, speeds: dict[str, float]) -> None:
    topology = topology_of(tmp_path, {"hosts": HOSTS, "peak_flops": 100e9}, slots)
    assert worker_speeds(topology, place(topology)) == speeds
    unknown = topology_of(tmp_path, {"hosts": HOSTS[:1], "peak_flops": 100e9}, slots)
    assert worker_speeds(unknown, place(unknown)) == {"a": 1.0, "b": 1.0}


def test_the_plan_says_where_its_network_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text(topology_of(tmp_path, {"links": LINKS, "hosts": HOSTS, "peak_flops": 100e9}).to_toml())
    assert run_plan(file, json_lines=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["network"].startswith("links measured in")
    assert rows[0]["bandwidth"] == pytest.approx(1e9)
    groups = [row for row in rows if row["row"] == "groups"]
    assert all(row["compute_s"] > 0 and row["exposed_s"] >= 0 and row["wait_s"] >= 0 for row in groups)
    assert run_plan(file) == 0
    assert "links measured in" in capsys.readouterr().out
