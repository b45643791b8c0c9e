"""``python -m benchmarks merged``: a step with the fully connected layers merged on an FC server, beside the same step without.

AlexNet at the times of its profile (a batch of 256 a group), eight workers and a ninth host for the FC server, at 1 Gbit/s; a
model server on each of the nine hosts. Then staleness; then two groups on the slots of one, which take turns (pipelining), beside
one group alone and two groups with slots of their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case, case_of
from zmqtrain.errors import SimulationError, UsageError, ZmqTrainError

#: One result: bench, case, value, unit, peer, peer_value, ratio.

#: What there is, in this order: `--part`.
PARTS = ("emulated", "simulated", "staleness", "pipelining")
WORKERS = 8
#: Numbers of groups that the workers are divided into.
SIMULATED = (1, 2, 4, 8)
EMULATED = (1, 2)
#: The first steps wait for connections, and are left out.
WARM = 2
STEPS = 6
#: Until staleness has settled.
LONG = 40
#: Slow motion, so that this machine can carry the network of all hosts.
DILATION = 10.0

_TOPOLOGY = """
[job]
name = "merged"
steps = {steps}
timeout = "120 s"
[[hosts]]
name = "n[0-{last}]"
slots = 1
address = "{address}"
[compute]
groups = {groups}
group_size = {size}
batch_size = 256
device = "modelled"
profile = "alexnet"
pipeline = {pipeline}
noise = {{ kind = "normal", spread = {noise:g} }}
[exchange]
kind = "model_server"
staleness = "async"
merged_fc = {merged}
shards = {shards}
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
dilation = {dilation:g}
[observe]
trace_steps = 0
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """A job."""

    groups: int
    merged: bool
    workers: int = WORKERS
    """On a slot each, or, with ``pipeline``, so many on each slot."""
    pipeline: int = 1
    noise: float = 0.0
    """By how much times of compute vary, as a share of them."""

    def text(self, steps: int, *, dilation: float, address: str) -> str:
        """Its topology file."""
        hosts = self.workers // self.pipeline + 1
        return _TOPOLOGY.format(
            steps=steps, last=hosts - 1, address=address, groups=self.groups, size=self.workers // self.groups, dilation=dilation,
            merged=str(self.merged).lower(), shards=hosts, pipeline=self.pipeline,
            noise=self.noise,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a run."""

    step_s: float
    """From one step of any group to the next, in the mean: a group's step by the number of groups."""
    sent_bytes: float
    """By all roles together, a step of a group."""
    staleness: float | None
    """Mean, of the model servers."""
    fc_staleness: float | None
    """Mean, of the FC server."""


def bench_merged(*, parts: Sequence[str] = PARTS, steps: int = STEPS) -> Iterator[Case]:
    """A case for the time of a step and one for its bytes, at each number of groups; then staleness and pipelining.

    Raises `UsageError` for a part that there is not."""
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UsageError(f"benchmark merged has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for groups in EMULATED if "emulated" in parts else ():
        yield from _compared(f"{groups} groups, emulated", *(launched(Setting(groups, way), steps) for way in (True, False)))
    for groups in SIMULATED if "simulated" in parts else ():
        yield from _compared(f"{groups} groups, simulated", *(run_simulated(Setting(groups, way), steps) for way in (True, False)))
    for groups in SIMULATED[1:] if "staleness" in parts else ():
        found = run_simulated(Setting(groups, True, noise=0.1), LONG)
        assert found.staleness is not None
        assert found.fc_staleness is not None
        yield _stated(f"staleness of the convolutions, {groups} groups, simulated", found.staleness, "groups - 1", groups - 1)
        yield _stated(f"staleness of the fully connected layers, {groups} groups, simulated", found.fc_staleness, "none", 0)
    if "pipelining" in parts:
        yield from _pipelining(steps)


def _pipelining(steps: int) -> Iterator[Case]:
    alone = run_simulated(Setting(1, True), 2 * steps)
    apart = run_simulated(Setting(2, True), 2 * steps)
    piped = run_simulated(Setting(2, True, workers=2 * WORKERS, pipeline=2), 2 * steps)
    for peer, other in (("one group", alone), ("two groups apart", apart)):
        case = f"step of two groups on the same {WORKERS} slots, simulated"
        yield case_of("merged", case, 1e3 * piped.step_s, "ms", peer, 1e3 * other.step_s)


def run_simulated(setting: Setting, steps: int = STEPS) -> Measured:
    """On virtual time."""
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology

    heard: list[Mapping[str, Any]] = []
    topology = parse_topology(setting.text(steps, dilation=1.0, address="10.0.0.1"))
    result = simulate(topology, options=Options(on_report=lambda _, events: heard.extend(events)))
    if result.ending.status != "done":
        raise SimulationError(f"the simulated job failed: {result.ending.error}")
    return _measured(setting, heard, steps)


def launched(setting: Setting, steps: int = STEPS) -> Measured:
    """In processes on an emulated network."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "merged.toml"
        file.write_text(setting.text(steps, dilation=DILATION, address="localhost"))
        command = [sys.executable, "-m", "zmqtrain", "launch", str(file), "--emulate", "--run-dir", str(folder / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ZmqTrainError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
        return _measured(setting, [json.loads(line) for line in lines], steps)


def _measured(setting: Setting, events: Sequence[Mapping[str, Any]], steps: int) -> Measured:
    seconds = [float(event["values"]["seconds"]) for event in events if event.get("kind") == "step" and event["step"] >= WARM]
    sent = sum(int(event["values"]["bytes_sent"]) for event in events if event.get("kind") == "traffic")
    stale, fc_stale = (_staleness(events, kind) for kind in ("server", "fc"))
    return Measured(statistics.fmean(seconds) / setting.groups, sent / (steps * setting.groups), stale, fc_stale)


def _staleness(events: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    """The mean over all updates by servers of a kind, of which some may have nothing to update."""
    applied = Counter[int]()
    for event in events:
        if event.get("kind") == kind:
            applied.update({int(staleness): count for staleness, count in event["values"]["staleness"].items()})
    return sum(staleness * count for staleness, count in applied.items()) / applied.total() if applied else None


def _compared(what: str, merged: Measured, unmerged: Measured) -> Iterator[Case]:
    yield case_of("merged", f"AlexNet's step, {what}", 1e3 * merged.step_s, "ms", "not merged", 1e3 * unmerged.step_s)
    yield case_of(
        "merged", f"AlexNet's bytes a step, {what}", merged.sent_bytes / 1e6, "MB", "not merged", unmerged.sent_bytes / 1e6
    )


def _stated(case: str, value: float, expected: str, expected_value: float) -> Case:
    return {**case_of("merged", case, value, "updates", expected, expected_value), "ratio": None}
