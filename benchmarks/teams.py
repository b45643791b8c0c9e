"""``python -m benchmarks teams``: what it costs that groups of several workers may lose some, while none is lost.

Steps and bytes are simulated at 1 Gbit/s: four groups of two workers, each on a host of its own, or two on each host. Processor
time is that of a launch on this machine less that of a shorter one: two groups of two workers. Without ``elastic`` these share
memory; with it, all that they add up and exchange travels in messages.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Case, case_of
from zmqtrain.errors import SimulationError

PEER = "elastic = false"
EXCHANGES = {
    "gossip": 'kind = "gossip"',
    "local SGD, every 4": 'kind = "averaging"\nevery = 4',
    "synchronous servers": 'kind = "model_server"\nstaleness = "sync"\nshards = 2',
    "merged FC, synchronous": 'kind = "model_server"\nstaleness = "sync"\nshards = 2\nmerged_fc = true',
}
#: Profiles, with the samples of a group and step.
MODELS = (("lenet", 64), ("alexnet", 64))
GROUPS, SIZE = 4, 2
#: The first steps wait for connections, and are left out.
WARM, STEPS = 2, 14
#: Of launches: their steps, and how often both are repeated.
SHORT, LONG, TIMES = 20, 120, 3

_SIMULATED = """
[job]
name = "teams"
steps = {steps}
timeout = "600 s"
elastic = {elastic}
[[hosts]]
name = "h[1-{hosts}]"
slots = {slots}
address = "10.0.0.1"
[[hosts]]
name = "s[1-3]"
slots = 1
address = "10.0.0.2"
[compute]
groups = {groups}
group_size = {size}
batch_size = {batch}
device = "modelled"
profile = "{profile}"
[exchange]
{exchange}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[simulation]
payload = "phantom"
[observe]
trace_steps = 0
"""
_LAUNCHED = """
[job]
name = "teams"
task = "task.py"
steps = {steps}
timeout = "60 s"
elastic = {elastic}
oversubscribe = true
[compute]
groups = 2
group_size = 2
batch_size = 8
threads = 1
device = "cpu"
[exchange]
{exchange}
"""
#: 4.2 million parameters.
_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(512, 1024, generator=generator), torch.randint(10, (512,), generator=generator))
    return Task(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)), nn.Linear(1024, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        train_data=data,
    )
"""


def bench_teams(*, models: Sequence[tuple[str, int]] = MODELS, launches: Sequence[str] = ("gossip",)) -> Iterator[Case]:
    """Step times, bytes that all roles send for a step of a group, and processor time of a step of a worker."""
    for profile, batch in models:
        for name, exchange in EXCHANGES.items():
            for slots, where in ((1, "hosts of their own"), (2, "two on each host")):
                yes, no = (simulated(profile, batch, exchange, slots, elastic=elastic) for elastic in (True, False))
                of = f"{profile}, {name}, {where}"
                yield case_of("teams", f"step of {of}", 1e3 * yes[0], "ms", PEER, 1e3 * no[0], digits=3)
                yield case_of("teams", f"bytes of a group and step of {of}", yes[1] / 1e6, "MB", PEER, no[1] / 1e6, digits=2)
    for name in launches:
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(TIMES):
            for elastic, times in found.items():
                times.append(processor_s(EXCHANGES[name], elastic=elastic))
        yes_s, no_s = (1e3 * statistics.median(found[elastic]) for elastic in (True, False))
        yield case_of("teams", f"processor time of a worker's step, {name}, one host, 17 MB", yes_s, "ms", PEER, no_s, digits=3)


def simulated(profile: str, batch: int, exchange: str, slots: int, *, elastic: bool) -> tuple[float, float]:
    """Mean seconds of a step, and the bytes that all roles send for a step of a group, on virtual time."""
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology

    seconds: list[float] = []
    sent: dict[str, int] = {}

    def hear(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step" and event["step"] >= WARM:
                seconds.append(float(event["values"]["seconds"]))
            elif event["kind"] == "traffic":
                sent[peer] = int(event["values"]["bytes_sent"])

    text = _SIMULATED.format(
        steps=STEPS,
        elastic=str(elastic).lower(),
        hosts=GROUPS * SIZE // slots,
        slots=slots,
        groups=GROUPS,
        size=SIZE,
        batch=batch,
        profile=profile,
        exchange=exchange,
    )
    result = simulate(parse_topology(text), options=Options(on_report=hear))
    if result.ending.status != "done":
        raise SimulationError(f"the simulated job failed: {result.ending.error}")
    return statistics.fmean(seconds), sum(sent.values()) / (STEPS * GROUPS)


def processor_s(exchange: str, *, elastic: bool) -> float:
    """Processor time of one step of one worker: of a long launch less that of a short one."""
    spent = {}
    for steps in (SHORT, LONG):
        with tempfile.TemporaryDirectory(prefix="zmqtrain-teams-") as folder:
            Path(folder, "task.py").write_text(_TASK)
            text = _LAUNCHED.format(steps=steps, elastic=str(elastic).lower(), exchange=exchange)
            Path(folder, "teams.toml").write_text(text)
            before = _children_s()
            command = [sys.executable, "-m", "zmqtrain", "launch", "teams.toml", "--run-dir", "run"]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
            spent[steps] = _children_s() - before
    return (spent[LONG] - spent[SHORT]) / (LONG - SHORT) / 4


def _children_s() -> float:
    """The processor time of all processes that this one has started, and of theirs, that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
