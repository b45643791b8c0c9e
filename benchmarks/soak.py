"""``python -m benchmarks soak --minutes 30 --every 10``: real processes on three emulated hosts, with something killed, stopped or
cut every few seconds.

Each exchange that goes on without lost processes trains for its share of the time, with a fault every ``every`` seconds: a worker
(or a model server that is kept twice) is killed, stopped for a moment, or a host's cable is pulled for a moment. What was killed is
started again. A run passes if it ends well, its account says that no sample counted twice (and, with servers,
that none was lost), and nothing is left behind: no process, no network namespace, no folder. The growth of memory is shown.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.case import Case, case_of
from benchmarks.roles import roles_of
from zmqtrain.errors import UsageError, ZmqTrainError

#: Exchanges, with their part of the topology file. Only servers that are kept twice may be killed.
SHAPES: dict[str, str] = {
    "allreduce": 'kind = "allreduce"',
    "servers-sync": 'kind = "model_server"\nstaleness = "sync"\nshards = 3',
    "servers-async": 'kind = "model_server"\nstaleness = "async"\nshards = 3',
    "replicas-sync": 'kind = "model_server"\nstaleness = "sync"\nshards = 3\nreplicas = 1',
    "replicas-bounded": 'kind = "model_server"\nstaleness = { bound = 2 }\nshards = 3\nreplicas = 1',
    "gossip": 'kind = "gossip"',
    "averaging": 'kind = "averaging"\nevery = 8',
}
#: Those in which others train what a lost worker leaves; elsewhere the account says how many samples were not trained, and why.
WHOLE = ("servers-sync", "servers-async")
HOSTS, GROUPS = 3, 4
#: Of the data, and of a worker's step.
SAMPLES, BATCH = 4096, 16
#: By default: of all runs together, and between two faults.
MINUTES, EVERY_S = 30.0, 10.0
#: The least time of a step, which the task's loss waits for; the whole is what a run's steps are planned by.
STEP_S, PLANNED_S = 0.04, 0.06
#: How long a process is stopped, and a cable is out: less than the time after which either counts as lost.
PAUSE_S = 3.0
#: A run may take so many times what was planned, and a minute.
PATIENCE = 6.0
#: A process must be seen for as long as this before its memory is judged.
WATCHED_S = 60.0
#: A variable of all processes of a run.
_MARK = "ZMQTRAIN_SOAK"

_TASK = """
import time

import torch
from torch.utils.data import TensorDataset

from zmqtrain import Task


def loss(output, target):
    time.sleep({step_s})
    return torch.nn.functional.mse_loss(output, target)


def task():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn({samples}, 64, generator=generator)
    data = TensorDataset(inputs, torch.tanh(inputs).sum(1, keepdim=True))
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=data,
    )
