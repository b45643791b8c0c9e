"""``python -m benchmarks cluster``: four machines that one logs in to, with NICs of 1 Gbit/s, all on this one. For root.

How long a launch takes until the first step; how much of the link each exchange uses when there is more to send than to compute,
beside iperf3; steps a second beside DistributedDataParallel with gloo, both with modelled devices; and whether training across
machines ends where training on one does. Connections are in plain text but for the launch: encryption of four machines' traffic is
more than the processors of one have time for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, case_of
from benchmarks.ranks import said_by_first
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.launcher.namespaces import NoNamespacesError
from zmqtrain.testing.machines import Machines, machines
from zmqtrain.train.device.profile import Profile

#: Of the checkout, with the examples.
ROOT = Path(__file__).parents[1]
HOSTS = 4
#: Payload bytes a second of each NIC, as `Namespaces` counts them: 1 Gbit/s.
NIC = 125e6
PARTS = ("launch", "links", "ddp", "accuracy")
#: Of each exchange; the first ones, which still hear of the first parameters, do not count.
STEPS, LEFT_OUT = 6, 2
DDP_STEPS = 12
IPERF_S = 4
PATIENCE_S = 400.0

_JOB = """
[job]
name = "bench"
steps = {steps}
timeout = "120 s"
transport_encryption = "{encryption}"
oversubscribe = true
{job}
[engine]
kind = "{engine}"
{sync}
[compute]
{compute}
[exchange]
{exchange}
[observe]
events_per_s = "all"
"""
_GROUP, _GROUPS = f"group_size = {HOSTS}", f"groups = {HOSTS}"
#: For each exchange: how workers form groups, its section, and the bytes that a host sends in a step, over the model's.
EXCHANGES: dict[str, tuple[str, str, float]] = {
    "model servers": (_GROUPS, f'kind = "model_server"\nstaleness = "sync"\nshards = {HOSTS}', 2 * (HOSTS - 1) / HOSTS),
    "gossip": (_GROUPS, 'kind = "gossip"', 1.0),
    "allreduce": (_GROUP, 'kind = "allreduce"', 2 * (HOSTS - 1) / HOSTS),
}
_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    return Task(
        model=lambda: nn.Linear(64, 10),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=TensorDataset(torch.randn(256, 64), torch.randint(10, (256,))),
    )
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """A launch that has ended."""

    first_step_s: float
    """From the command to the end of the first step."""
    steps_s: dict[int, list[float]]
    """Seconds of each step, by worker."""
    summary: dict[str, Any]

    def step_s(self) -> float:
        """The mean of the steps that count."""
        return statistics.fmean(statistics.fmean(seconds[LEFT_OUT:]) for seconds in self.steps_s.values())


def bench_cluster(parts: Sequence[str] = PARTS, *, data: str | None = None) -> Iterator[Case]:
    """The cases of some parts. ``data``: a folder with MNIST, for accuracy, which is left out without. Raises `UsageError`."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"benchmark cluster has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as folder:
        try:
            with machines(HOSTS, Path(folder), NIC, kind=Machines) as cluster:
                if "launch" in parts:
                    yield from _launch(cluster)
                if "links" in parts:
                    yield from _links(cluster)
                if "ddp" in parts:
                    yield from _ddp(cluster)
                if "accuracy" in parts and data is not None:
                    yield from _accuracy(cluster, data)
        except NoNamespacesError as error:
            print(f"left out: {error}", file=sys.stderr)


def _launch(cluster: Machines) -> Iterator[Case]:
    (cluster.folder / "task.py").write_text(_TASK)
    job = 'task = "task.py:task"'
    ran = _run(cluster, _GROUP + "\nbatch_size = 64", 'kind = "allreduce"', steps=3, job=job, encryption="auto", sync="sync = true")
    yield case_of("cluster", f"launch on {HOSTS} machines, encrypted, to the end of the first step", ran.first_step_s, "s")


def _links(cluster: Machines) -> Iterator[Case]:
    """VGG-16: 553 MB, and arithmetic of 0.4 s."""
    peer = _iperf(cluster)
    nbytes = 4 * Profile.load("vgg16").numel
    for name, (shape, exchange, share) in EXCHANGES.items():
        ran = _run(cluster, _modelled("vgg16", shape), exchange)
        value = 8e-6 * share * nbytes / ran.step_s()
        yield case_of("cluster", f"link use, VGG-16, {name}", value, "Mbit/s", "iperf3", peer, "value/peer")


def _ddp(cluster: Machines) -> Iterator[Case]:
    """AlexNet: 244 MB, and arithmetic of 0.2 s."""
    peer = 1 / _ddp_step_s(cluster, "alexnet", 32)
    for name in ("allreduce", "gossip"):
        shape, exchange, _ = EXCHANGES[name]
        value = 1 / _run(cluster, _modelled("alexnet", shape), exchange, steps=DDP_STEPS).step_s()
        yield case_of("cluster", f"steps a second, AlexNet, {name}", value, "1/s", "DDP with gloo", peer, "value/peer")


