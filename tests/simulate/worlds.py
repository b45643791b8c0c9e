"""Small jobs to simulate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zmqtrain.run.faults import Fault
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology

#: Four layers, 30 ms a step of 32 samples.
PROFILE = {
    "layers": [{"name": f"layer{n}", "numel": 5000, "forward_s": 0.0025, "backward_s": 0.005} for n in range(4)],
    "batch_size": 32,
}


def profile_file(folder: Path, **changes: Any) -> str:
    """A profile for tests, on disk."""
    file = folder / "profile.json"
    file.write_text(json.dumps(PROFILE | changes))
    return str(file)


def topology_of(profile: str, *, workers: int = 4, hosts: int = 4, **sections: Any) -> Topology:
    """A job with model servers on modelled devices."""
    document: dict[str, Any] = {
        "job": {"name": "test", "steps": 12, "timeout": "20 s"},
        "hosts": [{"name": f"h[1-{hosts}]", "slots": -(-workers // hosts)}] if hosts > 1 else [{"name": "h1", "slots": workers}],
        "compute": {"groups": workers, "batch_size": 32, "device": "modelled", "profile": profile, "bucket_size": "16 KiB"},
        "exchange": {"kind": "model_server", "staleness": "async", "shards": 2},
        "network": {"bandwidth": "1 Gbit/s", "latency": "200 us"},
        "simulation": {"payload": "small"},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values if isinstance(values, dict) else values
    return Topology.from_dict(document)


STEPS = 24
#: Three workers and some model servers, each on a host of its own. One run takes about 0.03 s of virtual time.
SERVERS = """
[job]
{length}
timeout = "5 s"
{job}
[[hosts]]
name = "h[1-3]"
address = "10.0.0.1"
slots = 1
[[hosts]]
name = "s[1-{servers}]"
address = "10.0.0.2"
slots = 1
[compute]
groups = 3
batch_size = {batch}
device = "modelled"
profile = "lenet"
bucket_size = "64 KiB"
noise = {{ kind = "normal", spread = 0.5 }}
[exchange]
kind = "model_server"
staleness = {staleness}
shards = {servers}
{exchange}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[simulation]
payload = "small"
time_limit = 120
[observe]
trace_steps = 0
"""
POLICIES = ['"async"', "{ bound = 0 }", "{ bound = 2 }", '"sync"']


def servers_topology(
    staleness: str, *, servers: int, epochs: bool = False, count: int = 2, job: str = "", exchange: str = ""
) -> Topology:
    """Of 24 steps; or of ``count`` epochs of ten steps each. ``job``, ``exchange``: more settings of these sections."""
    length, batch = (f"epochs = {count}", 2000) if epochs else (f"steps = {STEPS}", 128)
    text = SERVERS.format(staleness=staleness, length=length, batch=batch, job=job, servers=servers, exchange=exchange)
    return parse_topology(text)


PEERS_STEPS = 16
PEERS = """
[job]
steps = {steps}
timeout = "5 s"
elastic = true
{job}
[[hosts]]
name = "h[1-{hosts}]"
address = "10.0.0.1"
slots = 1
[compute]
groups = {groups}
group_size = {size}
batch_size = 128
device = "modelled"
profile = "lenet"
bucket_size = "64 KiB"
noise = {{ kind = "normal", spread = 0.5 }}
[data]
shuffle = "{shuffle}"
[exchange]
{exchange}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[simulation]
payload = "small"
time_limit = 120
[observe]
trace_steps = 0
"""


def peers_topology(exchange: str, *, groups: int = 2, size: int = 2, job: str = "", shuffle: str = "global") -> Topology:
    """Elastic groups of several workers without servers, of 16 steps. ``exchange``, ``job``: settings of these sections."""
    return parse_topology(
        PEERS.format(steps=PEERS_STEPS, exchange=exchange, groups=groups, size=size, hosts=groups * size, job=job, shuffle=shuffle)
    )


def teams_topology(staleness: str, *, groups: int = 2, size: int = 2, epochs: bool = False, job: str = "") -> Topology:
    """The same with groups of several workers."""
    length, batch = ("epochs = 1", 2000) if epochs else (f"steps = {STEPS}", 128)
    job = f"elastic = true\n{job}"
    text = SERVERS.format(staleness=staleness, length=length, batch=batch, job=job, servers=2, exchange="")
    text = text.replace('"h[1-3]"', f'"h[1-{groups * size}]"').replace("groups = 3", f"groups = {groups}\ngroup_size = {size}")
    return parse_topology(text)


def merged_topology(
    staleness: str, *, groups: int = 3, size: int = 1, epochs: bool = False, job: str = "", **exchange: Any
) -> Topology:
    """The same with an FC server, on a host of its own."""
    shape = teams_topology(staleness, groups=groups, size=size, epochs=epochs, job=job).model_dump(exclude_unset=True)
    shape["hosts"] = [*shape["hosts"], {"name": "f1", "address": "10.0.0.3", "slots": 1}]
    shape["exchange"] |= {"merged_fc": True, **exchange}
    return Topology.from_dict(shape)


def copied_topology(staleness: str, *, epochs: bool = False, count: int = 2, job: str = "", hosts: int = 2) -> Topology:
    """Three workers, two model servers and two FC servers, each with a copy of what another one has. ``hosts``: of FC servers."""
    base = servers_topology(staleness, servers=2, epochs=epochs, count=count, job=job, exchange="replicas = 1")
    shape = base.model_dump(exclude_unset=True)
    shape["hosts"] = [*shape["hosts"], {"name": f"f[1-{hosts}]", "address": "10.0.0.3", "slots": 1}]
    shape["exchange"] |= {"merged_fc": True}
    return Topology.from_dict(shape)


def run(shape: Topology, *faults: Fault) -> tuple[dict[str, list[int]], list[tuple[str, ...]], float]:
    """A whole run, in which nothing may break: the steps of each worker, the members after each change, and how long it took."""
    steps: dict[str, list[int]] = {}
    views: dict[str, list[tuple[str, ...]]] = {}

    def hear(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step":
                steps.setdefault(peer, []).append(event["step"])
            elif event["kind"] == "view":
                views.setdefault(peer, []).append(tuple(event["values"]["members"]))

    result = simulate(shape, options=Options(faults=faults, on_report=hear))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    return steps, max(views.values(), key=len, default=[]), result.seconds
