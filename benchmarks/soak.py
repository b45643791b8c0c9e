"""``python -m benchmarks soak --minutes 30 --every 10``: real processes on three emulated hosts, with something killed, stopped or
cut every few seconds.

Each exchange that goes on without lost processes trains for its share of the time, with a fault every ``every`` seconds: a worker
(or a model server that is kept twice) is killed, stopped for a moment, or a host's cable is pulled for a moment. What was killed is
started again. A run passes if it ends well, its account says that no sample counted twice (and, with servers,
that none was lost), nothing is left behind (no process, no network namespace, no folder), and no process holds more and more.

One worker and one server, drawn by lot, are never killed, so that some processes live through all losses. They, the launcher and
the agents are judged once they have warmed up. What counts is the memory in use that no file backs. It does not grow when a role
writes for the first time to a page that it shares with the process that it was forked from, and gets a copy. Roles go on doing that
for many minutes: what tools call unique memory (USS) grows by a hundred MB an hour while nothing is allocated.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from benchmarks.case import Case, case_of
from benchmarks.launched import roles_of
from zmqtrain.errors import UsageError, ZmqTrainError

#: Exchanges, with their part of the topology file. Only servers that are kept twice may be killed.
SHAPES: dict[str, str] = {
    "allreduce": 'kind = "allreduce"',
    "servers-sync": 'kind = "model_server"\nstaleness = "sync"\nshards = 3',
    "servers-async": 'kind = "model_server"\nstaleness = "async"\nshards = 3',
    "replicas-sync": 'kind = "model_server"\nstaleness = "sync"\nshards = 3\nreplicas = 1',
    "replicas-bounded": 'kind = "model_server"\nstaleness = { bound = 2 }\nshards = 3\nreplicas = 1',
    "replicas-async": 'kind = "model_server"\nstaleness = "async"\nshards = 3\nreplicas = 1',
    "gossip": 'kind = "gossip"',
    "averaging": 'kind = "averaging"\nevery = 8',
    "gossip-pairs": 'kind = "gossip"',
    "averaging-pairs": 'kind = "averaging"\nevery = 8',
}
#: Those whose groups have two workers.
PAIRS = ("gossip-pairs", "averaging-pairs")
#: Those in which others train what a lost worker leaves; elsewhere the account says how many samples were not trained, and why.
WHOLE = ("servers-sync", "servers-async")
HOSTS, WORKERS = 3, 4
#: Of the data, and of a group's step.
SAMPLES, BATCH = 4096, 16
#: By default: of all runs together, and between two faults.
MINUTES, EVERY_S = 30.0, 10.0
#: The least time of a step, which the task's loss waits for; the whole is what a run's steps are planned by.
STEP_S, PLANNED_S = 0.04, 0.06
#: How long a process is stopped, and a cable is out: less than the time after which either counts as lost.
PAUSE_S = 3.0
#: A run may take so many times what was planned, and a minute.
PATIENCE = 6.0
#: What a process holds counts from this time of its life on, and is judged if it was watched for so long after that.
WARM_UP_S, WATCHED_S = 300.0, 120.0
#: A process that has warmed up may not gain more MB than this, at more than so many MB an hour, nor so many open files or threads.
MOST_GAINED_MB, MOST_MB_AN_HOUR, MOST_MORE = 8.0, 30.0, 16
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
group_size = {size}
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


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds at a moment."""

    at: float
    """In seconds."""
    nbytes: int
    """Anonymous and shared memory that is in use; copies of its parent's pages are none."""
    files: int
    threads: int


