"""``python -m benchmarks predicted``: what the planner predicts of divided models, beside what they do on simulated hosts.

ResNet-18, VGG-11, a transformer and a perceptron of large layers on 2, 4 and 8 hosts at 1 Gbit/s, each by several plans. The code
of the models runs without content, in virtual time: the other work of this machine changes no figure. Bytes are compared by layer,
term and pass, each of the process that sends most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.case import Case, case_of
from benchmarks.parallel import plans
from zmqtrain.parallel.plan import Plan
from zmqtrain.parallel.rehearsal import rehearse
from zmqtrain.parallel.trial import Trial
from zmqtrain.plan.counted import counted, predicted
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.trace import trace_layers
from zmqtrain.simulate.divided import simulate_divided
from zmqtrain.topology.links import NetworkModel, Way

BANDWIDTH, LATENCY_S = 1e9, 200e-6
#: Operations a second of a host.
FLOPS = 1e12
#: Samples for each host.
SAMPLES = 8
HOSTS = (2, 4, 8)


def transformer() -> nn.Module:
    """`benchmarks.models.transformer`, for a class of each position."""
    return nn.Sequential(*(layer for layer in models.transformer() if not isinstance(layer, nn.AdaptiveAvgPool2d | nn.Flatten)))


#: Name -> the model, and the shape of a sample.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18": (models.resnet18, (3, 224, 224)),
    "VGG-11": (models.vgg11, (3, 224, 224)),
    "transformer": (transformer, (models.SEQUENCE, models.WIDTH)),
    "perceptron": (models.perceptron, (2048,)),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One plan's step."""

    name: str
    predicted_s: float
    measured_s: float
    sent_bytes: int
    """Of each layer, term and pass by the process that sends most."""
    priced_bytes: int
    exact: bool
    """Whether messages and bytes of each of them are as priced."""


def bench_predicted(names: Sequence[str] = tuple(MODELS), hosts: Sequence[int] = HOSTS) -> Iterator[Case]:
    """Cases for each model, number of hosts and plan; and of each model how far they are off, and how many are out of order."""
    for name in names:
        make, shape = MODELS[name]
        for size in hosts:
            found = compare(make, shape, size)
            for each in found:
                what = f"{name} on {size} hosts, {each.name}"
                seconds = each.measured_s * 1e3, "predicted", each.predicted_s * 1e3
                yield case_of("predicted", f"{what}: step", seconds[0], "ms", *seconds[1:], "value/peer", digits=2)
                sent = each.sent_bytes / 1e6, "MB", "predicted", each.priced_bytes / 1e6
                yield case_of("predicted", f"{what}: sent by a process", *sent, "value/peer", digits=2)
            worst = max(abs(each.predicted_s / each.measured_s - 1) for each in found)
            yield case_of("predicted", f"{name} on {size} hosts: furthest from what was predicted", 100 * worst, "%", digits=1)
            yield case_of("predicted", f"{name} on {size} hosts: plans in another order", float(misplaced(found)), "pairs")


def misplaced(found: Sequence[Compared]) -> int:
    """Pairs of plans of which the one that is predicted to be slower is faster, by more than a hundredth."""
    return sum(one.predicted_s < other.predicted_s and one.measured_s > 1.01 * other.measured_s for one in found for other in found)


def compare(make: Callable[[], nn.Module], shape: tuple[int, ...], hosts: int) -> list[Compared]:
    """The plans of a model, predicted and simulated."""
    with torch.device("meta"):
        model, inputs = make(), [torch.empty(2, *shape)]
    layers = stages(trace_layers(model, inputs))
    batch, link = SAMPLES * hosts, Link(LATENCY_S, 8 / BANDWIDTH)
    problem = Problem(layers, batch, hosts, link, Ours(), overlap=1.0, flops_per_s=FLOPS)
    return [_compared(name, how, problem, model, inputs) for name, how in plans(problem).items()]


def _compared(name: str, how: Plan, problem: Problem, model: nn.Module, inputs: Sequence[Tensor]) -> Compared:
    priced, grid = price(problem, placed_of(problem, how)), how.layers[0].grid
    ranks = rehearse(model, inputs, grid, how, problem.batch)
    sent, expected = counted(problem.layers, ranks), predicted(priced)
    network = NetworkModel(bandwidth=BANDWIDTH, way=Way(LATENCY_S))
    tried = simulate_divided(model, inputs, Trial(grid, how, problem.batch, FLOPS, steps=2), network)
    sent_bytes, priced_bytes = (sum(each.nbytes for each in counts.values()) for counts in (sent, expected))
    return Compared(name, priced.step_s, max(each.step_s[1] for each in tried), sent_bytes, priced_bytes, sent == expected)
