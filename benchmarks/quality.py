"""``python -m benchmarks quality --data DIR [--peers-python PYTHON] [--mxnet-python PYTHON] [--quick]``: time to the same
validation loss, beside what people use.

Four machines behind NICs of 1 Gbit/s and of 100 Mbit/s (network namespaces on this one; for root, with sshd) train CIFARNet on
CIFAR-10, and a small transformer on Shakespeare: with each of our exchanges (all-reduce also compressed), with ``groups =
"auto"``, with DistributedDataParallel and gloo, and, where they are installed beside our dependencies, with torchft's LocalSGD
and DiLoCo, hivemind's Optimizer (``--peers-python``) and MXNet's kvstore (``--mxnet-python``). Model, data, batch of a worker,
samples evaluated and machines are the same (benchmarks/quality_task.py); each peer is set up as its own documentation shows
(benchmarks/quality_peer.py).

The machines share this one's processors. So that these are not what is compared, the layers of the model sleep in each step, for
all systems alike, as if a slower processor of each machine's own computed them (benchmarks/paced.py).

The clock runs from the first step to the first evaluation at or below the problem's loss; for ``auto``, whose search is part of it,
from the command on. All take their learning rate by the same rule: of the problem's rates, the one that is fastest with seed 1 on
the first network measured; with it the other seeds and networks are run. Seeds alternate: all systems run with one before any runs
with the next. A run that takes `CAP` times as long as DistributedDataParallel's is ended, and counts as such. ``auto`` runs with
one seed.

Connections are in plain text: the processors of one machine would encrypt for four.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.case import Case, case_of
from benchmarks.launched import whole_lines
from benchmarks.quality_task import EVALUATE_EVERY, PROBLEMS
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.testing.machines import Machines, machines

ROOT = Path(__file__).parents[1]
HOSTS = 4
#: Payload bytes a second of a NIC.
NETWORKS = {"1 Gbit/s": 125e6, "100 Mbit/s": 12.5e6}
SEEDS = (1, 2, 3)
#: The longest time of a run; what it takes to start is not in it. Of others: as a multiple of the time of the reference.
CAP_S, CAP, START_S = 180.0, 3.0, 90.0
REFERENCE = "DDP with gloo"
#: What a quick run measures, and the losses at which its runs end.
QUICK, QUICK_LOSSES = "cifar 100 Mbit/s", {"cifar": 2.1, "shakespeare": 2.5}

_GROUPS, _ONE_GROUP = f"groups = {HOSTS}", f"group_size = {HOSTS}"
#: Ours: how workers form groups, and what they exchange.
OURS = {
    "all-reduce": (_ONE_GROUP, 'kind = "allreduce"'),
    "all-reduce, int8": (_ONE_GROUP, 'kind = "allreduce"\ncompression = "int8"'),
    "all-reduce, PowerSGD": (_ONE_GROUP, 'kind = "allreduce"\ncompression = "powersgd"'),
    "servers, sync": (_GROUPS, f'kind = "model_server"\nstaleness = "sync"\nshards = {HOSTS}'),
    "servers, async": (_GROUPS, f'kind = "model_server"\nstaleness = "async"\nshards = {HOSTS}'),
    "gossip": (_GROUPS, 'kind = "gossip"'),
    "local SGD, 32 steps": (_GROUPS, 'kind = "averaging"\nevery = 32'),
    "DiLoCo, 20 steps": (_GROUPS, 'kind = "averaging"\nevery = 20\naveraging = { method = "outer" }'),
    "auto": (f'groups = "auto"\ngroup_size = {HOSTS}', 'kind = "model_server"'),
}
#: Others, by their names in benchmarks/quality_peer.py; the first needs only what we need.
PEERS = {
    **{REFERENCE: "ddp", "torchft LocalSGD": "localsgd", "torchft DiLoCo": "diloco", "hivemind": "hivemind"},
    "MXNet dist_sync": "mxnet",
}
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
    pythons: dict[str, str]
    """Of the systems of `PEERS` that are installed, by their names there."""
    loss: float
    """The validation loss at which a run ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run took until it reached the problem's loss, or was ended."""

    seconds: float
    processor_s: float
    """Of all processes on all machines, from the first step on."""
    sent: float
    """By all machines, in MB, from the first step on."""
    load: float
    """Of this machine at the end: how many processes computed or wanted to, in the mean of a minute, these included."""


