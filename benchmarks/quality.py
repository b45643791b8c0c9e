"""``python -m benchmarks quality --data DIR [--peers-python PYTHON]``: time to the same validation loss, beside what people use.

Four machines behind NICs of 100 Mbit/s and of 1 Gbit/s (network namespaces on this one; for root, with sshd) train CIFARNet on
CIFAR-10, and a small transformer on Shakespeare: with each of our exchanges and with ``groups = "auto"``, with
DistributedDataParallel and gloo, and, where PYTHON has torchft and hivemind (and our dependencies), with torchft's LocalSGD and
DiLoCo and with hivemind's Optimizer. Model, data, batch of a worker, samples evaluated and machines are the same
(benchmarks/quality_task.py); each peer is set up as its own documentation shows (benchmarks/quality_peer.py).

The clock runs from the first step to the first evaluation at or below the problem's loss; for ``auto``, whose search is part of it,
from the command on. All take their learning rate by the same rule: of the problem's rates, the one that is fastest with seed 1;
with it seeds 2 and 3 are run, and the median of the three counts. A run that takes longer than `CAP_S` counts as such.

Connections are in plain text: the processors of one machine would encrypt for four.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, case_of
from benchmarks.launched import whole_lines
from benchmarks.quality_task import PROBLEMS
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.testing.machines import Machines, machines

ROOT = Path(__file__).parents[1]
HOSTS = 4
#: Payload bytes a second of a NIC.
NETWORKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}
SEEDS = (1, 2, 3)
#: The longest time of a run; what it takes to start is not in it.
CAP_S, START_S = 300.0, 90.0
#: Steps of a worker between two evaluations; as in benchmarks/quality_peer.py.
EVALUATE_EVERY = 40

_GROUPS = f"groups = {HOSTS}"
#: Ours: how workers form groups, and what they exchange.
OURS = {
    "all-reduce": (f"group_size = {HOSTS}", 'kind = "allreduce"'),
    "servers, sync": (_GROUPS, f'kind = "model_server"\nstaleness = "sync"\nshards = {HOSTS}'),
    "servers, async": (_GROUPS, f'kind = "model_server"\nstaleness = "async"\nshards = {HOSTS}'),
    "gossip": (_GROUPS, 'kind = "gossip"'),
    "local SGD, 32 steps": (_GROUPS, 'kind = "averaging"\nevery = 32'),
    "DiLoCo, 20 steps": (_GROUPS, 'kind = "averaging"\nevery = 20\naveraging = { method = "outer" }'),
    "auto": (f'groups = "auto"\ngroup_size = {HOSTS}', 'kind = "model_server"'),
}
#: Others, by their names in benchmarks/quality_peer.py; the first needs only what we need.
PEERS = {"DDP with gloo": "ddp", "torchft LocalSGD": "localsgd", "torchft DiLoCo": "diloco", "hivemind": "hivemind"}
PARTS = (*(f"{problem} {network}" for problem in PROBLEMS for network in NETWORKS),)

_TOPOLOGY = """
[job]
name = "quality"
task = "{task}:task"
args = {{ problem = "{problem}", lr = {lr} }}
seed = {seed}
timeout = "60 s"
transport_encryption = "disabled"
oversubscribe = true
eval_every = {every}
until = {{ metric = "eval_loss", reaches = {loss} }}
[engine]
kind = "ssh"
[compute]
{compute}
batch_size = {batch}
device = "cpu"
threads = 1
[exchange]
{exchange}
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs take place."""

    cluster: Machines
    data: str
    peers_python: str | None


def bench_quality(
    parts: Sequence[str] = (), *, data: str | None = None, peers_python: str | None = None, systems: Sequence[str] = ()
) -> Iterator[Case]:
    """For each problem and network, and each system: seconds to the problem's loss, beside DistributedDataParallel's.

    Args:
        parts: of `PARTS`; none: all.
        data: a folder with CIFAR-10's binary batches (or a folder ``cifar10``) and ``shakespeare.txt``.
        peers_python: a Python that has torchft and hivemind; without it they are left out.
        systems: of `OURS` and `PEERS`; none: all. DistributedDataParallel always is.

    Raises `UsageError`, and `NoNamespacesError` without root or sshd.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"benchmark quality has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if unknown := [system for system in systems if system not in {**OURS, **PEERS}]:
        raise UsageError(f"benchmark quality has no system {unknown[0]!r}; there are {', '.join({**OURS, **PEERS})}")
    if data is None:
        raise UsageError("benchmark quality needs --data: a folder with CIFAR-10's binary batches and shakespeare.txt")
    chosen = [system for system in (*PEERS, *OURS) if system == "DDP with gloo" or not systems or system in systems]
    chosen = [system for system in chosen if peers_python or PEERS.get(system, "ddp") == "ddp"]
    for problem in PROBLEMS:
        for network, rate in NETWORKS.items():
            if parts and f"{problem} {network}" not in parts:
                continue
            with (
                tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as folder,
                machines(HOSTS, Path(folder), rate, kind=Machines) as cluster,
            ):
                place = Place(cluster, str(Path(data).absolute()), peers_python)
                yield from _part(place, problem, f"{problem}, {network}", chosen)


