"""``python -m benchmarks replicas``: what it costs that model servers keep copies of each other's shards, simulated at 1 Gbit/s.

Four workers and four servers, each on a host of its own (or one of each together on four hosts; or, with a merged FC server, that
and its copy on hosts of their own, too). Nothing is lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.case import Case, case_of
from zmqtrain.errors import SimulationError

PEER = "replicas = 0"
#: Profiles, with the samples of a group and step.
MODELS = (("lenet", 64), ("alexnet", 64))
STALENESS = ("async", "sync")
#: Numbers of hosts, and what is on them.
SHAPES = {
    8: "servers on hosts of their own",
    4: "a worker and a server on each host",
    10: "a merged FC server, all servers on hosts of their own",
}
#: The first steps wait for connections, and are left out.
WARM = 2
STEPS = 12

_TOPOLOGY = """
[job]
name = "replicas"
steps = {steps}
timeout = "600 s"
[[hosts]]
name = "h[1-{hosts}]"
slots = 1
address = "10.0.0.1"
[compute]
groups = 4
batch_size = {batch}
device = "modelled"
profile = "{profile}"
[exchange]
kind = "model_server"
staleness = "{staleness}"
shards = 4
merged_fc = {merged}
replicas = {replicas}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[observe]
trace_steps = 0
"""


def bench_replicas(*, models: Sequence[tuple[str, int]] = MODELS) -> Iterator[Case]:
    """Step times, and bytes that all roles send in a run, by the number of the step's groups."""
    for profile, batch in models:
        for staleness in STALENESS:
            for hosts, where in SHAPES.items():
                one, two = (simulated(profile, batch, staleness, hosts, replicas) for replicas in (0, 1))
                name = f"{profile}, {staleness}, {where}"
                yield case_of("replicas", f"step of {name}", 1e3 * two[0], "ms", PEER, 1e3 * one[0], digits=3)
                yield case_of("replicas", f"bytes of a group and step of {name}", two[1] / 1e6, "MB", PEER, one[1] / 1e6, digits=2)


def simulated(profile: str, batch: int, staleness: str, hosts: int, replicas: int) -> tuple[float, float]:
    """Mean seconds of a step, and the bytes that all roles send for a step of a group, on virtual time. (What servers send each
    other at the beginning counts, too.)"""
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology

    seconds: list[float] = []
    sent: dict[str, int] = {}

    def hear(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step" and event["step"] >= WARM:
                seconds.append(float(event["values"]["seconds"]))
            elif event["kind"] == "traffic":
                sent[peer] = int(event["values"]["bytes_sent"])

    text = _TOPOLOGY.format(
        steps=STEPS,
        hosts=hosts,
        batch=batch,
        profile=profile,
        staleness=staleness,
        replicas=replicas,
        merged="true" if hosts == 10 else "false",
    )
    result = simulate(parse_topology(text), options=Options(on_report=hear))
    if result.ending.status != "done":
        raise SimulationError(f"the simulated job failed: {result.ending.error}")
    return statistics.fmean(seconds), sum(sent.values()) / (STEPS * 4)
