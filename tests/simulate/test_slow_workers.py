"""A slow device, loader or link is named in simulated runs, whoever waits for whom; and nobody in healthy ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.observe.slowness import Slow, Slowness
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place

PROFILE = {"layers": [{"name": "all", "numel": 250_000, "forward_s": 0.07, "backward_s": 0.14}]}
TOPOLOGY = """
[job]
steps = 110
seed = {seed}
[[hosts]]
name = "h[1-4]"
address = "10.0.0.1"
slots = 1
[compute]
groups = 4
device = "modelled"
profile = "{profile}"
noise = {{ {noise} }}
[exchange]
kind = "{kind}"
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
{network}
[simulation]
payload = "phantom"
time_limit = 1000
[observe]
trace_steps = 0
"""
SLOW = {
    "device": '[[network.hosts]]\nname = "h3"\nslowdown = 3.0',
    "loader": '[[network.hosts]]\nname = "h3"\nloading = "700 ms"',
    "link": '[[network.hosts]]\nname = "h3"\nbandwidth = "100 Mbit/s"',
}


def found(folder: Path, kind: str, *, network: str = "", noise: str = 'kind = "normal", spread = 0.2', seed: int = 1) -> list[Slow]:
    (folder / "profile.json").write_text(json.dumps(PROFILE))
    topology = parse_topology(TOPOLOGY.format(seed=seed, profile=folder / "profile.json", kind=kind, network=network, noise=noise))
    host = {role.peer: role.host for role in place(topology).roles}
    slowness, slow = Slowness(), []

    def report(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        role, _, rank = peer.partition("/")
        for event in events:
            if event["kind"] in ("step", "links", "finish"):
                slow.extend(slowness.add(peer, {**event, "role": role, "rank": int(rank), "host": host[peer]}))

    result = simulate(topology, options=Options(on_report=report))
    assert (result.ending.status, result.broken) == ("done", [])
    return slow


@pytest.mark.parametrize(
    ("what", "kind"),
    [("device", "gossip"), ("device", "allreduce"), ("loader", "gossip"), ("link", "gossip"), ("link", "allreduce")],
)
def test_what_is_slow_is_named(tmp_path: Path, what: str, kind: str) -> None:
    (slow,) = found(tmp_path, kind, network=SLOW[what])
    assert (slow.peer, slow.what) == ("worker/2", what)
    assert slow.factor > 2


@pytest.mark.parametrize(("kind", "noise"), [("gossip", 'kind = "exponential"'), ("model_server", 'kind = "normal", spread = 0.3')])
def test_nobody_is_named_in_healthy_runs(tmp_path: Path, kind: str, noise: str) -> None:
    assert found(tmp_path, kind, noise=noise) == []