def _part(place: Place, problem: str, name: str, systems: Sequence[str]) -> Iterator[Case]:
    reference = None
    for system in systems:
        rate, times = measured(place, problem, system)
        value = statistics.median(times)
        case = f"{name}, {system}, lr {rate:g}"
        if system == "DDP with gloo":
            reference = value
            yield case_of("quality", case, value, "s", digits=1)
        else:
            yield case_of("quality", case, value, "s", "DDP with gloo", reference, digits=2)


def measured(place: Place, problem: str, system: str) -> tuple[float, list[float]]:
    """The best learning rate, and the seconds to the problem's loss with it, for each seed."""
    best, rate = CAP_S, math.nan
    rates = PROBLEMS[problem].rates
    for tried in rates:
        took = seconds(place, problem, system, tried, SEEDS[0], best)
        print(f"{problem}, {system}, lr {tried:g}: {took:.1f} s", file=sys.stderr)
        if took < best or math.isnan(rate):
            best, rate = took, tried
        if system == "auto":  # which finds its rate
            break
    more = [seconds(place, problem, system, rate, seed, CAP_S) for seed in SEEDS[1:]]
    return rate, [best, *more]


def seconds(place: Place, problem: str, system: str, lr: float, seed: int, cap_s: float) -> float:
    """How long a run took until it reached the problem's loss, at most ``cap_s``. Raises `ZmqTrainError` if it fails."""
    with tempfile.TemporaryDirectory(dir=place.cluster.folder) as folder:
        if system in OURS:
            return _ours(place, Path(folder), problem, system, lr, seed, cap_s)
        return _peer(place, Path(folder), problem, PEERS[system], lr, seed, cap_s)


def reached(evaluations: Sequence[tuple[float, float]], loss: float) -> float | None:
    """The time of the first of these evaluations (time, loss) that is good enough."""
    return next((at for at, value in evaluations if value <= loss), None)


def combined(logs: Sequence[Sequence[str]]) -> list[tuple[float, float]]:
    """Evaluations (time, mean loss) from those of each rank's share: lines of time, sum and number. An evaluation's time is that of
    the last rank."""
    evaluations = []
    for lines in zip(*logs, strict=False):
        times, totals, counts = zip(*([float(word) for word in line.split()] for line in lines), strict=True)
        evaluations.append((max(times), sum(totals) / sum(counts)))
    return evaluations