@dataclass(slots=True)
class Watch:
    """What was seen of a process."""

    name: str
    held: list[Held] = field(default_factory=list)

    def warm(self) -> list[Held]:
        """What was seen after its warm-up; nothing, if that was too short to judge."""
        warm = [each for each in self.held if each.at >= self.held[0].at + WARM_UP_S]
        return warm if warm and warm[-1].at - warm[0].at >= WATCHED_S else []

    def gained_mb(self) -> tuple[float, float] | None:
        """How much memory it has gained since its warm-up, and in how many hours: the means of the first and the last third of what
        was seen then. ``None``: it was seen too shortly."""
        warm = self.warm()
        if not warm:
            return None
        third = max(1, len(warm) // 3)
        first, last = warm[:third], warm[-third:]
        hours = (statistics.fmean(each.at for each in last) - statistics.fmean(each.at for each in first)) / 3600
        return (statistics.fmean(each.nbytes for each in last) - statistics.fmean(each.nbytes for each in first)) / 1e6, hours

    def growth(self) -> float | None:
        """MB an hour since its warm-up; ``None``: it was seen too shortly."""
        gained = self.gained_mb()
        return None if gained is None else gained[0] / gained[1]

    def more(self) -> int | None:
        """How many more open files, or threads, it has at the end than it ever had in the first third after its warm-up."""
        warm = self.warm()
        if not warm:
            return None
        first = warm[: max(1, len(warm) // 3)]
        files = min(each.files for each in warm[-5:]) - max(each.files for each in first)
        threads = min(each.threads for each in warm[-5:]) - max(each.threads for each in first)
        return max(files, threads)


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
    size = 2 if name in PAIRS else 1
    groups = WORKERS // size
    epochs = max(1, round(seconds / PLANNED_S * groups * BATCH / SAMPLES))
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(place)
        temporary = folder / "tmp"
        temporary.mkdir()
        (folder / "task.py").write_text(_TASK.format(step_s=STEP_S, samples=SAMPLES))
        text = _TOPOLOGY.format(epochs=epochs, last=HOSTS - 1, groups=groups, size=size, batch=BATCH, exchange=SHAPES[name])
        (folder / "soak.toml").write_text(text)
        command = [sys.executable, "-m", "zmqtrain", "launch", "--emulate", "--run-dir", str(folder / "run"), "soak.toml"]
        with open(folder / "output", "w") as output:
            start = time.monotonic()
            environ = {**os.environ, "TMPDIR": str(temporary), _MARK: str(folder)}
            process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True)
            try:
                faults, watches = _disturb(
                    process, name, every, chance, folder / "run" / "events.jsonl", start + PATIENCE * seconds + 60
                )
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
    judge_held(name, watches)
    for kind in sorted(faults):
        yield case_of("soak", f"{name}, {kind}", faults[kind], "times")
    yield case_of("soak", f"{name}, trained", took, "s", digits=1)
    yield case_of("soak", f"{name}, a step", 1e3 * float(summary["step_s"]["median"]), "ms", digits=1)
    grown = [(growth, watch) for watch in watches if (growth := watch.growth()) is not None]
    if grown:
        growth, watch = max(grown, key=lambda each: each[0])
        yield case_of("soak", f"{name}, memory of {watch.name}, which grew most once warm", growth, "MB an hour", digits=1)
        yield case_of("soak", f"{name}, processes watched once warm", len(grown), "processes")
        more = max(more for each in watches if (more := each.more()) is not None)
        yield case_of("soak", f"{name}, open files or threads more than once warm", more, "at most")


def judge(name: str, summary: dict[str, Any], said: str) -> None:
    """Raise `SoakError` if the run with this ``summary.json`` has not trained what it should; ``said``: its output."""
    account = summary.get("account")
    if summary["status"] != "done":
        raise SoakError(f"{name}: {summary['status']} after {summary['steps']} steps:\n{said[-3000:]}")
    if account is None:
        return
    if account["repeated"] or account["counted"] + account["lost"] != account["due"] or (name in WHOLE and account["lost"]):
        raise SoakError(f"{name}: the account is {account}")


def judge_held(name: str, watches: Sequence[Watch]) -> None:
    """Raise `SoakError` if a process holds more and more."""
    for watch in watches:
        gained, more = watch.gained_mb(), watch.more()
        if gained is not None and gained[0] > MOST_GAINED_MB and gained[0] / gained[1] > MOST_MB_AN_HOUR:
            raise SoakError(f"{name}: {watch.name} has gained {gained[0]:.1f} MB in {60 * gained[1]:.0f} min since it was warm")
        if more is not None and more > MOST_MORE:
            raise SoakError(f"{name}: {watch.name} has {more} more open files or threads than when it was warm")


# Faults


def _disturb(
    process: subprocess.Popen[bytes], name: str, every: float, chance: random.Random, events: Path, deadline: float
) -> tuple[dict[str, int], list[Watch]]:
    """A fault every few seconds, once all have joined, until the run ends. Returns how many of each, and the processes."""
    faults: dict[str, int] = {}
    watches: dict[int, Watch] = {}
    spared = {f"worker/{chance.randrange(WORKERS)}", f"server/{chance.randrange(HOSTS)}"}
    due = float("inf")
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            raise SoakError(f"{name}: it has not ended after {faults}")
        roles = roles_of(process.pid)
        for who, each in sorted({**_leaders(process.pid), **roles}.items()):
            with suppress(psutil.Error, OSError):
                watches.setdefault(each.pid, Watch(who)).held.append(_held(each, now))
        if due == float("inf") and _all_have_joined(events):
            due = now + every
        if now >= due and len([role for role in roles if role.startswith("worker/")]) == WORKERS:
            due = now + every
            kind = chance.choice(list(FAULTS))
            if (kind != "server killed" or name.startswith("replicas")) and FAULTS[kind](process.pid, roles, spared, chance):
                faults[kind] = faults.get(kind, 0) + 1
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return faults, list(watches.values())


def _all_have_joined(events: Path) -> bool:
    with suppress(FileNotFoundError), events.open() as lines:
        return any(json.loads(line).get("kind") == "running" for line in lines if line.endswith("\n"))
    return False


def _leaders(launcher: int) -> dict[str, psutil.Process]:
    """The launcher and its agents, by name."""
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.Error):
        found["the launcher"] = psutil.Process(launcher)
        for child in found["the launcher"].children():
            with suppress(psutil.Error):
                if (match := re.fullmatch(r"zmqtrain (agent/\S+)\s*", " ".join(child.cmdline()))) is not None:
                    found[match[1]] = child
    return found


def _held(process: psutil.Process, now: float) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))
    return Held(now, 1024 * kib, process.num_fds(), int(status["Threads"]))