@dataclass(slots=True)
class Runs:
    """The runs of a system on a network."""

    rate: float
    runs: list[Run] = field(default_factory=list)


def bench_quality(
    parts: Sequence[str] = (),
    *,
    data: str | None = None,
    peers_python: str | None = None,
    mxnet_python: str | None = None,
    systems: Sequence[str] = (),
    quick: bool = False,
) -> Iterator[Case]:
    """For each problem and network, and each system: seconds to the problem's loss, beside DistributedDataParallel's; and the
    processor seconds and the bytes that it took.

    Args:
        parts: of `PARTS`; none: all.
        data: a folder with CIFAR-10's binary batches (or a folder ``cifar10``) and ``shakespeare.txt``.
        peers_python: a Python that has torchft and hivemind; without it they are left out.
        mxnet_python: a Python that has MXNet; without it it is left out.
        systems: of `OURS` and `PEERS`; none: all. DistributedDataParallel always is.
        quick: one seed and one rate, to a loss that is soon reached, of `QUICK` alone if no part is named: to see that all run.

    Raises `UsageError`, and `NoNamespacesError` without root or sshd.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"benchmark quality has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if unknown := [system for system in systems if system not in {**OURS, **PEERS}]:
        raise UsageError(f"benchmark quality has no system {unknown[0]!r}; there are {', '.join({**OURS, **PEERS})}")
    if data is None:
        raise UsageError("benchmark quality needs --data: a folder with CIFAR-10's binary batches and shakespeare.txt")
    pythons = {"ddp": sys.executable}
    if peers_python:
        pythons |= dict.fromkeys(("localsgd", "diloco", "hivemind"), peers_python)
    if mxnet_python:
        pythons["mxnet"] = mxnet_python
    chosen = [system for system in (*PEERS, *OURS) if system == REFERENCE or not systems or system in systems]
    chosen = [system for system in chosen if system in OURS or PEERS[system] in pythons]
    parts = parts or ((QUICK,) if quick else PARTS)
    seeds = SEEDS[:1] if quick else SEEDS
    for problem, of in PROBLEMS.items():
        rates: dict[str, tuple[float, ...]] = dict.fromkeys(chosen, of.rates[1:2] if quick else of.rates)
        loss = QUICK_LOSSES[problem] if quick else of.loss
        for network, rate in NETWORKS.items():
            if f"{problem} {network}" not in parts:
                continue
            with (
                tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as folder,
                machines(HOSTS, Path(folder), rate, kind=Machines) as cluster,
            ):
                place = Place(cluster, str(Path(data).absolute()), pythons, loss)
                yield from _part(place, problem, network, rates, seeds)


def _part(place: Place, problem: str, network: str, rates: dict[str, tuple[float, ...]], seeds: Sequence[int]) -> Iterator[Case]:
    """All systems on a network. Of ``rates`` each keeps the one that is its fastest here; a system that fails is left out from then
    on."""
    measured: dict[str, Runs] = {}
    cap_s = CAP_S
    for seed in seeds:
        for system in [*rates]:
            if seed != seeds[0] and system == "auto":
                continue
            try:
                tried = _fastest(place, problem, network, system, rates[system], seed, cap_s)
            except ZmqTrainError as error:
                if system == REFERENCE:
                    raise
                print(f"{problem}, {network}, {system} is left out, since a run failed: {error}", file=sys.stderr)
                measured.pop(system, None)
                del rates[system]
                continue
            rates[system] = (tried.rate,)
            measured.setdefault(system, Runs(tried.rate)).runs += tried.runs
            if system == REFERENCE and seed == seeds[0]:
                cap_s = min(CAP_S, CAP * tried.runs[0].seconds)
    yield from rows(f"{problem}, {network}", measured)


def _fastest(place: Place, problem: str, network: str, system: str, rates: Sequence[float], seed: int, cap_s: float) -> Runs:
    """The run with the rate that is the fastest of these; ``auto`` finds its own, and begins at the second."""
    best: Runs | None = None
    for rate in rates[1:2] or rates if system == "auto" else rates:
        # A rate that is slower than another need not be trained to its end.
        run = one_run(place, problem, system, rate, seed, min(cap_s, best.runs[0].seconds) if best else cap_s)
        print(f"{problem}, {network}, {system}, lr {rate:g}, seed {seed}: {run}", file=sys.stderr)
        if best is None or run.seconds < best.runs[0].seconds:
            best = Runs(rate, [run])
    assert best is not None
    return best


def rows(name: str, measured: Mapping[str, Runs]) -> Iterator[Case]:
    """Medians of the seeds, beside those of the reference."""
    reference: dict[str, float] = {}
    for system, of in measured.items():
        runs = of.runs
        values = {
            "": (statistics.median(run.seconds for run in runs), "s"),
            ", the fastest seed": (min(run.seconds for run in runs), "s"),
            ", the slowest seed": (max(run.seconds for run in runs), "s"),
            ", processor time": (statistics.median(run.processor_s for run in runs), "s"),
            ", sent": (statistics.median(run.sent for run in runs), "MB"),
            ", load of this machine": (statistics.median(run.load for run in runs), ""),
            ", learning rate": (of.rate, ""),
        }
        for what, (value, unit) in values.items():
            if system == REFERENCE:
                reference[what] = value
            beside = REFERENCE in measured and system != REFERENCE and "seed" not in what and unit
            case = f"{name}, {system}{what}"
            yield case_of("quality", case, value, unit, REFERENCE, reference[what] if beside else None, digits=4)


def one_run(place: Place, problem: str, system: str, lr: float, seed: int, cap_s: float) -> Run:
    """A run until it has reached the problem's loss, for at most ``cap_s``. Raises `ZmqTrainError` if it fails."""
    with tempfile.TemporaryDirectory(dir=place.cluster.folder) as folder:
        if system in OURS:
            return _ours(place, Path(folder), problem, system, lr, seed, cap_s)
        return _peer(place, Path(folder), problem, PEERS[system], lr, seed, cap_s)