def _accuracy(cluster: Machines, data: str) -> Iterator[Case]:
    """LeNet on MNIST, one epoch."""
    job = f'task = "{ROOT}/examples/mnist.py:task"\nargs = {{ lr = 0.05, momentum = 0.9, steps = 468 }}'
    for name, (shape, exchange, _) in EXCHANGES.items():
        found = {}
        for engine in ("local", "ssh"):
            size = 32 if shape == _GROUPS else 32 * HOSTS
            compute = f"{shape}\nbatch_size = {size}\nthreads = 1"
            ran = _run(cluster, compute, exchange, steps=468, job=job, engine=engine, data=data)
            found[engine] = 100 * float(ran.summary["eval"]["eval_accuracy"])
        there, here = found["ssh"], found["local"]
        yield case_of("cluster", f"test accuracy, MNIST, 1 epoch, {name}", there, "%", "on one machine", here, "value/peer")


def _modelled(profile: str, shape: str) -> str:
    batch = 32 * HOSTS if shape == _GROUP else 32
    return f'{shape}\ndevice = "modelled"\nprofile = "{profile}"\nbatch_size = {batch}'


# What is started --------------------------------------------------------------------------------------------------------------


def _run(
    cluster: Machines,
    compute: str,
    exchange: str,
    *,
    steps: int = STEPS,
    job: str = "",
    encryption: str = "disabled",
    sync: str = "",
    engine: str = "ssh",
    data: str | None = None,
) -> Ran:
    """Launch a job on the machines, or with ``engine`` local in as many process sets on this one."""
    head = _JOB.format(
        **{"steps": steps, "job": job, "encryption": encryption, "engine": engine, "sync": sync},
        **{"compute": compute, "exchange": exchange},
    )
    hosts = cluster.hosts() if engine == "ssh" else f'[[hosts]]\nname = "m[1-{HOSTS}]"\nslots = 1\n'
    with tempfile.TemporaryDirectory(dir=cluster.folder) as name:
        folder = Path(name)
        (folder / "bench.toml").write_text(head + hosts)
        if (cluster.folder / "task.py").exists():
            (folder / "task.py").write_text(_TASK)
        words = [sys.executable, "-m", "zmqtrain", "launch", "--json", "--run-dir", "run", "bench.toml"]
        began = time.time()
        command = words if data is None else [*words[:4], "--data", str(Path(data).absolute()), *words[4:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise ZmqTrainError(f"the launch failed with code {done.returncode}:\n{done.stderr[-2000:]}")
        summary = json.loads((folder / "run" / "summary.json").read_text())
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    taken = [event for event in events if event["kind"] == "step"]
    seconds: dict[int, list[float]] = {}
    for event in taken:
        seconds.setdefault(event["rank"], []).append(float(event["values"]["seconds"]))
    first = max(event["time"] for event in taken if event["step"] == 0)
    return Ran(first - began, seconds, summary)


def _iperf(cluster: Machines) -> float:
    """What iperf3 carries from one machine to another, in Mbit/s."""
    one, other = cluster.names[:2]
    server = subprocess.Popen(cluster.namespaces.command(other, ("iperf3", "-s", "-1")), stdout=subprocess.DEVNULL)
    try:
        client = ("iperf3", "-c", cluster.address(other), "-t", str(IPERF_S), "-O", "1", "-J", "--connect-timeout", "5000")
        for _ in range(20):  # until it listens
            done = subprocess.run(cluster.namespaces.command(one, client), capture_output=True, text=True, timeout=60, check=False)
            ended = json.loads(done.stdout)["end"] if done.returncode == 0 else {}
            if "sum_received" in ended:
                return float(ended["sum_received"]["bits_per_second"]) / 1e6
            time.sleep(0.1)
        raise ZmqTrainError(f"iperf3 failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    finally:
        server.kill()
        server.wait()


def _ddp_step_s(cluster: Machines, profile: str, batch: int) -> float:
    """The mean of a step of DistributedDataParallel with gloo on the machines."""
    program = [sys.executable, "-m", "benchmarks.ddp", profile, str(batch), str(DDP_STEPS)]

    def start(number: int, name: str) -> subprocess.Popen[str]:
        variables = {
            **{"RANK": str(number), "WORLD_SIZE": str(HOSTS), "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": cluster.address(cluster.names[0]), "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)},
        }
        words = ["env", *(f"{key}={value}" for key, value in variables.items()), *program]
        command = cluster.namespaces.command(name, words)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    starts = (start(*each) for each in enumerate(cluster.names))
    seconds: list[float] = said_by_first(starts, "DistributedDataParallel", timeout_s=PATIENCE_S)
    return statistics.fmean(seconds[LEFT_OUT:])
