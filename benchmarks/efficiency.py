"""``python -m benchmarks efficiency``: predicted step times beside measured ones, by number of groups; what a processor reaches.

The paper's figure by whole simulated runs with a merged FC server; uneven hosts with even and with measured parts; the convolutions
of a small network beside this processor's products of matrices; and all numbers of groups of workers in real processes, which take
the times of networks that were measured here just before, on an emulated network in slow motion.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, case_of
from benchmarks.models import cifarnet
from examples.mnist import lenet
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.plan.efficiency import Efficiency, PaperModel, divisors, efficiency
from zmqtrain.plan.group_step import AS_IT_IS, variants
from zmqtrain.plan.setup import source_of
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology

#: What there is, in this order: `--part`.
PARTS = ("figure", "uneven", "lenet", "lenet-merged", "cifarnet", "cifarnet-merged")
WORKERS = (2, 4, 8)
#: Groups that begin together send together at first, and take turns at the servers' NIC only after some 15 steps. What is measured
#: begins after more than that, as a share of a run.
STEPS, SETTLED, OVER = 60, 0.4, 0.9
#: What emulated NICs let through at once, 2 ms of their rate, is a sixteenth of that as reported; what ten processes need of two
#: processors a third.
DILATION = 16.0
SHAPES = {"LeNet": (lenet, (1, 28, 28)), "CIFARNet": (cifarnet, (3, 32, 32))}
#: Samples of which the share of the peak is told.
SAMPLES = 64
#: Of the data that profiles are made of: a step of the most groups.
DATA = 8 * 128

#: Workers and the server on hosts of their own. Times vary as little as a processor's do.
_GROUPS = """
[job]
name = "efficiency"
steps = {steps}
[[hosts]]
name = "node[1-{workers}]"
slots = 1
[[hosts]]
name = "server"
slots = 1
[compute]
groups = {groups}
group_size = {size}
batch_size = 128
device = "modelled"
profile = "{profile}"
bucket_size = "512 KiB"
noise = {{ kind = "normal", spread = 0.05 }}
[exchange]
kind = "model_server"
merged_fc = {merged}
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
dilation = {dilation}
[plan]
pricing = "paper"
"""

#: The paper's (section 5.1.1, figure 20): t_conv(32) = 5.7 t_fc by the network, and enough arithmetic to keep 4 groups of 8 busy.
MACHINES, BATCH, FC_S = 32, 64, 0.1
PAPER = PaperModel(machines=MACHINES, conv_compute_s=20 * FC_S, conv_network_s=5.7 / 32 * FC_S, fc_s=FC_S)
_FIGURE = """
[job]
name = "figure"
steps = {steps}
[[hosts]]
name = "node[1-32]"
slots = 1
[[hosts]]
name = "server"
slots = 2
[compute]
groups = {groups}
group_size = {size}
batch_size = 64
device = "modelled"
profile = "{profile}"
[exchange]
kind = "model_server"
merged_fc = true
[network]
bandwidth = "100 Gbit/s"
latency = "1 us"
[simulation]
payload = "phantom"
"""

_UNEVEN = """
[job]
name = "uneven"
steps = 40
[[hosts]]
name = "quick"
slots = 1
[[hosts]]
name = "slow"
slots = 1
[compute]
group_size = 2
batch_size = 64
device = "modelled"
profile = "googlenet"
parts = "{parts}"
[exchange]
kind = "allreduce"
[network]
bandwidth = "2 Gbit/s"
latency = "50 us"
hosts = [{{ name = "slow", slowdown = 2.0 }}]
"""


def bench_efficiency(
    *, parts: Sequence[str] = PARTS, workers: Sequence[int] = WORKERS, steps: int = STEPS, dilation: float = DILATION
) -> Iterator[Case]:
    """A case for each number of groups, and for the others. The ratio is measured by predicted, or as the case says.

    Raises `UsageError` for a part that there is not."""
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UsageError(f"benchmark efficiency has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "figure" in parts:
            yield from _figure(folder)
        if "uneven" in parts:
            yield _uneven(folder)
        for network in SHAPES:
            ways = [part.endswith("-merged") for part in PARTS if part in parts and part.split("-")[0] == network.lower()]
            profile = folder / f"{network}.json"
            if ways:
                yield from _measured(network, profile)
            for merged in ways:
                yield from _all_groups(network, profile, merged, workers, steps, dilation)


def _figure(folder: Path) -> Iterator[Case]:
    """Simulated runs with a merged FC server, whose times are the paper's."""
    profile = folder / "figure.json"
    profile.write_text(json.dumps(paper_profile()), encoding="utf-8")
    for groups in divisors(MACHINES):
        text = _FIGURE.format(steps=max(8, 2 * groups), groups=groups, size=MACHINES // groups, profile=profile)
        seconds = simulated_s(parse_topology(text))
        predicted_s = efficiency(PAPER.step(groups)).seconds
        yield _beside(f"the paper's figure, {groups} group(s), in t_fc", seconds / FC_S, "", predicted_s / FC_S)


def paper_profile() -> dict[str, Any]:
    """A profile whose t_conv(k) and t_fc are those of `PAPER`, for groups of 1, 2, 4, ... workers."""
    sizes = [
        {"samples": BATCH // size, "conv_s": PAPER.conv_s(size), "fc_s": FC_S * BATCH // size / BATCH}
        for size in reversed(divisors(MACHINES))
    ]
    conv = {"name": "conv", "numel": 1000, "flops_forward": 10**6, "activation_numel": 16, "phase": "conv"}
    fc = {"name": "fc", "numel": 1000, "flops_forward": 2000, "phase": "fc", "kind": "linear"}
    whole_s = PAPER.conv_s(1)
    return {
        "layers": [
            {**conv, "forward_s": whole_s / 3, "backward_s": 2 * whole_s / 3},
            {**fc, "forward_s": FC_S / 3, "backward_s": 2 * FC_S / 3},
        ],
        "batch_size": BATCH,
        "measured": {"fc_from": "fc", "sizes": sizes},
    }


def simulated_s(topology: Topology) -> float:
    """Seconds of an update in the middle of a simulated run."""
    ends: list[float] = []
    options = Options(on_report=lambda _, batch: ends.extend(each["time"] for each in batch if each.get("kind") == "step"))
    ending = simulate(topology, options=options).ending
    if ending.status != "done":
        raise ZmqTrainError(f"the simulated run ended so: {ending.error}")
    return update_s(ends, topology.compute.group_size)


def update_s(ends: list[float], size: int, *, begin: float = 0.25, end: float = 0.75) -> float:
    """Between these shares of a run, from when each worker's steps ended."""
    ends.sort()
    first, last = ends[int(begin * len(ends))], ends[int(end * len(ends))]
    return (last - first) * size / sum(first < each <= last for each in ends)


def _uneven(folder: Path) -> Case:
    """Throughput, measured parts by even ones."""
    rates = {}
    for parts in ("even", "measured"):
        ends = _launched(_UNEVEN.format(parts=parts), folder / f"uneven-{parts}")
        rates[parts] = 64 / update_s(ends, 2)
    return _beside("two hosts, one half as fast: measured parts", rates["measured"], "samples/s", rates["even"], peer="even parts")


def _measured(network: str, profile: Path) -> Iterator[Case]:
    """Profile a network here, with one thread: how its convolutions compare with products of matrices."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from zmqtrain.heap import keep_memory
    from zmqtrain.plan.measure.model import ModelBench
    from zmqtrain.plan.measure.profile import Asked, profile_task
    from zmqtrain.train.task import Task

    keep_memory()
    model, shape = SHAPES[network]
    seeded = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(DATA, *shape, generator=seeded), torch.randint(0, 10, (DATA,), generator=seeded))
    task = Task(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=data,
    )
    asked = Asked(batches=(16, 32, 64, 128), batch=SAMPLES, threads=1)
    found = profile_task(ModelBench(task, torch.device("cpu"), channels_last=True), asked, name=network)
    profile.write_text(json.dumps(found.to_values()), encoding="utf-8")
    measured = found.known()
    rate = measured.conv_share * measured.peak_flops
    case = f"{network}'s convolutions, forward and backward, one thread"
    for peer, flops in (("torch.mm", measured.sgemm_flops), ("the fastest product", measured.peak_flops)):
        yield _beside(case, rate / 1e9, "GFLOP/s", flops / 1e9, peer=peer)


def _all_groups(network: str, profile: Path, merged: bool, workers: Sequence[int], steps: int, dilation: float) -> Iterator[Case]:
    way = "merged FC server" if merged else "model server"
    errors = []
    for number in workers:
        for groups in divisors(number):
            values = {"steps": steps, "workers": number, "groups": groups, "size": number // groups, "profile": profile}
            text = _GROUPS.format(**values, merged=str(merged).lower(), dilation=dilation)
            predicted = predicted_of(parse_topology(text))
            ends = _launched(text, folder_of(profile, number, groups, merged))
            measured_s = update_s(ends, number // groups, begin=SETTLED, end=OVER)
            errors.append(abs(predicted.seconds / measured_s - 1))
            case = f"{network}, {way}, {number} workers in {groups} group(s): an update, {predicted.bottleneck}"
            yield _beside(case, measured_s * 1e3, "ms", predicted.seconds * 1e3)
    case = f"{network}, {way}: mean error of the predictions (worst: {max(errors):.1%})"
    yield case_of("efficiency", case, 100 * sum(errors) / len(errors), "%")


def predicted_of(topology: Topology) -> Efficiency:
    """What `zmqtrain plan` says of the file's own number of groups."""
    model = variants(topology, source_of(topology).layers)[AS_IT_IS]
    return efficiency(model.step(topology.compute.groups))


def folder_of(profile: Path, workers: int, groups: int, merged: bool) -> Path:
    return profile.with_name(f"{profile.stem}-{workers}-{groups}-{merged}")


@dataclass(frozen=True, slots=True)
class _Job:
    file: Path
    run: Path


def _launched(text: str, folder: Path) -> list[float]:
    """When each worker's steps ended, in an emulated launch."""
    folder.mkdir()
    job = _Job(folder / "job.toml", folder / "run")
    job.file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zmqtrain", "launch", str(job.file), "--emulate", "--run-dir", str(job.run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ZmqTrainError(f"zmqtrain launch failed: {done.stderr.strip()[-500:]}")
    events = map(json.loads, (job.run / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [float(event["time"]) for event in events if event["kind"] == "step"]


def _beside(case: str, value: float, unit: str, peer_value: float, peer: str = "predicted") -> Case:
    return case_of("efficiency", case, value, unit, peer, peer_value, "value/peer")