"""
_TOPOLOGY = """
[job]
name = "soak"
task = "task.py"
epochs = {epochs}
elastic = true
restarts = 1000
checkpoint_every = "20 s"
[[hosts]]
name = "h[0-{last}]"
slots = 2
[compute]
groups = {groups}
batch_size = {batch}
device = "cpu"
[exchange]
{exchange}
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
"""


class SoakError(ZmqTrainError):
    """A run did not survive, or has left something behind."""


@dataclass(slots=True)
class Watch:
    """What was seen of a process: its memory, by the time."""

    name: str
    memory: list[tuple[float, int]] = field(default_factory=list)

    def growth(self) -> float | None:
        """MB an hour between the first and the last third of what was seen after a quarter of it; ``None``: seen too shortly."""
        if not self.memory or self.memory[-1][0] - self.memory[0][0] < WATCHED_S:
            return None
        settled = self.memory[len(self.memory) // 4 :]
        third = max(1, len(settled) // 3)
        first, last = settled[:third], settled[-third:]
        seconds = statistics.fmean(at for at, _ in last) - statistics.fmean(at for at, _ in first)
        bytes_more = statistics.fmean(size for _, size in last) - statistics.fmean(size for _, size in first)
        return bytes_more / 1e6 * 3600 / seconds if seconds else None


def bench_soak(*, minutes: float = MINUTES, every: float = EVERY_S, parts: Sequence[str] = (), seed: int = 1) -> Iterator[Case]:
    """For each exchange: the faults that it had, and what they cost. Raises `SoakError` at the first violation.

    Args:
        minutes: of training, of all runs together.
        every: seconds between two faults.
        parts: the exchanges, of `SHAPES`; none: all.
        seed: of the choice of faults.
    """
    chosen = tuple(parts) or tuple(SHAPES)
    if unknown := sorted({*chosen} - {*SHAPES}):
        raise UsageError(f"soak has no part {unknown[0]!r}: {', '.join(SHAPES)} are there")
    for number, name in enumerate(chosen):
        yield from _soak(name, 60 * minutes / len(chosen), every, random.Random(f"{seed}/{number}"))


def _soak(name: str, seconds: float, every: float, chance: random.Random) -> Iterator[Case]:
    epochs = max(1, round(seconds / PLANNED_S * GROUPS * BATCH / SAMPLES))
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(place)
        temporary = folder / "tmp"
        temporary.mkdir()
        (folder / "task.py").write_text(_TASK.format(step_s=STEP_S, samples=SAMPLES))
        text = _TOPOLOGY.format(epochs=epochs, last=HOSTS - 1, groups=GROUPS, batch=BATCH, exchange=SHAPES[name])
        (folder / "soak.toml").write_text(text)
        command = [sys.executable, "-m", "zmqtrain", "launch", "--emulate", "--run-dir", str(folder / "run"), "soak.toml"]
        with open(folder / "output", "w") as output:
            start = time.monotonic()
            environ = {**os.environ, "TMPDIR": str(temporary), _MARK: str(folder)}
            process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True)
            try:
                faults, watches = _disturb(process, name, every, chance, start + PATIENCE * seconds + 60)
            finally:
                _end(process)
        took = time.monotonic() - start
        said = (folder / "output").read_text()
        if process.returncode != 0:
            raise SoakError(
                f"{name}: exit code {process.returncode} after {took:.0f} s and {faults}; its last words:\n{said[-3000:]}"
            )
        if left := _left(str(folder), process.pid, temporary):
            raise SoakError(f"{name}: left behind: {left}")
        summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    judge(name, summary, said)
    for kind in sorted(faults):
        yield case_of("soak", f"{name}, {kind}", faults[kind], "times")
    yield case_of("soak", f"{name}, trained", took, "s", digits=1)
    yield case_of("soak", f"{name}, a step", 1e3 * float(summary["step_s"]["median"]), "ms", digits=1)
    grown = [(growth, watch.name) for watch in watches if (growth := watch.growth()) is not None]
    if grown:
        growth, who = max(grown)
        yield case_of("soak", f"{name}, memory of {who}, which grew most", growth, "MB an hour", digits=1)


def judge(name: str, summary: dict[str, Any], said: str) -> None:
    """Raise `SoakError` if the run with this ``summary.json`` has not trained what it should; ``said``: its output."""
    account = summary.get("account")
    if summary["status"] != "done":
        raise SoakError(f"{name}: {summary['status']} after {summary['steps']} steps:\n{said[-3000:]}")
    if account is None:
        return
    if account["repeated"] or account["counted"] + account["lost"] != account["due"] or (name in WHOLE and account["lost"]):
        raise SoakError(f"{name}: the account is {account}")


# Faults


def _disturb(
    process: subprocess.Popen[bytes], name: str, every: float, chance: random.Random, deadline: float
) -> tuple[dict[str, int], list[Watch]]:
    """A fault every few seconds, once all have joined, until the run ends. Returns how many of each, and the processes."""
    faults: dict[str, int] = {}
    watches: dict[int, Watch] = {}
    due = time.monotonic() + every
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            raise SoakError(f"{name}: it has not ended after {faults}")
        roles = roles_of(process.pid)
        for role, each in sorted(roles.items()):
            with suppress(psutil.Error):
                watch = watches.setdefault(each.pid, Watch(role))
                watch.memory.append((now, each.memory_full_info().uss))
        if now >= due and len([role for role in roles if role.startswith("worker/")]) == GROUPS:
            due = now + every
            kind = chance.choice(list(FAULTS))
            if (kind != "server killed" or name.startswith("replicas")) and FAULTS[kind](process.pid, roles, chance):
                faults[kind] = faults.get(kind, 0) + 1
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return faults, list(watches.values())


def _kill(kind: str) -> Callable[[int, dict[str, psutil.Process], random.Random], bool]:
    def kill(_launcher: int, roles: dict[str, psutil.Process], chance: random.Random) -> bool:
        names = sorted(role for role in roles if role.startswith(kind))
        # Of two servers that are lost at once nothing may be left of a shard.
        if not names or (kind == "server" and len(names) < HOSTS):
            return False
        with suppress(psutil.Error):
            roles[chance.choice(names)].send_signal(signal.SIGKILL)
        return True

    return kill


def _stop(_launcher: int, roles: dict[str, psutil.Process], chance: random.Random) -> bool:
    if not roles:
        return False
    role = roles[chance.choice(sorted(roles))]
    with suppress(psutil.Error):
        role.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        role.send_signal(signal.SIGCONT)
    return True


def _cut(launcher: int, _roles: dict[str, psutil.Process], chance: random.Random) -> bool:
    """Pull the cable of a host between it and the bridge."""
    bridge, cable = f"zt{launcher}-net", f"c{chance.randrange(HOSTS) + 1}"
    down = subprocess.run(["ip", "-n", bridge, "link", "set", cable, "down"], stderr=subprocess.DEVNULL, check=False)
    if down.returncode:
        return False
    time.sleep(PAUSE_S)
    subprocess.run(["ip", "-n", bridge, "link", "set", cable, "up"], stderr=subprocess.DEVNULL, check=False)
    return True


FAULTS: dict[str, Callable[[int, dict[str, psutil.Process], random.Random], bool]] = {
    "worker killed": _kill("worker"),
    "server killed": _kill("server"),
    "process stopped for a moment": _stop,
    "cable pulled for a moment": _cut,
}


# What is left


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _left(mark: str, launcher: int, temporary: Path) -> list[str]:
    """What the run with this mark in its environment has left on this machine."""
    found = [f"file {entry.name}" for entry in temporary.glob("*zmqtrain*")]
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get(_MARK) == mark:
                found.append(f"process {each.pid}: {' '.join(each.cmdline())[:100]}")
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    found += [f"namespace {line.split()[0]}" for line in listed.splitlines() if line.startswith(f"zt{launcher}")]
    return found
