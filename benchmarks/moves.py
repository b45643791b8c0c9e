"""``python -m benchmarks moves``: what it costs that a host with a model server leaves while training goes on, simulated.

At 1 Gbit/s. Four workers and four servers, each on a host of its own. The first server's host is asked to leave in the middle of
the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, case_of
from zmqtrain.errors import SimulationError

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology

PEER = "nothing moves"
#: Profiles, with the samples of a group and step.
MODELS = (("lenet", 64), ("alexnet", 64))
STALENESS = ("async", "sync")
STEPS, ASKED_AT = 24, 10
#: The first steps wait for connections and first copies, and are left out.
WARM = 4

_TOPOLOGY = """
[job]
name = "moves"
steps = {steps}
timeout = "600 s"
elastic = true
[[hosts]]
name = "h[1-8]"
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
replicas = {replicas}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[observe]
trace_steps = 0
"""


@dataclass(slots=True)
class Seen:
    """What a run has shown."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    """When each worker's steps began, and how long they took."""
    asked_s: float = 0.0
    left_s: float = 0.0
    copied: int = 0
    """Bytes that servers gave each other as copies, after the host was asked to leave."""


def bench_moves(*, models: Sequence[tuple[str, int]] = MODELS) -> Iterator[Case]:
    """How long until the host has left, what was copied for that, and what it does to steps: the longest one, and those that three
    servers serve afterwards."""
    for profile, batch in models:
        for staleness in STALENESS:
            for replicas in (0, 1):
                text = _TOPOLOGY.format(steps=STEPS, batch=batch, profile=profile, staleness=staleness, replicas=replicas)
                still, moved = seen(text, leaves=False), seen(text, leaves=True)
                name = f"{profile}, {staleness}, replicas = {replicas}"
                yield case_of("moves", f"until the host has left: {name}", moved.left_s - moved.asked_s, "s", digits=4)
                yield case_of("moves", f"copied: {name}", moved.copied / 1e6, "MB", digits=2)
                usual = 1e3 * statistics.fmean(seconds for _, seconds in still.steps)
                longest = 1e3 * max(seconds for _, seconds in moved.steps)
                yield case_of("moves", f"longest step: {name}", longest, "ms", PEER, usual, digits=1)
                after = 1e3 * statistics.fmean(seconds for began_s, seconds in moved.steps if began_s > moved.left_s)
                yield case_of("moves", f"steps afterwards: {name}", after, "ms", PEER, usual, digits=1)


def seen(text: str, *, leaves: bool) -> Seen:
    """One run on virtual time."""
    import asyncio

    from zmqtrain.run.faults import drain
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology
    from zmqtrain.topology.placement import place

    topology: Topology = parse_topology(text)
    host = place(topology).server_roles[0].host
    found = Seen()

    def now() -> float:
        return asyncio.get_running_loop().time()

    def happens(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "moves" and not found.asked_s:
            found.asked_s = now()
        elif kind == "leave" and values["peer"] == f"agent/{host}" and found.asked_s:
            found.left_s = now()

    def hear(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            values = event.get("values") or {}
            if event["kind"] == "step" and event["step"] >= WARM:
                found.steps.append((event["time"] - values["seconds"], float(values["seconds"])))
            elif event["kind"] == "copied" and found.asked_s and event["time"] > found.asked_s:
                found.copied += int(values["bytes"])

    faults = [drain(host, step=ASKED_AT)] if leaves else []
    result = simulate(topology, options=Options(faults=faults, on_event=happens, on_report=hear))
    if result.ending.status != "done" or leaves is not (found.left_s > 0):
        raise SimulationError(f"the simulated job failed: {result.ending.error}")
    return found
