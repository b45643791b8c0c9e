"""``python -m benchmarks emulate``: emulated networks beside the figures that they are to have.

Between two processes on two emulated hosts: goodput of a bulk transfer, and round trips of small messages, for each way of shaping.
Then whole launches, in slow motion and not: the time of a step must come out the same.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.case import Case, case_of
from benchmarks.processes import Place, run_processes, together
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.launcher.emulate import Emulation, ShapingKind, emulated
from zmqtrain.net.loop import Dilation
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shaping import Shaping
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.wire.tensor import TensorPayload

BANDWIDTHS = (100e6, 1e9, 5e9)
LATENCY_S = 200e-6
WAYS: tuple[ShapingKind, ...] = ("paced", "namespaces")
LEFT, RIGHT = "worker/0", "worker/1"
TENSORS = 21
#: Of the network's time, for all tensors of a case.
TRANSFER_S = 2.0
TRIPS = 300
DILATIONS = (1.0, 4.0, 10.0)
STEPS = 8
WAIT_S = 60.0

_TWO_HOSTS = """
[job]
name = "bench"
oversubscribe = true
[[hosts]]
name = "left"
slots = 1
[[hosts]]
name = "right"
slots = 1
[compute]
group_size = 2
[network]
bandwidth = {bandwidth}
latency = {latency}
dilation = {dilation}
"""

_JOB = """
[job]
name = "bench"
steps = {steps}
oversubscribe = true
[[hosts]]
name = "host[0-2]"
slots = 1
[compute]
groups = 2
device = "modelled"
batch_size = 16
profile = "googlenet"
[exchange]
kind = "model_server"
staleness = "sync"
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
dilation = {dilation}
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the two processes do."""

    tensors: int
    tensor_bytes: int
    trips: int


@dataclass(frozen=True, slots=True)
class Measured:
    """On the loop's clock."""

    transfer_s: float
    """From the first tensor's arrival to the last's."""
    trips_s: list[float]


def bench_emulate(
    *,
    bandwidths: Sequence[float] = BANDWIDTHS,
    transfer_s: float = TRANSFER_S,
    trips: int = TRIPS,
    dilations: Sequence[float] = DILATIONS,
    steps: int = STEPS,
) -> Iterator[Case]:
    """A case for each way of shaping and figure; ways that this machine does not have are left out, with a line that says why."""
    bare_s = _trip_without_network(trips)
    yield case_of("emulate", "round trip without a network", 1e6 * bare_s, "us")
    for shaping in WAYS:
        try:
            for bandwidth in bandwidths:
                yield from _network(shaping, bandwidth, transfer_s, trips, 1.0, bare_s)
            yield from _network(shaping, max(bandwidths), transfer_s, trips, 4.0, bare_s)
        except UsageError as error:
            print(f"left out: {error}", file=sys.stderr)
    for way in WAYS:
        usual: float | None = None
        for dilation in dilations:
            seconds = _launch(_JOB.format(steps=steps, dilation=dilation), way)
            if seconds is None:
                break
            usual = usual or seconds
            case = f"GoogLeNet's step at 1 Gbit/s, {way}, dilation {dilation:g}"
            yield case_of("emulate", case, 1e3 * seconds, "ms", f"dilation {dilations[0]:g}", 1e3 * usual, "value/peer")


def _trip_without_network(trips: int) -> float:
    """What a round trip takes the endpoints themselves."""
    plan = Plan(1, 4, trips)
    left, _ = run_processes([(LEFT, plan), (RIGHT, plan)], _measure)
    return statistics.median(left.trips_s)


def _network(way: ShapingKind, bandwidth: float, transfer_s: float, trips: int, dilation: float, bare_s: float) -> Iterator[Case]:
    plan = Plan(TENSORS, int(bandwidth / 8 * transfer_s / TENSORS) // 4 * 4, trips)
    left, right = asyncio.run(_measured(way, bandwidth, dilation, plan))
    goodput = 8 * plan.tensor_bytes * (plan.tensors - 1) / right.transfer_s
    words = f"{bandwidth / 1e6:g} Mbit/s, {way}" + (f", dilation {dilation:g}" if dilation != 1 else "")
    yield case_of("emulate", f"goodput at {words}", goodput / 1e6, "Mbit/s", "the file's figure", bandwidth / 1e6, "value/peer")
    trip = statistics.median(left.trips_s)
    expected_s = 2 * LATENCY_S + bare_s / dilation
    yield case_of(
        "emulate", f"round trip at {words}", 1e6 * trip, "us", "2 x latency + the endpoints' own", 1e6 * expected_s, "value/peer"
    )


async def _measured(way: ShapingKind, bandwidth: float, dilation: float, plan: Plan) -> tuple[Measured, Measured]:
    topology = parse_topology(_TWO_HOSTS.format(bandwidth=bandwidth, latency=LATENCY_S, dilation=dilation))
    emulation = Emulation(way, Dilation.beginning_now(dilation))
    async with emulated(topology, place(topology), emulation) as (engine, _):
        places = []
        for peer, host in ((LEFT, "left"), (RIGHT, "right")):
            shaping = Shaping.load(str(engine.plan), peer)
            settings = replace(NetSettings(), host=engine.address_of(host), shaping=shaping)
            namespace = "" if engine.namespaces is None else engine.namespaces.namespace_of(host)
            places.append(Place(settings, emulation.dilation, namespace))
        left, right = await asyncio.to_thread(run_processes, [(LEFT, plan), (RIGHT, plan)], _measure, places)
    return left, right


async def _measure(node: Node, plan: Plan) -> Measured:
    clock = asyncio.get_running_loop().time
    other = RIGHT if node.peer == LEFT else LEFT

    async def answer(_caller: str) -> None:
        return None

    node.serve("answer", answer)
    await together(node, other, "begin")
    trips: list[float] = []
    if node.peer == LEFT:
        for _ in range(plan.trips):
            start = clock()
            await node.request(RIGHT, "answer", timeout=WAIT_S)
            trips.append(clock() - start)
    await together(node, other, "transfer")
    payload = TensorPayload.of(np.ones(plan.tensor_bytes // 4, np.float32))
    arrivals: list[float] = []
    for index in range(plan.tensors):
        if node.peer == LEFT:
            await node.send(other, ("tensor", index), payload)
        else:
            async with asyncio.timeout(WAIT_S):
                await node.receive(other, ("tensor", index), into=payload)
            arrivals.append(clock())
    await together(node, other, "end")
    return Measured(arrivals[-1] - arrivals[0] if arrivals else 0.0, trips)


def _launch(topology: str, way: ShapingKind) -> float | None:
    """The median time of a step; ``None`` where this way of shaping cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder) / "topology.toml", Path(folder) / "run"
        file.write_text(topology)
        command = (sys.executable, "-m", "zmqtrain", "launch", str(file), "--emulate", "--shaping", way, "--run-dir", str(run))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if "--shaping namespaces:" in done.stderr:
            return None
        if done.returncode:
            raise ZmqTrainError(f"the launch failed:\n{done.stderr}")
        summary = json.loads((run / "summary.json").read_text())
    return float(summary["step_s"]["median"])