#: Gets the launcher's number, the roles, the names of those that are never killed, and the choice. Returns whether there was one.
Disturb: TypeAlias = Callable[[int, dict[str, psutil.Process], Collection[str], random.Random], bool]


def _kill(kind: str) -> Disturb:
    def kill(_launcher: int, roles: dict[str, psutil.Process], spared: Collection[str], chance: random.Random) -> bool:
        names = sorted(role for role in roles if role.startswith(kind))
        # Of two servers that are lost at once nothing may be left of a shard.
        if not {*names} - {*spared} or (kind == "server" and len(names) < HOSTS):
            return False
        with suppress(psutil.Error):
            roles[chance.choice([each for each in names if each not in spared])].send_signal(signal.SIGKILL)
        return True

    return kill


def _stop(_launcher: int, roles: dict[str, psutil.Process], _spared: Collection[str], chance: random.Random) -> bool:
    if not roles:
        return False
    role = roles[chance.choice(sorted(roles))]
    with suppress(psutil.Error):
        role.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        role.send_signal(signal.SIGCONT)
    return True


def _cut(launcher: int, _roles: dict[str, psutil.Process], _spared: Collection[str], chance: random.Random) -> bool:
    """Pull the cable of a host between it and the bridge."""
    bridge, cable = f"zt{launcher}-net", f"c{chance.randrange(HOSTS) + 1}"
    down = subprocess.run(["ip", "-n", bridge, "link", "set", cable, "down"], stderr=subprocess.DEVNULL, check=False)
    if down.returncode:
        return False
    time.sleep(PAUSE_S)
    subprocess.run(["ip", "-n", bridge, "link", "set", cable, "up"], stderr=subprocess.DEVNULL, check=False)
    return True


FAULTS: dict[str, Disturb] = {
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