class Usage:
    """What the processes on all machines have used since `begin`: `sample` looks at them, and must be called often, since what a
    process has used after the last time is lost with it."""

    def __init__(self, cluster: Machines) -> None:
        self._cluster = cluster
        self._networks = {os.stat(f"/run/netns/{cluster.namespaces.namespace_of(name)}").st_ino for name in cluster.names}
        self._seconds: dict[tuple[int, float], float] = {}
        self._began: tuple[float, float] | None = None

    def sample(self, begun: bool) -> None:
        """Look at all processes; the first time that ``begun`` is true is when the count begins."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino in self._networks:
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
        if begun and self._began is None:
            self._began = self._totals()

    def run(self, seconds: float) -> Run:
        """A run that ends now and took so long."""
        self.sample(True)
        assert self._began is not None
        (processor_s, sent), began = self._totals(), self._began
        return Run(round(seconds, 2), round(processor_s - began[0], 2), round((sent - began[1]) / 1e6, 2), os.getloadavg()[0])

    def _totals(self) -> tuple[float, float]:
        sent = 0
        for name in self._cluster.names:
            command = self._cluster.namespaces.command(name, ["cat", "/proc/net/dev"])
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            sent += sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))
        return sum(self._seconds.values()), float(sent)


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


def _ours(place: Place, folder: Path, problem: str, system: str, lr: float, seed: int, cap_s: float) -> Run:
    goal, usage = PROBLEMS[problem], Usage(place.cluster)
    compute, exchange = OURS[system]
    text = _TOPOLOGY.format(
        **{"task": Path(__file__).with_name("quality_task.py"), "problem": problem, "lr": lr, "seed": seed},
        **{"every": EVALUATE_EVERY, "loss": place.loss, "compute": compute, "exchange": exchange},
        batch=goal.batch * (HOSTS if compute.startswith(_ONE_GROUP) else 1),
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
                usage.sample(start is not None)
                if time.time() > began + START_S + cap_s or (start is not None and time.time() > start + cap_s):
                    used = usage.run(cap_s)
                    process.send_signal(signal.SIGINT)
                    process.wait(60)
                    return used
                time.sleep(0.5)
        finally:
            _kill(process)
            process.wait()
    if process.returncode and "NonFiniteLossError" in (folder / "output").read_text():
        return usage.run(cap_s)  # with this learning rate
    if process.returncode:
        raise ZmqTrainError(
            f"{system}: the launch failed with code {process.returncode}:\n{(folder / 'output').read_text()[-3000:]}"
        )
    start = start or _first_step(folder)
    evals = [(event["time"], event["values"]["eval_loss"]) for event in _events(folder) if event["kind"] == "eval"]
    at = reached(evals, place.loss)
    if start is None or at is None:
        raise ZmqTrainError(f"{system}: the run ended before it reached {place.loss}: {evals[-1:]}")
    return usage.run(at - start)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(folder / "run" / "events.jsonl")]


def _first_step(folder: Path) -> float | None:
    """When the first step began."""
    steps = [event for event in _events(folder) if event["kind"] == "step" and event["step"] == 0]
    return min((event["time"] - event["values"]["seconds"] for event in steps), default=None)


def _peer(place: Place, folder: Path, problem: str, system: str, lr: float, seed: int, cap_s: float) -> Run:
    cluster, names, usage = place.cluster, place.cluster.names, Usage(place.cluster)
    python = place.pythons[system]
    first = cluster.address(names[0])
    with ExitStack() as stack:

        def start(name: str, words: Sequence[str], output: str, variables: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(folder / output, "w"))
            given = ["env", *(f"{key}={value}" for key, value in (variables or {}).items())]
            # torchft tells others its host's name: of each machine, a name that all can resolve.
            named = ["unshare", "--uts", "sh", "-c", f'hostname {cluster.address(name)} && exec "$@"', "sh", *given, *words]
            process = subprocess.Popen(cluster.namespaces.command(name, named), stdout=log, stderr=log, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(_kill, process)  # with its children, such as hivemind's
            return process

        if system in ("localsgd", "diloco"):
            options = ["--min_replicas", str(HOSTS), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
            program = folder / "lighthouse.py"  # what its command torchft_lighthouse does, which need not be beside this Python
            program.write_text("from torchft._torchft import lighthouse_main\nlighthouse_main()\n")
            start(names[0], [python, str(program), *options, "--bind", "[::]:29510"], "lighthouse")
        mxnet = {"DMLC_PS_ROOT_URI": first, "DMLC_PS_ROOT_PORT": "29520", "DMLC_INTERFACE": "eth0", "DMLC_ROLE": "worker"}
        mxnet |= dict.fromkeys(("DMLC_NUM_WORKER", "DMLC_NUM_SERVER"), str(HOSTS))
        if system == "mxnet":
            for role, host in [("scheduler", names[0]), *(("server", name) for name in names)]:
                variables = {**mxnet, "DMLC_ROLE": role, "OMP_NUM_THREADS": "1"}
                start(host, [python, "-c", "import mxnet"], f"{role}-{host}", variables)
        ranks = []
        for number, name in enumerate(names):
            variables = {
                **{"RANK": str(number), "WORLD_SIZE": str(HOSTS), "MASTER_ADDR": first, "MASTER_PORT": "29500"},
                **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)},
                **{**mxnet, "OWN_ADDR": cluster.address(name), "LIGHTHOUSE": f"http://{first}:29510"},
            }
            words = [python, "-m", "benchmarks.quality_peer", system, problem, str(lr), str(seed), place.data, str(folder)]
            ranks.append(start(name, words, f"rank-{number}", variables))
        deadline = time.monotonic() + START_S + cap_s
        while time.monotonic() < deadline:
            if any(rank.poll() is not None for rank in ranks):
                said = "\n".join((folder / f"rank-{number}").read_text()[-600:] for number in range(HOSTS))
                raise ZmqTrainError(f"{system} has ended before it reached the loss:\n{said}")
            usage.sample(all((folder / f"log-{number}").exists() for number in range(HOSTS)))
            evals = combined([whole_lines(folder / f"log-{number}") for number in range(HOSTS)])
            at = reached(evals, place.loss)
            if at is not None or (evals and evals[-1][0] > cap_s):
                return usage.run(min(cap_s, at if at is not None else cap_s))
            time.sleep(0.5)
        return usage.run(cap_s)