def _ours(place: Place, folder: Path, problem: str, system: str, lr: float, seed: int, cap_s: float) -> float:
    goal = PROBLEMS[problem]
    compute, exchange = OURS[system]
    text = _TOPOLOGY.format(
        **{"task": Path(__file__).with_name("quality_task.py"), "problem": problem, "lr": lr, "seed": seed},
        **{"every": EVALUATE_EVERY, "loss": goal.loss, "compute": compute, "exchange": exchange},
        batch=goal.batch * (HOSTS if compute == f"group_size = {HOSTS}" else 1),
    )
    (folder / "quality.toml").write_text(text + place.cluster.hosts())
    command = [sys.executable, "-m", "zmqtrain", "launch", "--data", place.data, "--run-dir", "run", "quality.toml"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.time()
    start = began if system == "auto" else None
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None:
                start = start or _first_step(folder)
                if time.time() > began + START_S + cap_s or (start is not None and time.time() > start + cap_s):
                    process.send_signal(signal.SIGINT)
                    process.wait(60)
                    return cap_s
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        raise ZmqTrainError(
            f"{system}: the launch failed with code {process.returncode}:\n{(folder / 'output').read_text()[-3000:]}"
        )
    start = start or _first_step(folder)
    evals = [(event["time"], event["values"]["eval_loss"]) for event in _events(folder) if event["kind"] == "eval"]
    at = reached(evals, goal.loss)
    if start is None or at is None:
        raise ZmqTrainError(f"{system}: the run ended before it reached {goal.loss}: {evals[-1:]}")
    return at - start


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(folder / "run" / "events.jsonl")]


def _first_step(folder: Path) -> float | None:
    """When the first step began."""
    steps = [event for event in _events(folder) if event["kind"] == "step" and event["step"] == 0]
    return min((event["time"] - event["values"]["seconds"] for event in steps), default=None)


def _peer(place: Place, folder: Path, problem: str, system: str, lr: float, seed: int, cap_s: float) -> float:
    cluster, names = place.cluster, place.cluster.names
    python = sys.executable if place.peers_python is None or system == "ddp" else place.peers_python
    first = cluster.address(names[0])
    with ExitStack() as stack:

        def start(name: str, words: Sequence[str], output: str, variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(folder / output, "w"))
            given = ["env", *(f"{key}={value}" for key, value in (variables or {}).items())]
            # torchft tells others its host's name: of each machine, a name that all can resolve.
            named = ["unshare", "--uts", "sh", "-c", f'hostname {cluster.address(name)} && exec "$@"', "sh", *given, *words]
            process = subprocess.Popen(cluster.namespaces.command(name, named), stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        if system in ("localsgd", "diloco"):
            lighthouse = str(Path(python).with_name("torchft_lighthouse"))
            options = ["--min_replicas", str(HOSTS), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
            start(names[0], [lighthouse, *options, "--bind", "[::]:29510"], "lighthouse")
        ranks = []
        for number, name in enumerate(names):
            variables = {
                **{"RANK": str(number), "WORLD_SIZE": str(HOSTS), "MASTER_ADDR": first, "MASTER_PORT": "29500"},
                **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)},
                **{"OWN_ADDR": cluster.address(name), "LIGHTHOUSE": f"http://{first}:29510"},
            }
            words = [python, "-m", "benchmarks.quality_peer", system, problem, str(lr), str(seed), place.data, str(folder)]
            ranks.append(start(name, words, f"rank-{number}", variables))
        deadline = time.monotonic() + START_S + cap_s
        while time.monotonic() < deadline:
            if any(rank.poll() is not None for rank in ranks):
                said = "\n".join((folder / f"rank-{number}").read_text()[-1500:] for number in range(HOSTS))
                raise ZmqTrainError(f"{system} has ended before it reached the loss:\n{said}")
            evals = combined([whole_lines(folder / f"log-{number}") for number in range(HOSTS)])
            at = reached(evals, PROBLEMS[problem].loss)
            if at is not None or (evals and evals[-1][0] > cap_s):
                return min(cap_s, at if at is not None else cap_s)
            time.sleep(0.5)
    return cap_s
