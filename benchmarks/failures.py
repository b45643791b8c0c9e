"""``python -m benchmarks failures --torchft-python PYTHON``: what a killed worker costs, beside torchft.

Four processes on one machine train a network of 1.1 million parameters, each step of which takes at least `STEP_S`; one of them
is killed (SIGKILL) every `EVERY_S` and started again at once. The peer is torchft's DistributedDataParallel with gloo, set up as
in its own example and README (benchmarks/torchft_ddp.py; PYTHON is of an environment with torchft). Ours is all-reduce in one group
of four, with a host for each worker (messages over TCP, as the peer's), and with one host for all.

Lost is what steps took beyond twice the median, from a kill to the next, by the clock of worker 0, which is never killed:
detection, the step that is done again, and the newcomer's entry. The cost without failures is the median step's, beside the same
system without elasticity: plain DistributedDataParallel with gloo, and ``elastic = false``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from benchmarks.case import Case, case_of
from benchmarks.launched import roles_of, whole_lines
from zmqtrain.errors import ZmqTrainError

WORKERS = 4
#: The least time of a step.
STEP_S = 0.05
#: Kills in a run; seconds before the first and after each of them.
KILLS, EVERY_S = 4, 15.0
#: How long steps are taken without failures, how often alternately, and how many first steps do not count.
QUIET_S, ROUNDS, LEFT_OUT = 15.0, 3, 20
PATIENCE_S = 120.0

_PEER = Path(__file__).with_name("torchft_ddp.py")
_TASK = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task


def loss(output, target):
    time.sleep({step_s})
    return nn.functional.mse_loss(output, target)


def task():
    torch.manual_seed(1)
    return Task(
        model=lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        train_data=TensorDataset(torch.randn(4096, 512), torch.randn(4096, 1)),
    )
"""
_TOPOLOGY = """
[job]
name = "failures"
task = "task.py"
steps = 1000000
elastic = {elastic}
restarts = 1000
oversubscribe = true
[[hosts]]
name = "{hosts}"
slots = {slots}
[compute]
groups = 1
group_size = {workers}
batch_size = {batch}
device = "cpu"
threads = 1
[exchange]
kind = "allreduce"
[observe]
events_per_s = "all"
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What worker 0 of a run did."""

    ends: Sequence[float]
    """When its steps ended."""
    kills: Sequence[float]
    """When others were killed."""

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self._taken()[LEFT_OUT:])

    def lost_s(self) -> list[float]:
        """For each kill, what steps took beyond twice the median until the next kill."""
        usual = self.step_s
        lost = [0.0] * len(self.kills)
        for end, taken in zip(self.ends[1:], self._taken(), strict=True):
            before = [number for number, at in enumerate(self.kills) if at <= end]
            if before and taken > 2 * usual:
                lost[before[-1]] += taken - usual
        return lost

    def _taken(self) -> list[float]:
        return [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]


def bench_failures(*, torchft_python: str | None = None) -> Iterator[Case]:
    """The time that a killed worker costs, and what it costs to be ready for it. Raises `ZmqTrainError` if a run fails.

    ``torchft_python``: without it, the peer's columns are empty.
    """
    peer_lost = None
    if torchft_python is not None:
        peer_lost = statistics.median(_peer(torchft_python, "torchft", KILLS).lost_s())
    for name, hosts in _HOSTS.items():
        lost = _ours(hosts, elastic=True, kills=KILLS).lost_s()
        yield case_of(
            "failures", f"lost for each killed worker, {name}", statistics.median(lost), "s", "torchft", peer_lost, digits=2
        )
        yield case_of("failures", f"lost for each killed worker, most, {name}", max(lost), "s", digits=2)
    kinds: dict[str, Callable[[], Ran]] = {}
    for name, hosts in _HOSTS.items():
        kinds[name] = lambda hosts=hosts: _ours(hosts, elastic=False)  # type: ignore[misc]
        kinds[f"{name}, elastic"] = lambda hosts=hosts: _ours(hosts, elastic=True)  # type: ignore[misc]
    if torchft_python is not None:
        kinds["DDP with gloo"] = lambda: _peer(torchft_python, "plain")
        kinds["torchft"] = lambda: _peer(torchft_python, "torchft")
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, run in kinds.items():
            steps[kind].append(run().step_s)
    median = {kind: statistics.median(seconds) for kind, seconds in steps.items()}
    peer_cost = 100 * (median["torchft"] / median["DDP with gloo"] - 1) if torchft_python is not None else None
    for name in _HOSTS:
        cost = 100 * (median[f"{name}, elastic"] / median[name] - 1)
        yield case_of("failures", f"cost without failures, {name}", cost, "%", "torchft", peer_cost, digits=2)
    for kind, seconds in median.items():
        yield case_of("failures", f"a step without failures, {kind}", 1e3 * seconds, "ms", digits=2)


