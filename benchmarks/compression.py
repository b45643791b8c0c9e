"""``python -m benchmarks compression --data DIR``: time to the same validation loss over 100 Mbit/s, with gradients compressed.

Four simulated hosts train CIFARNet on CIFAR-10 and a small transformer on Shakespeare with all-reduce, once as it is, and once with
each way to compress. Arithmetic, messages and losses are real; time is virtual, so the other work of this machine changes no
figure: links take the time of 100 Mbit/s and 200 us, and layers that of a host of `FLOPS` operations a second. What compression
itself computes takes no virtual time; it is measured here apart, in this thread's processor time.

Each way takes its own learning rate by the same rule: that of the problem's rates with which it is the fastest with the first seed.
Then the other seeds are trained, and the median counts. For model servers, whose parameters come back as they are, only the time of
a step is stated.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from benchmarks.case import Case, case_of
from zmqtrain import Task
from zmqtrain.errors import TimeLimitError, UsageError, ZmqTrainError

HOSTS = 4
#: Operations a second of a host, about what four cores of a processor reach in layers like these.
FLOPS = 100e9
#: The setting, by the name of the way to compress.
WAYS = {
    "none": "",
    "int8": 'compression = "int8"',
    "top-k 1 %": 'compression = "topk"',
    "PowerSGD rank 4": 'compression = "powersgd"',
    "sign": 'compression = "sign"',
}
SERVERS = f'kind = "model_server"\nstaleness = "sync"\nshards = {HOSTS}\n'
#: The longest virtual time of a run without compression, and of others as a multiple of that: what takes longer does not pay.
CAP_S, CAP = 600.0, 1.5
#: Virtual time in which workers have joined.
START_S = 5.0
SEEDS = (1, 2, 3)
#: Steps of a run that only shows how long they take.
SHORT = 8
EVALUATE_EVERY = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """What is trained until which validation loss."""

    batch: int
    """Samples of a worker's step."""
    loss: float
    rates: tuple[float, ...]
    """Learning rates, of which each way takes the fastest."""
    evaluated: int
    """How many samples are evaluated."""


PROBLEMS = {
    "cifar": Problem(batch=32, loss=1.5, rates=(0.01, 0.03, 0.1), evaluated=500),
    "shakespeare": Problem(batch=16, loss=2.1, rates=(1e-3, 2e-3, 4e-3), evaluated=200),
}
PARTS = (*PROBLEMS,)

_TOPOLOGY = """
[job]
task = "compression:unused"
seed = {seed}
timeout = "60 s"
oversubscribe = true
{length}
[[hosts]]
name = "h[1-{hosts}]"
address = "10.0.0.1"
slots = 1
[compute]
{groups} = {hosts}
batch_size = {batch}
device = "modelled"
profile = "{profile}"
threads = 1
bucket_size = "512 KiB"
[exchange]
{exchange}
[network]
bandwidth = "100 Mbit/s"
latency = "200 us"
[simulation]
payload = "real"
time_limit = {limit}
[observe]
trace_steps = 0
"""


