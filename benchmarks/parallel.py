"""``python -m benchmarks parallel``: divided models on emulated hosts at 1 Gbit/s, beside what the planner predicts of them.

The part ``layers``: halos of a VGG block, with overlap and without; the communication of five plans; a step of a network of large
linear layers by its plan, beside pure batch parallelism. The others, each with so many hosts: steps of ResNet-18, VGG-11, a
transformer and a perceptron by several plans. The models' own code runs without content, its operators take a modelled device's
time, and as many bytes travel as tensors would have.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from benchmarks import models
from benchmarks.case import Case, case_of
from benchmarks.processes import Place, run_processes
from zmqtrain.collectives.choose import ALPHA_S
from zmqtrain.data.background import BackgroundThread, Condition
from zmqtrain.errors import UsageError, ZmqTrainError
from zmqtrain.launcher.emulate import Emulation, ShapingKind, emulated
from zmqtrain.net.loop import Dilation, dilation_of
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shaping import Shaping
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.trial import Trial, TrialRecorder, Tried, try_out
from zmqtrain.plan.layers import Stage, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.planner import plan
from zmqtrain.plan.price import PlanPrice, price
from zmqtrain.plan.problem import Problem, placed_of, plan_of
from zmqtrain.plan.rules import pure
from zmqtrain.plan.trace import trace_layers
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place

BANDWIDTH = 1e9
LATENCY_S = 200e-6
#: Slow motion, so that this machine has time for all hosts.
DILATION = 20.0
#: For models whose own code takes long beside what it stands for: so many times slower still.
PLANS_DILATION = 3
#: Plans whose steps are predicted to take longer, in seconds, are left out: in slow motion they would take an hour.
LONGEST_S = 1.0
#: ``layers``, and the numbers of hosts.
PARTS = ("layers", "2", "4", "8")
#: The first step of a trial waits for connections, and is left out.
STEPS = 3
WARM = 1
PATIENCE_S = 150.0

_HOSTS = """
[job]
name = "bench"
oversubscribe = true
[[hosts]]
name = "host[0-{last}]"
slots = 1
[compute]
group_size = {hosts}
[network]
bandwidth = {bandwidth}
latency = {latency}
dilation = {dilation}
"""


def vgg_block() -> nn.Module:
    """Three convolutions of 256 channels, as VGG-16's third block; and a pool over the image, so that little is left of it."""
    layers: list[nn.Module] = []
    for before in (128, 256, 256):
        layers += [nn.Conv2d(before, 256, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def alexnet() -> nn.Module:
    """AlexNet with linear layers of 1,024: 14 million parameters."""
    return _narrow(models.alexnet(), 256 * 6 * 6)


def _narrow(model: nn.Sequential, inputs: int) -> nn.Sequential:
    """With linear layers of 1,024 before the last one; the first has so many inputs."""
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            outputs = 1000 if layer.out_features == 1000 else 1024
            model[index] = nn.Linear(inputs, outputs)
            inputs = outputs
    return model


def perceptron() -> nn.Module:
    """Large linear layers: 29 million parameters."""
    return nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


def small_perceptron() -> nn.Module:
    """Linear layers of half that width: 8 million parameters."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1000))


def vgg11() -> nn.Module:
    """VGG-11 for images of 64 x 64, with linear layers of 1,024: 13 million parameters."""
    return _narrow(models.vgg11(), 512 * 2 * 2)


def transformer() -> nn.Module:
    """Two layers of width 256."""
    layers = [nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(256, 1000))


#: Name -> the model, and the shape of a sample.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "VGG block": (vgg_block, (128, 56, 56)),
    "AlexNet": (alexnet, (3, 224, 224)),
    "perceptron": (perceptron, (2048,)),
    "ResNet-18": (models.resnet18, (3, 64, 64)),
    "VGG-11": (vgg11, (3, 64, 64)),
    "small perceptron": (small_perceptron, (1024,)),
    "transformer": (transformer, (64, 256)),
}
#: Operations a second of the modelled device.
FLOPS = 0.5e12
#: For the large linear layers a slower one, as else it would be best to compute everything everywhere and send nothing.
SLOW_FLOPS = 0.1e12
VGG_BATCH, ALEXNET_BATCH, PERCEPTRON_BATCH = 16, 64, 256
#: Of four hosts: the choice and grid of convolutions, and of the other layers.
PLANS: dict[str, tuple[tuple[Choice, str], tuple[Choice, str]]] = {
    "pure batch": (("batch", "1x4"), ("batch", "1x4")),
    "pure model": (("model", "4x1"), ("model", "4x1")),
    "domain, then model": (("domain", "4x1"), ("model", "4x1")),
    "batch, then model": (("batch", "4x1"), ("model", "4x1")),
    "mixed grids": (("domain", "2x2"), ("model", "4x1")),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What each process tries."""

    model: str
    trial: Trial


def bench_parallel(
    parts: Sequence[str] = PARTS, *, dilation: float = DILATION, shaping: ShapingKind = "paced", steps: int = STEPS
) -> Iterator[Case]:
    """A case for each figure, with what the planner predicted as its peer.

    Raises `UsageError` for an unknown part, and `ZmqTrainError` where a process fails."""
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise UsageError(f"benchmark parallel has no part {min(unknown)}; it has {', '.join(PARTS)}")

    def measured(work: Sequence[Work], dilation: float) -> list[list[Tried]]:
        return asyncio.run(_measured([replace(each, trial=replace(each.trial, steps=steps)) for each in work], dilation, shaping))

    layers: list[_Halos | _Communication | _Step] = []
    if "layers" in parts:
        layers = [_Halos(2, dilation), _Halos(4, dilation), _Communication(dilation), _Step(dilation)]
    for part in layers:
        yield from part.cases(measured(part.work, dilation))
    slower = dilation * PLANS_DILATION
    for hosts in (int(part) for part in parts if part != "layers"):
        for model in ("ResNet-18", "VGG-11", "transformer", "small perceptron"):
            compared = _Plans(model, hosts, slower)
            yield from compared.cases([each for work in compared.work for each in measured([work], slower)])


class _Halos:
    """What a step waits for halos, as a share of the time that they travel."""

    def __init__(self, hosts: int, dilation: float) -> None:
        self._what = f"VGG block on {hosts} hosts"
        self._problem = _problem("VGG block", VGG_BATCH, hosts, dilation, flops=FLOPS)
        grid = Grid(hosts, 1)
        self._plan = planned(self._problem.layers, ("domain", str(grid)), ("domain", str(grid)))
        trial = Trial(grid, self._plan, VGG_BATCH, FLOPS)
        self.work = [Work("VGG block", trial), Work("VGG block", replace(trial, overlap=False))]

    def cases(self, found: Sequence[Sequence[Tried]]) -> Iterator[Case]:
        overlapped, waiting = found
        late = sorted({name for tried in overlapped for name in tried.late_interiors()})
        if late:
            raise ZmqTrainError(f"the interior of {', '.join(late)} began only when the halo was there")
        what, predicted = self._what, [_price(replace(self._problem, overlap=share), self._plan).step_s for share in (1.0, 0.0)]
        yield _beside(f"{what}: halos travel", _travelled_s(overlapped) * 1e3, "ms", "overlap off", _travelled_s(waiting) * 1e3)
        yield _beside(f"{what}: halos waited for", _waited_s(overlapped) * 1e3, "ms", "overlap off", _waited_s(waiting) * 1e3)
        shares = [100 * _waited_s(each) / _travelled_s(each) for each in (overlapped, waiting)]
        yield _beside(f"{what}: exposed share of halos", shares[0], "%", "overlap off", shares[1])
        yield _beside(f"{what}: step", _step_s(overlapped) * 1e3, "ms", "predicted", predicted[0] * 1e3)
        yield _beside(f"{what}: step, overlap off", _step_s(waiting) * 1e3, "ms", "predicted", predicted[1] * 1e3)


class _Communication:
    """Steps of plans whose compute takes no time: their communication."""

    def __init__(self, dilation: float) -> None:
        self._problem = _problem("AlexNet", ALEXNET_BATCH, 4, dilation)
        self._plans = {name: planned(self._problem.layers, *how) for name, how in PLANS.items()}
        trials = [Trial(Grid(4, 1), how, ALEXNET_BATCH, overlap=False) for how in self._plans.values()]
        self.work = [Work("AlexNet", trial) for trial in trials]

    def cases(self, found: Sequence[Sequence[Tried]]) -> Iterator[Case]:
        seconds: list[tuple[float, float]] = []
        for (name, how), tried in zip(self._plans.items(), found, strict=True):
            seconds.append((_price(self._problem, how).communication_s, _step_s(tried)))
            predicted_s, measured_s = seconds[-1]
            yield _beside(f"communication of AlexNet, {name}", measured_s * 1e3, "ms", "predicted", predicted_s * 1e3)
        worst = max(abs(measured_s / predicted_s - 1) for predicted_s, measured_s in seconds)
        yield _beside("furthest from what was predicted", 100 * worst, "%")
        orders = [sorted(range(len(seconds)), key=[pair[which] for pair in seconds].__getitem__) for which in (0, 1)]
        in_place = sum(one == other for one, other in zip(*orders, strict=True))
        yield _beside("plans in the order that was predicted", float(in_place), "plans", "all", float(len(seconds)))


class _Step:
    """A step of large linear layers, as planned and pure batch parallel; sums of weight gradients are part of it."""

    def __init__(self, dilation: float) -> None:
        self._problem = _problem("perceptron", PERCEPTRON_BATCH, 4, dilation, flops=SLOW_FLOPS, overlap=1.0)
        self._planned, self._batch = plan(self._problem), pure(self._problem)[0]
        plans = (self._planned.plan, plan_of(self._problem, self._batch.placed))
        self.work = [Work("perceptron", Trial(Grid(4, 1), how, PERCEPTRON_BATCH, SLOW_FLOPS)) for how in plans]

    def cases(self, found: Sequence[Sequence[Tried]]) -> Iterator[Case]:
        planned_s, batch_s = (_step_s(tried) for tried in found)
        predicted, batch = self._planned.price, self._batch.price
        words = ", ".join(f"{layer.choice} {layer.grid}" for layer in self._planned.plan)
        yield _beside(f"step of the perceptron as planned ({words})", planned_s * 1e3, "ms", "predicted", predicted.step_s * 1e3)
        yield _beside("step of the perceptron, pure batch", batch_s * 1e3, "ms", "predicted", batch.step_s * 1e3)
        yield _beside(
            "so many times as fast as planned", batch_s / planned_s, "times", "predicted", batch.step_s / predicted.step_s
        )


class _Plans:
    """Steps of a model by its plan and by simple ones, with 8 samples for each host."""

    def __init__(self, model: str, hosts: int, dilation: float) -> None:
        self._what, self._problem = (
            f"{model} on {hosts} hosts",
            _problem(model, 8 * hosts, hosts, dilation, flops=FLOPS, overlap=1.0),
        )
        found = plans(self._problem)
        self._plans = {name: how for name, how in found.items() if _price(self._problem, how).step_s <= LONGEST_S}
        self.work = [Work(model, Trial(how.layers[0].grid, how, 8 * hosts, FLOPS)) for how in self._plans.values()]

    def cases(self, found: Sequence[Sequence[Tried]]) -> Iterator[Case]:
        for (name, how), tried in zip(self._plans.items(), found, strict=True):
            predicted_s = _price(self._problem, how).step_s
            yield _beside(f"step of {self._what}, {name}", _step_s(tried) * 1e3, "ms", "predicted", predicted_s * 1e3)


def plans(problem: Problem) -> dict[str, Plan]:
    """The planner's, and simple ones as far as they can be carried out."""
    column, square = Grid(problem.processes, 1), Grid(2, problem.processes // 2)
    rules: dict[str, tuple[Choice, Choice, Grid]] = {
        "pure batch": ("batch", "batch", Grid(1, problem.processes)),
        "pure model": ("model", "model", column),
        "batch, then model": ("batch", "model", column),
        "domain, then model": ("domain", "model", column),
        "two rows": ("model", "model", square),
    }
    found = {"planned": plan(problem).plan}
    for name, (images, others, grid) in rules.items():
        ways = [images if stage.head.image else others for stage in problem.layers]
        made = Plan(tuple(LayerPlan(stage.name, way, grid) for stage, way in zip(problem.layers, ways, strict=True)))
        try:
            placed_of(problem, made)
        except ZmqTrainError:
            continue
        if made not in found.values():
            found[name] = made
    return found


def _problem(model: str, batch: int, hosts: int, dilation: float, *, flops: float = 0.0, overlap: float = 0.0) -> Problem:
    make, shape = MODELS[model]
    with torch.device("meta"):
        layers = stages(trace_layers(make(), [torch.empty(2, *shape)]))
    # Handing a message over takes this machine as long as ever, which in slow motion seems less.
    link = Link(LATENCY_S + ALPHA_S / dilation, 8 / BANDWIDTH)
    return Problem(layers, batch, hosts, link, Ours(), overlap, flops)


def planned(layers: Sequence[Stage], images: tuple[Choice, str], others: tuple[Choice, str]) -> Plan:
    """All layers that take images one way, and all others another."""
    how = [images if stage.head.image else others for stage in layers]
    return Plan(tuple(LayerPlan(stage.name, choice, Grid.parse(grid)) for stage, (choice, grid) in zip(layers, how, strict=True)))


def _price(problem: Problem, how: Plan) -> PlanPrice:
    return price(problem, placed_of(problem, how))


# Of the slowest process, the median over steps


def _step_s(tried: Sequence[Tried]) -> float:
    by_step = list(zip(*(each.step_s for each in tried), strict=True))
    return float(statistics.median(max(times) for times in by_step[WARM:]))


def _waited_s(tried: Sequence[Tried]) -> float:
    return _of_slowest(tried, Tried.waited_s)


def _travelled_s(tried: Sequence[Tried]) -> float:
    return _of_slowest(tried, Tried.travelled_s)


def _of_slowest(tried: Sequence[Tried], seconds: Callable[[Tried, str, int], float]) -> float:
    steps = range(WARM, len(tried[0].step_s))
    return statistics.median(max(seconds(each, "halo", step) for each in tried) for step in steps)


async def _measured(work: Sequence[Work], dilation: float, shaping: ShapingKind) -> list[list[Tried]]:
    """What each host's process found, for one thing to try after another."""
    hosts = work[0].trial.grid.size
    values = {"last": hosts - 1, "hosts": hosts, "bandwidth": BANDWIDTH, "latency": LATENCY_S, "dilation": dilation}
    topology = parse_topology(_HOSTS.format(**values))
    placement, emulation = place(topology), Emulation(shaping, Dilation.beginning_now(dilation))
    workers = [role for role in placement.roles if role.peer.startswith("worker/")]
    peers = tuple(role.peer for role in workers)
    async with emulated(topology, placement, emulation) as (engine, _):
        places = []
        for role in workers:
            settings = replace(NetSettings(), host=engine.address_of(role.host), shaping=Shaping.load(str(engine.plan), role.peer))
            namespace = "" if engine.namespaces is None else engine.namespaces.namespace_of(role.host)
            places.append(Place(settings, emulation.dilation, namespace))
        todo = [(peer, (peers, tuple(work))) for peer in peers]
        patience_s = PATIENCE_S + dilation * LONGEST_S * sum(2 * each.trial.steps for each in work)
        of_each = await asyncio.to_thread(run_processes, todo, _role, places, patience_s)
    return [list(tried) for tried in zip(*of_each, strict=True)]


async def _role(node: Node, todo: tuple[tuple[str, ...], tuple[Work, ...]]) -> list[Tried]:
    torch.set_num_threads(1)
    peers, works = todo
    loop, thread = asyncio.get_running_loop(), BackgroundThread("compute")
    found = []
    for number, work in enumerate(works):
        recorder = TrialRecorder(loop.time)
        condition: Condition = threading.Condition()
        fabric = NetworkFabric(
            node,
            peers,
            f"trial {number}",
            condition=condition,
            clock=loop.time,
            timeout_s=PATIENCE_S,
            recorder=recorder,
            zeros=True,
        )
        make, shape = MODELS[work.model]
        with torch.device("meta"):
            model, inputs = make(), [torch.empty(2, *shape)]
        spender = _Real(loop.time, dilation_of(loop))
        tried = thread.submit(partial(try_out, model, inputs, work.trial, fabric, recorder, spender, loop.time))
        try:
            found.append(await tried)
        finally:
            await fabric.close()
    await thread.close(1.0)
    return found


class _Real:
    """Implements `Spender` in real time. What the model's code takes itself is a part of the time that it is to take."""

    def __init__(self, clock: Callable[[], float], dilation: float) -> None:
        self._clock, self._dilation = clock, dilation
        self._until_s = clock()

    def spend(self, seconds: float) -> None:
        self._until_s += seconds
        left_s = self._until_s - self._clock()
        if left_s > 0:
            time.sleep(left_s * self._dilation)

    def restart(self) -> None:
        self._until_s = self._clock()


def _beside(case: str, value: float, unit: str, peer: str = "", peer_value: float | None = None) -> Case:
    """Ratio: how many times what the peer has."""
    return case_of("parallel", case, value, unit, peer, peer_value, "value/peer")