#: The cases' names, each with the hosts and their slots.
_HOSTS = {"a host for each": (f"h[1-{WORKERS}]", 1), "one host": ("h1", WORKERS)}


def _ours(hosts: tuple[str, int], *, elastic: bool, kills: int = 0) -> Ran:
    with tempfile.TemporaryDirectory(prefix="failures-") as place:
        folder = Path(place)
        (folder / "task.py").write_text(_TASK.format(step_s=STEP_S))
        values = {"hosts": hosts[0], "slots": hosts[1], "workers": WORKERS, "batch": 16 * WORKERS}
        (folder / "failures.toml").write_text(_TOPOLOGY.format(elastic=str(elastic).lower(), **values))
        command = [sys.executable, "-m", "zmqtrain", "launch", "--run-dir", "run", "failures.toml"]
        with open(folder / "output", "w") as output:
            launcher = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
            try:
                _wait_for(lambda: len(_steps(folder / "run" / "events.jsonl")) > LEFT_OUT, launcher)

                def kill(rank: int) -> None:
                    roles_of(launcher.pid)[f"worker/{rank}"].send_signal(signal.SIGKILL)

                killed = _disturb(kill, kills)
                if launcher.poll() is not None:
                    raise ZmqTrainError(f"the run has ended: {(folder / 'output').read_text()[-3000:]}")
                launcher.send_signal(signal.SIGINT)
                launcher.wait(PATIENCE_S)
            finally:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
                    launcher.wait()
        return Ran(_steps(folder / "run" / "events.jsonl"), killed)


def _steps(events: Path) -> list[float]:
    """When worker 0's steps ended."""
    steps = (json.loads(line) for line in whole_lines(events) if '"step"' in line)
    return [event["time"] for event in steps if (event["kind"], event["role"], event["rank"]) == ("step", "worker", 0)]


def _peer(python: str, kind: str, kills: int = 0) -> Ran:
    with tempfile.TemporaryDirectory(prefix="failures-") as place, ExitStack() as stack:
        folder = Path(place)
        seconds = QUIET_S if not kills else EVERY_S * (kills + 1)
        lighthouse, store = _free_ports(2)
        if kind == "torchft":
            options = [
                "--min_replicas",
                "2",
                "--quorum_tick_ms",
                "100",
                "--join_timeout_ms",
                "10000",
                "--bind",
                f"[::]:{lighthouse}",
            ]
            log = stack.enter_context(open(folder / "lighthouse", "w"))
            _started(stack, [str(Path(python).with_name("torchft_lighthouse")), *options], log)
        workers: list[subprocess.Popen[bytes]] = []

        def start(rank: int) -> subprocess.Popen[bytes]:
            port = store if kind == "plain" else 0  # any, for a store of its own
            words = [python, _PEER, kind, rank, WORKERS, port, f"http://localhost:{lighthouse}", folder / f"steps-{rank}"]
            output = stack.enter_context(open(folder / f"output-{rank}", "a"))
            return _started(stack, [*map(str, words), str(seconds + PATIENCE_S), str(STEP_S)], output)

        workers = [start(rank) for rank in range(WORKERS)]
        _wait_for(lambda: len(whole_lines(folder / "steps-0")) > LEFT_OUT, workers[0])

        def kill(rank: int) -> None:
            workers[rank].kill()
            workers[rank].wait()
            workers[rank] = start(rank)

        killed = _disturb(kill, kills)
        if workers[0].poll() is not None:
            raise ZmqTrainError(f"the peer has ended: {(folder / 'output-0').read_text()[-3000:]}")
        return Ran([float(line) for line in whole_lines(folder / "steps-0")], killed)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _started(stack: ExitStack, command: Sequence[str], output: IO[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=output, stderr=output)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ZmqTrainError(f"no steps were taken; process {process.pid} has the exit code {process.poll()}")
        time.sleep(0.2)


def _disturb(kill: Callable[[int], None], kills: int) -> list[float]:
    """Kill all workers but the first in turn; without any, wait. Returns when."""
    if not kills:
        time.sleep(QUIET_S)
    killed = []
    for number in range(kills):
        killed.append(time.time())
        with suppress(psutil.Error):
            kill(1 + number % (WORKERS - 1))
        time.sleep(EVERY_S)
    return killed