@dataclass(slots=True)
class Run:
    """What workers reported."""

    steps: list[float] = field(default_factory=list)
    """Seconds of each worker's steps."""
    began: float = float("inf")
    evals: list[tuple[float, int, float]] = field(default_factory=list)
    """Time, step and loss."""

    def reached(self, loss: float) -> tuple[float, int]:
        """After how many seconds and steps an evaluation was no higher than this; infinite ones, and all steps, if none was."""
        found = next((each for each in self.evals if each[2] <= loss), None)
        return (math.inf, self.evals[-1][1] if self.evals else 0) if found is None else (found[0] - self.began, found[1])

    def hear(self, _peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event.get("kind") == "step":
                self.steps.append(event["values"]["seconds"])
                self.began = min(self.began, event["time"] - event["values"]["seconds"])
            elif event.get("kind") == "eval" and "eval_loss" in event["values"]:
                self.evals.append((event["time"], event["step"], event["values"]["eval_loss"]))


def bench_compression(parts: Sequence[str] = (), *, data: str | None = None, ways: Sequence[str] = ()) -> Iterator[Case]:
    """Each problem in `PARTS` (or these), without compression and with each of `WAYS` (or of these): seconds to its loss, steps to
    it, and milliseconds of a step, beside those without; and what compression computes in a step. Raises `UsageError`."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"benchmark compression has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if unknown := [way for way in ways if way not in WAYS]:
        raise UsageError(f"benchmark compression has no system {unknown[0]!r}; there are {', '.join(WAYS)}")
    if data is None:
        raise UsageError("benchmark compression needs --data: a folder with CIFAR-10's binary batches and shakespeare.txt")
    for problem in parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="zmqtrain-bench-") as folder:
            profile = Path(folder, "profile.json")
            task = task_of(problem, data, PROBLEMS[problem].rates[0])
            profile.write_text(json.dumps(profile_of(task, PROBLEMS[problem].batch)), encoding="utf-8")
            yield from _part(problem, data, profile, ways)


def _part(problem: str, data: str, profile: Path, ways: Sequence[str]) -> Iterator[Case]:
    of, plain = PROBLEMS[problem], dict[str, float]()
    name = f"seconds to a loss of {of.loss:g}"
    for way, setting in WAYS.items():
        if way != "none" and ways and way not in ways:
            continue
        limit_s = CAP_S if way == "none" else CAP * plain[name]
        exchange = f'kind = "allreduce"\n{setting}'
        first: dict[float, Run] = {}
        for lr in of.rates:  # a rate that is slower than another need not be trained to its end
            least_s = min((run.reached(of.loss)[0] for run in first.values()), default=math.inf)
            task = task_of(problem, data, lr)
            first[lr] = trained(problem, task, profile, exchange, SEEDS[0], limit_s=min(limit_s, least_s))
        lr = min(first, key=lambda each: first[each].reached(of.loss))
        task = task_of(problem, data, lr)
        runs = [first[lr], *(trained(problem, task, profile, exchange, seed, limit_s=limit_s) for seed in SEEDS[1:])]
        reached = [run.reached(of.loss) for run in runs]
        short = trained(problem, task, profile, SERVERS + setting, SEEDS[0], steps=SHORT)
        values = {
            name: (statistics.median(min(seconds, limit_s) for seconds, _ in reached), "s"),
            "the fastest seed": (min(min(seconds, limit_s) for seconds, _ in reached), "s"),
            "the slowest seed": (max(min(seconds, limit_s) for seconds, _ in reached), "s"),
            "steps to it": (float(statistics.median(steps for _, steps in reached)), "steps"),
            "learning rate": (lr, ""),
            "a step": (1e3 * statistics.median(runs[0].steps), "ms"),
            "a step with model servers": (1e3 * statistics.median(short.steps), "ms"),
        }
        for what, (value, unit) in values.items():
            case = f"{problem}, {way}, {what}"
            if way == "none":
                plain[what] = value
            if way == "none" or what in ("learning rate", "the fastest seed", "the slowest seed"):
                yield case_of("compression", case, value, unit, digits=4 if what == "learning rate" else 2)
            else:
                yield case_of("compression", case, value, unit, "none", plain[what], digits=2)
        if setting:
            yield case_of("compression", f"{problem}, {way}, its own arithmetic", 1e3 * arithmetic_s(task, setting), "ms", digits=2)


def task_of(problem: str, data: str, lr: float) -> Task:
    """The example's task with a learning rate, evaluated on fewer samples."""
    from examples import cifar10, shakespeare

    of = PROBLEMS[problem]
    made = cifar10.task(data, lr, momentum=0.9) if problem == "cifar" else shakespeare.task(data, "transformer", lr)
    held_out: Any = made.eval_data
    step = len(held_out) // of.evaluated
    return replace(made, eval_data=Subset(held_out, range(0, step * of.evaluated, step)))


def trained(problem: str, task: Task, profile: Path, exchange: str, seed: int, *, steps: int = 0, limit_s: float = CAP_S) -> Run:
    """A run until the problem's loss, for at most ``limit_s`` virtual seconds; or of so many steps."""
    from zmqtrain.simulate.run import Options, simulate
    from zmqtrain.topology.load import parse_topology

    of, run, servers = PROBLEMS[problem], Run(), "model_server" in exchange
    until = f'eval_every = {EVALUATE_EVERY}\nuntil = {{ metric = "eval_loss", reaches = {of.loss} }}'
    length = f"steps = {steps}" if steps else until
    text = _TOPOLOGY.format(
        seed=seed, hosts=HOSTS, profile=profile, exchange=exchange, limit=START_S + limit_s, length=length,
        groups="groups" if servers else "group_size", batch=of.batch * (1 if servers else HOSTS),
    )  # fmt: skip
    try:
        ending = simulate(parse_topology(text), options=Options(on_report=run.hear, task=task)).ending
    except TimeLimitError:
        return run
    finally:
        gc.collect()  # models and data of all workers, which are in cycles
    if (ending.error or {}).get("type") == "NonFiniteLossError":  # with this learning rate
        return run
    if ending.status != "done":
        raise ZmqTrainError(f"the simulated run of {problem} failed: {ending.error}")
    return run


def profile_of(task: Task, batch: int) -> dict[str, Any]:
    """How long a host of `FLOPS` takes for the layers: two operations for each weight and place at which it is used, in forward,
    and four in backward."""
    model = task.model()
    places: dict[str, int] = {}
    inputs = next(iter(torch.utils.data.DataLoader(task.train_data, batch)))[0]

    def note(name: str, module: nn.Module, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        numel = found.numel() // batch
        places[name] = numel // (found.shape[1] if isinstance(module, nn.Conv2d) else found.shape[-1])

    modules = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    for name, module in modules.items():
        module.register_forward_hook(lambda module, _, output, name=name: note(name, module, output))
    with torch.no_grad():
        model(inputs)
    layers = []
    most = max(places.values(), default=1)
    for name, module in modules.items():
        numel = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        added = isinstance(module, nn.Embedding) or not name  # there is nothing to multiply
        used = 0 if added else places.get(name, most)  # some are used without being called
        forward_s = 2 * numel * used * batch / FLOPS
        layers.append({"name": name, "numel": numel, "forward_s": forward_s, "backward_s": 2 * forward_s})
    return {"layers": layers, "batch_size": batch, "source": f"{FLOPS / 1e9:g} GFLOP/s"}


def arithmetic_s(task: Task, setting: str) -> float:
    """Processor seconds of encoding the gradients of a step once, and of decoding them once."""
    from zmqtrain.exchange.matrices import matrices_in
    from zmqtrain.topology.load import parse_topology
    from zmqtrain.wire.compress import make_compressor
    from zmqtrain.wire.tensor import TensorPayload

    exchange = parse_topology(f"[job]\n[exchange]\n{setting}").exchange
    compressor = make_compressor(exchange.compression, exchange.compression_ratio, exchange.compression_rank)
    gradients: list[Tensor] = [torch.randn(parameter.shape) for parameter in task.model().parameters()]
    shapes = [tuple(gradient.shape) for gradient in gradients]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    matrices = matrices_in(shapes, 0, len(flat))
    took = []
    for _ in range(9):
        began = time.thread_time()
        message = compressor.encode("all", TensorPayload.of(flat), matrices)
        compressor.decode(message)
        took.append(time.thread_time() - began)
    return statistics.median(took)
