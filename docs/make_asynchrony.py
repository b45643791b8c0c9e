"""Asynchronous groups beside synchronous ones at the same samples: before, and with the look-ahead (zmqtrain.exchange.look_ahead).

    python docs/make_asynchrony.py run lenet FOLDER --data DIR       # a task's cells, about ten minutes; again: go on
    python docs/make_asynchrony.py check FOLDER --data DIR           # the emulator beside a simulated run of the real roles
    python docs/make_asynchrony.py table FOLDER                      # writes docs/asynchrony.json, prints rows of Markdown

An emulator in one process: g groups, each computes a batch with the parameters that it read last, in a time that varies by a
tenth, and the server's own code (`Compensation`, and `Shard` with all it has) applies it when it is done. *sync* is the same
file with ``staleness = "sync"``: an update has the mean gradient of g batches. All see the same samples: U updates of one batch, or
U / g of g batches.
Models are those of tuning_tasks.py, and the transformer of examples/shakespeare.py, narrow; what they are judged on was not
trained on.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tuning_tasks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from examples import mnist, shakespeare
from zmqtrain import Task
from zmqtrain.exchange.momentum import Compensation, expected_staleness
from zmqtrain.exchange.norm_limit import NormLimit
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.pieces import Piece
from zmqtrain.observe.summary import Summary
from zmqtrain.server.aggregator import Update
from zmqtrain.server.rate_recovery import Recovery
from zmqtrain.server.serving import Shard
from zmqtrain.server.shard import TensorEntry
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology

GROUPS = (2, 4, 8)
WAYS = ("sync", "before", "ahead")
#: Of the time that a group takes for a batch, about its mean.
JITTER = 0.1
SGD, PLAIN, RMSPROP, ADAM = "SGD, momentum 0.9", "SGD", "RMSprop", "Adam"


@dataclass(frozen=True, slots=True)
class Job:
    """A task and how long it is trained."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    train: tuple[Tensor, Tensor]
    judged: tuple[Tensor, Tensor]
    kind: str
    rates: tuple[float, ...]
    updates: int
    """Of one batch each; a multiple of all numbers of groups."""
    batch: int = 32
    warmup: int = 0
    """Steps of a group in which the rate rises, and it falls to almost nothing at the end, as in examples/mnist.py; 0: it stays."""

    def optimizer(self, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        if self.kind == ADAM:
            return torch.optim.Adam(parameters, lr=lr)
        if self.kind == RMSPROP:
            return torch.optim.RMSprop(parameters, lr=lr)
        return torch.optim.SGD(parameters, lr=lr, momentum=0.0 if self.kind == PLAIN else 0.9, weight_decay=5e-4)

    def factor(self, step: int, steps: int) -> float:
        """Of the learning rate, at a step of a group."""
        return min((step + 1) / self.warmup, max(0.02, 1 - step / steps)) if self.warmup else 1.0


def lenet(data: str) -> Job:
    task = tuning_tasks.lenet(data, 16000)
    x, y = task.train_data.tensors
    cut = 12000
    return Job(task.model, task.loss, (x[:cut], y[:cut]), (x[cut:], y[cut:]), SGD, (0.02, 0.05, 0.1), 2400, warmup=10)


def plain(data: str) -> Job:
    """The same without momentum, at rates that move it as far as 0.01 and 0.04 do with a momentum of 0.9."""
    return replace(lenet(data), kind=PLAIN, rates=(0.1, 0.4))


def rmsprop(data: str) -> Job:
    """The same with RMSprop without momentum."""
    return replace(lenet(data), kind=RMSPROP, rates=(0.001, 0.003))


def cifarnet(data: str) -> Job:
    task = tuning_tasks.cifarnet(data, 24000)
    x, y = task.train_data.tensors
    cut = 20000
    return Job(task.model, task.loss, (x[:cut], y[:cut]), (x[cut:], y[cut:]), SGD, (0.003, 0.01, 0.03), 1920, warmup=10)


def transformer(data: str) -> Job:
    text, characters = shakespeare.read(data)
    passages = shakespeare.Passages(text, 16)
    pairs = [passages[index] for index in range(len(passages))]
    x, y = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
    cut = len(x) - 1000
    rates = (0.001, 0.003, 0.01)
    return Job(
        lambda: shakespeare.Transformer(characters, 32, 16),
        shakespeare.loss,
        (x[:cut], y[:cut]),
        (x[cut:], y[cut:]),
        ADAM,
        rates,
        640,
    )


def example(data: str) -> Job:
    """LeNet as in examples/mnist.py, with its batch and its learning rate, and a short warm-up; an epoch."""
    (x, y), judged = mnist.load(mnist.find(data), "train").tensors, mnist.load(mnist.find(data), "t10k").tensors
    return Job(mnist.lenet, nn.functional.cross_entropy, (x, y), judged, SGD, (0.02, 0.05), 920, batch=64, warmup=30)


JOBS: dict[str, Callable[[str], Job]] = {
    "lenet": lenet,
    "plain": plain,
    "rmsprop": rmsprop,
    "cifarnet": cifarnet,
    "transformer": transformer,
    "example": example,
}


class Replica:
    """The model over flat parameters."""

    def __init__(self, job: Job, seed: int) -> None:
        torch.manual_seed(seed)
        self.job, self.model = job, job.model()
        parameters = list(self.model.parameters())
        size = sum(each.numel() for each in parameters)
        self.flat, self.gradients = torch.zeros(size), torch.zeros(size)
        start = 0
        for each in parameters:
            stop = start + each.numel()
            self.flat[start:stop] = each.data.view(-1)
            each.data, each.grad = self.flat[start:stop].view_as(each), self.gradients[start:stop].view_as(each)
            start = stop

    def gradient(self, values: Tensor, samples: Tensor) -> tuple[float, Tensor]:
        """The loss and its gradient on some of the training data."""
        self.flat.copy_(values)
        self.gradients.zero_()
        x, y = self.job.train
        loss = self.job.loss(self.model(x[samples]), y[samples])
        loss.backward()
        return loss.item(), self.gradients.clone()

    @torch.no_grad()
    def judge(self, values: Tensor) -> tuple[float, float]:
        """Loss, and accuracy in per cent."""
        self.flat.copy_(values)
        x, y = self.job.judged
        output = torch.cat([self.model(x[first : first + 500]) for first in range(0, len(x), 500)])
        return float(self.job.loss(output, y)), 100 * float((output.argmax(-1) == y).float().mean())


def batches(size: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Indices of samples: each once an epoch, in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=generator)
        yield from (order[first : first + batch] for first in range(0, size - batch + 1, batch))


def train(job: Job, how: str, groups: int, lr: float, seed: int = 1, jitter: float = JITTER) -> dict[str, Any]:
    """Train, ``how`` one of `WAYS`. Returns what came of it."""
    replica = Replica(job, seed)
    given = job.optimizer([nn.Parameter(torch.zeros(1))], lr)
    sync = how == "sync"
    compensation = Compensation(expected_staleness("sync" if sync else "async", groups), on=True, look_ahead=how == "ahead")
    spec = compensation.of(describe_optimizer(given))
    rises = [compensation.rise(group) for group in describe_optimizer(given).groups]
    limits, ceiling = compensation.limits(describe_optimizer(given)), compensation.ceiling(describe_optimizer(given).groups[0])
    size = replica.flat.numel()
    entry = TensorEntry(Piece(0, 0, 0, size, 0, 0), "float32", 0, spec, horizon=compensation.horizon, rises=rises)
    entry.load({"values": replica.flat.clone()}, 0)
    shard = Shard({0: entry}, limit=NormLimit([0]) if limits else None)
    if ceiling > 1:
        shard.recovery = Recovery(shard.entries, groups, ceiling)
    samples = batches(len(job.train[0]), job.batch * (groups if sync else 1), seed)
    members, steps, chance = 1 if sync else groups, job.updates // groups, random.Random(seed)
    read = [entry.values.detach().clone() for _ in range(members)]
    done, versions = [0] * members, [0] * members
    queue = [(max(0.1, chance.gauss(1, jitter)), group) for group in range(members)]
    heapq.heapify(queue)
    losses: list[float] = []
    for _ in range(members * steps):
        now, group = heapq.heappop(queue)
        loss, gradient = replica.gradient(read[group], next(samples))
        losses.append(loss)
        if not math.isfinite(loss):
            break
        for each in given.param_groups:
            each["lr"] = lr * job.factor(done[group], steps)
        hyperparameters = compensation.of(describe_optimizer(given)).groups[0]
        shard.apply([Update(0, gradient, hyperparameters, ((group, done[group], versions[group]),))])
        done[group] += 1
        read[group], versions[group] = entry.values.detach().clone(), entry.version
        heapq.heappush(queue, (now + max(0.1, chance.gauss(1, jitter)), group))
    loss, accuracy = replica.judge(entry.values.detach())
    part = max(1, len(losses) // 20)
    course = [sum(losses[first : first + part]) / part for first in range(0, len(losses) - part + 1, part)]
    return {"loss": loss, "accuracy": accuracy, "course": [round(each, 4) for each in course]}


def run(name: str, folder: Path, data: str, seeds: list[int], groups: list[int], ways: list[str]) -> None:
    """All cells of a task that are not there yet."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    cells = json.loads(file.read_text()) if file.exists() else []
    there = {(cell["how"], cell["groups"], cell["lr"], cell["seed"]) for cell in cells}
    job = JOBS[name](data)
    for seed in seeds:
        for number in groups:
            for lr in job.rates:
                for how in ways:
                    if (how, number, lr, seed) in there:
                        continue
                    begin = time.monotonic()
                    found = train(job, how, number, lr, seed)
                    cells.append({"task": name, "how": how, "groups": number, "lr": lr, "seed": seed, **found})
                    file.write_text(json.dumps(cells, indent=1))
                    took = time.monotonic() - begin
                    came = f"{found['loss']:.3f}, {found['accuracy']:.1f} %"
                    print(f"{name} {number} groups, {lr}, {how}: {came} ({took:.0f} s)", flush=True)


def check(folder: Path, data: str, groups: int = 4, lr: float = 0.05) -> None:
    """The emulator beside the real roles on the simulated network, with LeNet: the loss after the same samples."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    job = lenet(data)
    steps = 320 // groups
    job = replace(job, updates=320)
    torch.manual_seed(1)
    sizes = {name: each.numel() for name, each in job.model().named_parameters()}
    layers = sorted({name.rpartition(".")[0] for name in sizes})
    numels = {layer: sum(numel for name, numel in sizes.items() if name.rpartition(".")[0] == layer) for layer in layers}
    described = [{"name": each, "numel": numels[each], "forward_s": 0.03, "backward_s": 0.06} for each in layers]
    profile = folder / "check.json"
    profile.write_text(json.dumps({"layers": described, "batch_size": job.batch}))

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: job.factor(step, steps))

    task = Task(
        model=job.model,
        loss=job.loss,
        optimizer=lambda parameters: job.optimizer(parameters, lr),
        train_data=TensorDataset(*job.train),
        eval_data=TensorDataset(*job.judged),
        schedule=schedule if job.warmup else None,
    )
    for how, staleness, ahead in zip(WAYS, ("sync", "async", "async"), ("auto", "none", "auto"), strict=True):
        topology = Topology.from_dict(
            {
                "job": {"task": "given:task", "steps": steps, "eval_every": steps, "timeout": "600 s"},
                "hosts": [{"name": f"h[1-{groups + 1}]", "slots": 1}],
                "compute": {
                    "groups": groups,
                    "batch_size": job.batch,
                    "device": "modelled",
                    "profile": str(profile),
                    "noise": {"kind": "normal", "spread": JITTER},
                },
                "network": {"bandwidth": "10 Gbit/s", "latency": "10 us"},
                "exchange": {"kind": "model_server", "staleness": staleness},
                "simulation": {"payload": "real"},
                "optimizer": {"look_ahead": ahead},
            }
        )
        summary = Summary()

        def hear(peer: str, events: list[dict[str, Any]], summary: Summary = summary) -> None:
            for event in events:
                if event.get("kind") not in ("span", "log"):
                    role, _, rank = peer.partition("/")
                    summary.add(peer, {"values": {}, **event, "role": role, "rank": int(rank) if rank else None})

        ending = simulate(topology, options=Options(task=task, on_report=hear)).ending
        values, found = summary.to_dict(), train(job, how, groups, lr)
        told = f"simulated {values['eval']}, staleness {values['staleness']['mean']:.2f} ({ending.status})"
        print(f"{how}: {told}; emulated {found['loss']:.4f}, {found['accuracy']:.2f} %", flush=True)


def table(folder: Path) -> None:
    """All cells there are, as JSON beside this file, and those of `WAYS` as Markdown, in the mean of their seeds.

    The JSON also keeps cells of earlier rules: the look-ahead alone (``plain ahead``), with a rate that rises at the beginning for
    SGD, too (``rising``), and with `NormLimit` and a fitted rate that stays (``fitted``)."""
    cells = [cell for name in JOBS if (file := folder / f"{name}.json").exists() for cell in json.loads(file.read_text())]
    Path(__file__).with_name("asynchrony.json").write_text(json.dumps(cells, indent=1) + "\n")
    found: dict[tuple[str, int, float, str], list[dict[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["task"], cell["groups"], cell["lr"], cell["how"]), []).append(cell)
    for name, groups, lr in dict.fromkeys(key[:3] for key in found):
        sync, before, now = (found.get((name, groups, lr, how), []) for how in WAYS)
        texts = [told(name, each) for each in (sync, before, now)]
        print(f"| {name} | {groups} | {lr:g} | {' | '.join(texts)} | {close(name, now, sync)} | {close(name, now, before)} |")


def mean(cells: list[dict[str, Any]], what: str) -> float:
    return sum(float(cell[what]) for cell in cells) / len(cells)


def told(task: str, cells: list[dict[str, Any]]) -> str:
    """Accuracy and loss, and in brackets the worst seed's of what the task is judged by."""
    if not cells:
        return "-"
    accuracy, loss = f"{mean(cells, 'accuracy'):.1f}", f"{mean(cells, 'loss'):.3f}"
    if len(cells) == 1:
        return f"{accuracy} %, {loss}"
    if task == "transformer":
        return f"{accuracy} %, {loss} ({max(cell['loss'] for cell in cells):.3f})"
    return f"{accuracy} ({min(cell['accuracy'] for cell in cells):.1f}) %, {loss}"


def close(task: str, cells: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Whether they are at most 1 point behind others in the mean, or 2 % of loss."""
    if not cells or not others:
        return "-"
    if task == "transformer":
        return "yes" if mean(cells, "loss") <= 1.02 * mean(others, "loss") else "**no**"
    return "yes" if mean(cells, "accuracy") >= mean(others, "accuracy") - 1 else "**no**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("run")
    one.add_argument("name", choices=JOBS)
    one.add_argument("folder", type=Path)
    one.add_argument("--data", required=True)
    one.add_argument("--seeds", type=int, nargs="+", default=[1])
    one.add_argument("--groups", type=int, nargs="+", default=list(GROUPS))
    one.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    checked = what.add_parser("check")
    checked.add_argument("folder", type=Path)
    checked.add_argument("--data", required=True)
    what.add_parser("table").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "table":
        table(given.folder)
    elif given.what == "check":
        check(given.folder.resolve(), given.data)
    else:
        run(given.name, given.folder, given.data, given.seeds, given.groups, given.ways)
    return 0


if __name__ == "__main__":
    sys.exit(main())
