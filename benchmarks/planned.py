"""``python -m benchmarks planned``: what the planner predicts of whole runs, beside what these take in virtual time.

Whole runs of the code that trains: gradients travel in buckets, are added up in the memory of hosts that have several processes,
and between hosts by the exchange; the loss is a cross-entropy. ResNet-18, a perceptron of large layers and a network of
convolutions with and without batch norm, on 2 and 4 hosts with 1, 2 and 4 processes each, by the planner's plan, simple ones,
and ones whose layers are drawn at random, each on a grid of its own.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import zmqtrain
from benchmarks import models
from benchmarks.case import Case, case_of
from benchmarks.parallel import plans
from benchmarks.predicted import BANDWIDTH, FLOPS, LATENCY_S, SAMPLES
from zmqtrain import Task, Topology
from zmqtrain.errors import UsageError
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.plan.decided import with_plan
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.setup import problem_of, source_of
from zmqtrain.plan.trace import trace_layers

#: (hosts, processes of each).
SHAPES = ((2, 1), (4, 1), (2, 2), (2, 4), (4, 2))
#: Plans that are drawn for each model and shape.
DRAWN = 4
STEPS = 4


def perceptron() -> nn.Sequential:
    """Layers of 1,024, 2,048, 2,048 and 512."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 512))


def convolutions(*, norms: bool = False) -> nn.Sequential:
    """Six convolutions of 32 to 128 channels, and two linear layers; with ``norms``, a batch norm after each convolution."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norms else []), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, 10))


def with_norms() -> nn.Sequential:
    """`convolutions`, with batch norms."""
    return convolutions(norms=True)


#: Name -> the model, the shape of a sample, and the number of classes.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "perceptron": (perceptron, (1024,), 512),
    "convolutions": (convolutions, (3, 32, 32), 10),
    "batch norms": (with_norms, (3, 32, 32), 10),
    "ResNet-18": (models.resnet18, (3, 64, 64), 1000),
}


def task(model: str) -> Task:
    """A job's task: noise, by plain SGD."""
    make, shape, classes = MODELS[model]
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(256, *shape, generator=generator), torch.randint(classes, (256,), generator=generator))
    return Task(
        model=make,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.001),
        train_data=data,
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan's step."""

    name: str
    plan: Plan
    predicted_s: float
    simulated_s: float


def bench_planned(names: Sequence[str] = tuple(MODELS), shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Case]:
    """A case for each model, shape and plan; and for each model and shape how far they are off at most."""
    for name in names:
        for hosts, slots in shapes:
            found = compare(name, hosts, slots)
            where = f"{name} on {hosts} hosts x {slots}"
            for each in found:
                value, peer = each.simulated_s * 1e3, each.predicted_s * 1e3
                yield case_of("planned", f"{where}, {each.name}: step", value, "ms", "predicted", peer, "value/peer", digits=2)
            worst = max(abs(each.predicted_s / each.simulated_s - 1) for each in found)
            yield case_of("planned", f"{where}: furthest from what was predicted", 100 * worst, "%", digits=1)


def compare(name: str, hosts: int, slots: int, *, drawn: int = DRAWN, simple: bool = True, seed: int = 7) -> list[Compared]:
    """The plans of a model in `MODELS` that divide it, predicted and simulated: the planner's, ``drawn`` ones, and ``simple``
    ones."""
    with tempfile.TemporaryDirectory() as folder:
        job = Topology.from_dict(_job(name, hosts, slots, _profile(name, Path(folder))))
        # Virtual time has nothing but the network's own latency.
        problem = problem_of(job, source_of(job).stages)
        problem = replace(problem, link=replace(problem.link, alpha_s=LATENCY_S))
        found = {name: made for name, made in plans(problem).items() if simple or name == "planned"}
        chance = random.Random(seed)
        found |= {f"drawn {number + 1}": _drawn(problem, chance) for number in range(drawn)}
        return [
            Compared(how, plan, price(problem, placed_of(problem, plan)).step_s, _step_s(with_plan(job, plan)))
            for how, plan in found.items()
            if any(layer.choice != "batch" and layer.grid.rows > 1 for layer in plan)
        ]


def _step_s(job: Topology) -> float:
    found = zmqtrain.simulate(job)
    if found.ending.error is not None:
        raise UsageError(f"the run has failed: {found.ending.error['message']}")
    median: float = found.summary["step_s"]["median"]
    return median


def _drawn(problem: Problem, chance: random.Random) -> Plan:
    ways = [chance.choice([how for how in problem.options(stage).placed if how.wide == 1]) for stage in problem.layers]
    return Plan(
        tuple(LayerPlan(stage.name, how.choice, how.grid, how.strips_text) for stage, how in zip(problem.layers, ways, strict=True))
    )


def _profile(name: str, folder: Path) -> Path:
    """The times of a processor of `FLOPS`."""
    make, shape, _ = MODELS[name]
    with torch.device("meta"):
        found = trace_layers(make(), [torch.empty(2, *shape)])
    layers = [
        {
            "name": layer.name,
            "numel": layer.weights,
            "forward_s": layer.flops * SAMPLES / FLOPS,
            "backward_s": 2 * layer.flops * SAMPLES / FLOPS,
            "flops_forward": layer.flops,
            "activation_numel": layer.numel_out,
        }
        for layer in found
    ]
    file = folder / f"{name}.json"
    values = {"name": name, "source": "nominal", "batch_size": SAMPLES, "samples": 256, "update_s": 0.0, "layers": layers}
    file.write_text(json.dumps(values))
    return file


def _job(name: str, hosts: int, slots: int, profile: Path) -> dict[str, object]:
    processes = hosts * slots
    return {
        "job": {"name": "planned", "task": "benchmarks.planned:task", "args": {"model": name}, "steps": STEPS, "seed": 1},
        "hosts": [{"name": f"host{number}", "slots": slots} for number in range(hosts)],
        "compute": {
            "group_size": processes,
            "batch_size": SAMPLES * processes,
            "device": "modelled",
            "profile": str(profile),
            "grid": f"1x{processes}",
        },
        "exchange": {"kind": "allreduce"},
        "parallel": {"verify": False},
        "simulation": {"payload": "real"},
        "plan": {"overlap": "perfect", "flops": FLOPS},
        "network": {"bandwidth": f"{BANDWIDTH / 1e9:g} Gbit/s", "latency": f"{LATENCY_S * 1e6:g} us"},
    }
