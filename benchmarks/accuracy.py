"""``python -m benchmarks accuracy --data DIR``: what whole trainings reach, by each exchange, beside one process.

The claims of the papers are of accuracy: GossipGraD trains LeNet on MNIST to 99.2 % and CIFARNet on CIFAR-10 to 72 to 73 %, with as
many peers as it likes. Here each problem is trained for a fixed number of epochs in simulated time with real arithmetic, by one
process, by all-reduce, by 4, 8 and 16 gossip peers, by asynchronous servers and by averaging. All ways train the same samples an
update of all workers (a worker of N has an N-th of the batch), with the same learning rate and its fall, which are tuned for none.

The figure is the evaluation on the whole test set after the last epoch: of the run's model, which for gossip and averaging is the
mean. Three seeds; the median counts.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.case import Case, Ratio, case_of
from benchmarks.compression import profile_of
from zmqtrain import Task
from zmqtrain.errors import UsageError, ZmqTrainError

SEEDS = (1, 2, 3)
#: Steps in which the learning rate rises.
WARM_UP = 100


@dataclass(frozen=True, slots=True)
class Problem:
    """What is trained, for how long."""

    batch: int
    """Samples of an update of all workers."""
    epochs: int
    lr: float
    metric: str
    """``eval_accuracy``, stated in per cent, or ``eval_loss``, in nats."""


PROBLEMS = {
    "mnist": Problem(batch=256, epochs=6, lr=0.05, metric="eval_accuracy"),
    "cifar": Problem(batch=128, epochs=20, lr=0.05, metric="eval_accuracy"),
    "lstm": Problem(batch=64, epochs=20, lr=4e-3, metric="eval_loss"),
    "transformer": Problem(batch=64, epochs=20, lr=2e-3, metric="eval_loss"),
}
PARTS = (*PROBLEMS,)
#: The unit of each metric, and which of two values is divided by the other.
_COMPARED: dict[str, tuple[str, Ratio]] = {"eval_accuracy": ("%", "value/peer"), "eval_loss": ("nats", "peer/value")}


@dataclass(frozen=True, slots=True)
class Way:
    """How workers train together."""

    workers: int
    group_size: int
    exchange: str


WAYS = {
    "one process": Way(1, 1, 'kind = "allreduce"'),
    "all-reduce, 4 workers": Way(4, 4, 'kind = "allreduce"'),
    **{f"gossip, {peers} peers": Way(peers, 1, 'kind = "gossip"') for peers in (4, 8, 16)},
    "asynchronous servers, 4 groups": Way(4, 1, 'kind = "model_server"\nstaleness = "async"'),
    "averaging every 8 steps, 4 groups": Way(4, 1, 'kind = "averaging"\nevery = 8'),
}

_TOPOLOGY = """
[job]
task = "accuracy:unused"
seed = {seed}
timeout = "60 s"
oversubscribe = true
epochs = {epochs}
[[hosts]]
name = "h[1-{workers}]"
address = "10.0.0.1"
slots = 1
[compute]
groups = {groups}
group_size = {group_size}
batch_size = {batch}
device = "modelled"
profile = "{profile}"
threads = 1
[exchange]
{exchange}
[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
[simulation]
payload = "real"
[observe]
trace_steps = 0
"""


@dataclass(slots=True)
class Evaluations:
    """What the run's model reached after each epoch."""

    metric: str
    values: list[float] = field(default_factory=list)

    def hear(self, _peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Called with workers' events."""
        self.values += [
            event["values"][self.metric] for event in events if event.get("kind") == "eval" and self.metric in event["values"]
        ]


def bench_accuracy(parts: Sequence[str] = (), *, data: str | None = None, ways: Sequence[str] = ()) -> Iterator[Case]:
    """For each problem in `PARTS` (or these), and one process and each of `WAYS` (or of these): the last evaluation, beside that of
    one process. Raises `UsageError`."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"benchmark accuracy has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if unknown := [way for way in ways if way not in WAYS]:
        raise UsageError(f"benchmark accuracy has no system {unknown[0]!r}; there are {'; '.join(WAYS)}")
    if data is None:
        raise UsageError("benchmark accuracy needs --data: a folder with MNIST, CIFAR-10's binary batches and shakespeare.txt")
    for name in parts or PARTS:
        task, one = task_of(name, data), None
        for way in WAYS:
            if way != "one process" and ways and way not in ways:
                continue
            reached = sorted(trained(name, task, WAYS[way], seed) for seed in SEEDS)
            case, value = f"{name}, {way}", statistics.median(reached)
            unit, ratio = _COMPARED[PROBLEMS[name].metric]
            yield case_of("accuracy", case, value, unit, "one process", one, ratio, digits=4)
            one = one or value
            yield case_of("accuracy", f"{case}, the lowest seed", reached[0], unit, digits=4)
            yield case_of("accuracy", f"{case}, the highest seed", reached[-1], unit, digits=4)


def task_of(problem: str, data: str) -> Task:
    """The example's task, with a learning rate that rises for `WARM_UP` steps and then falls to nothing."""
    from examples import cifar10, mnist, shakespeare

    of = PROBLEMS[problem]
    if problem == "mnist":
        made = mnist.task(data, of.lr)
    elif problem == "cifar":
        made = cifar10.task(data, of.lr, momentum=0.9)
    else:
        made = shakespeare.task(data, "lstm" if problem == "lstm" else "transformer", of.lr)
    samples: Any = made.train_data
    return replace(made, schedule=partial(_schedule, steps=of.epochs * len(samples) // of.batch))


def _schedule(optimizer: Optimizer, *, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, max(0.01, 1 - step / steps)))


def trained(problem: str, task: Task, way: Way, seed: int) -> float:
    """What the model of a run has reached in the end, in per cent or nats. Raises `ZmqTrainError` if it fails."""
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology

    of = PROBLEMS[problem]
    groups, evaluations = way.workers // way.group_size, Evaluations(of.metric)
    batch = of.batch // groups
    with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as folder:
        profile = Path(folder, "profile.json")
        profile.write_text(json.dumps(profile_of(task, batch // way.group_size)), encoding="utf-8")
        text = _TOPOLOGY.format(
            seed=seed, epochs=of.epochs, workers=way.workers, groups=groups, group_size=way.group_size,
            batch=batch, profile=profile, exchange=way.exchange,
        )  # fmt: skip
        ending = simulate(parse_topology(text), options=Options(on_report=evaluations.hear, task=task)).ending
    gc.collect()  # models and data of all workers, which are in cycles
    if ending.status != "done" or not evaluations.values:
        raise ZmqTrainError(f"the simulated run of {problem} failed: {ending.error}")
    last = evaluations.values[-1]
    return 100 * last if of.metric == "eval_accuracy" else last
