"""``python -m benchmarks gossip``: how much of a step gossip costs, beside an all-reduce of the same job, simulated and emulated.

The settings are those of GossipGraD's evaluation (Daily et al. 2018): ResNet-50 at 96 ms a step and weak scaling, on a network
where two peers exchange the model in 27 ms; LeNet and CIFARNet on an InfiniBand-like network and on Ethernet.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.case import Case, case_of
from zmqtrain.errors import SimulationError, ZmqTrainError

Kind: TypeAlias = Literal["gossip", "allreduce"]

PEER = "all-reduce (AGD)"
#: Workers of the simulated weak scaling. An all-reduce of 256 workers takes minutes to simulate, gossip of 4,096 does.
WORKERS = (4, 16, 64)
EMULATED = (4, 8)
#: The first steps wait for connections, and are left out.
WARM = 2
STEPS = 10
#: Slow motion, so that this machine can carry the network of all hosts.
DILATION = 40.0


@dataclass(frozen=True, slots=True)
class Network:
    """Links of a cluster."""

    name: str
    bandwidth: str
    latency: str


#: 102 MB in 27 ms.
CLUSTER = Network("30 Gbit/s", "30.3 Gbit/s", "2 us")
NETWORKS = (Network("InfiniBand-like, 56 Gbit/s", "56 Gbit/s", "2 us"), Network("10 Gbit/s", "10 Gbit/s", "20 us"))

_TOPOLOGY = """
[job]
name = "gossip"
steps = {steps}
timeout = "{timeout}"
[[hosts]]
name = "n[0001-{workers:04d}]"
slots = 1
address = "{address}"
[compute]
groups = {workers}
batch_size = {batch}
device = "modelled"
profile = "{profile}"
bucket_size = "{bucket}"
[exchange]
kind = "{kind}"
[network]
bandwidth = "{bandwidth}"
latency = "{latency}"
dilation = {dilation:g}
[observe]
trace_steps = 0
"""


def bench_gossip(*, workers: Sequence[int] = WORKERS, emulated: Sequence[int] = EMULATED) -> Iterator[Case]:
    """Compute efficiency of ResNet-50 at so many simulated and emulated workers, and step times of LeNet and CIFARNet at 32.

    Efficiency is the time of one worker's step alone over that of a step of all. The peer is the layer-wise all-reduce (AGD).
    """
    alone_s = simulated("gossip", 1, "resnet50", 32, CLUSTER)
    for count in workers:
        gossip, allreduce = (simulated(kind, count, "resnet50", 32, CLUSTER) for kind in ("gossip", "allreduce"))
        yield _efficiency(f"ResNet-50, {count} simulated workers", alone_s, gossip, allreduce)
    for count in emulated:
        gossip, allreduce = (launched(kind, count) for kind in ("gossip", "allreduce"))
        yield _efficiency(f"ResNet-50, {count} emulated workers", launched("gossip", 1), gossip, allreduce)
    for network in NETWORKS:
        for profile in ("lenet", "cifarnet"):
            gossip, allreduce = (simulated(kind, 32, profile, 64, network) for kind in ("gossip", "allreduce"))
            yield case_of("gossip", f"step of {profile}, 32 workers, {network.name}", 1e3 * gossip, "ms", PEER, 1e3 * allreduce)


def simulated(
    kind: Kind, workers: int, profile: str, batch: int, network: Network, *, bucket: str = "4 MiB", steps: int = STEPS
) -> float:
    """Mean seconds of a step on virtual time."""
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology

    seconds: list[float] = []

    def hear(_peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        seconds.extend(_seconds(events))

    text = _text(kind, workers, profile, batch, network, bucket=bucket, steps=steps, address="10.0.0.1")
    result = simulate(parse_topology(text), options=Options(on_report=hear))
    if result.ending.status != "done":
        raise SimulationError(f"the simulated job failed: {result.ending.error}")
    return statistics.fmean(seconds)


def launched(kind: Kind, workers: int) -> float:
    """Mean seconds of ResNet-50's step in real processes on an emulated network."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "gossip.toml"
        file.write_text(_text(kind, workers, "resnet50", 32, CLUSTER, dilation=DILATION, address="localhost"))
        command = [sys.executable, "-m", "zmqtrain", "launch", str(file), "--emulate", "--run-dir", str(folder / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ZmqTrainError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
        return statistics.fmean(_seconds([json.loads(line) for line in lines]))


def _text(
    kind: Kind, workers: int, profile: str, batch: int, network: Network, *, bucket: str = "4 MiB", steps: int = STEPS,
    dilation: float = 1.0, address: str,
) -> str:  # fmt: skip
    return _TOPOLOGY.format(
        kind=kind, workers=workers, profile=profile, batch=batch, bandwidth=network.bandwidth, latency=network.latency,
        bucket=bucket, steps=steps, dilation=dilation, address=address, timeout="60 s",
    )  # fmt: skip


def _seconds(events: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(event["values"]["seconds"]) for event in events if event.get("kind") == "step" and event["step"] >= WARM]


def _efficiency(case: str, alone_s: float, gossip_s: float, allreduce_s: float) -> Case:
    return case_of(
        "gossip", f"efficiency of {case}", 100 * alone_s / gossip_s, "%", PEER, 100 * alone_s / allreduce_s, "value/peer"
    )
