"""The cost of a plan: each layer's communication, compute and memory, and the part of communication that a step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.layers import Stage
from zmqtrain.plan.link import Changes, Cost, LayerCost
from zmqtrain.plan.memory import Memory
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.problem import Problem, main_grid


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The price of one layer of a plan."""

    stage: Stage
    placed: Placed
    cost: LayerCost
    """The layer's cost, with the redistribution of its input."""
    forward_s: float
    backward_s: float
    memory: Memory


@dataclass(frozen=True, slots=True)
class PlanPrice:
    """The price of a whole plan."""

    layers: tuple[LayerPrice, ...]
    communication_s: float
    """All communication, in succession."""
    exposed_s: float
    """The part of it that a step waits for, by the problem's overlap."""
    compute_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step: compute, and the communication that it waits for."""
        return self.compute_s + self.exposed_s

    @property
    def without_overlap_s(self) -> float:
        """Seconds of a step in which nothing overlaps."""
        return self.compute_s + self.communication_s

    @property
    def cost(self) -> LayerCost:
        """The sum of all layers' communication."""
        return sum((layer.cost for layer in self.layers), LayerCost())

    @property
    def memory(self) -> Memory:
        """The memory that a process needs."""
        return sum((layer.memory for layer in self.layers), Memory())


@dataclass(frozen=True, slots=True)
class Times:
    """A layer's times that do not depend on its neighbours, for the overlap model."""

    waits_s: float
    """Compute, and communication that nothing overlaps: added to the step."""
    drains_s: float
    """Compute time in the backward that overlaps with sending older weight gradients."""
    queues_s: float
    """Seconds to send its own weight gradients, from the end of its backward on."""
    memory: float

    @classmethod
    def of(cls, problem: Problem, stage: Stage, placed: Placed, cost: LayerCost) -> Times:
        """Halos are sent while the interior is computed, but for half of those of grids of strips; input gradients while the weight
        gradients of their layer are computed (half of the backward); weight gradients while earlier layers are computed.
        All-gathers, statistics and redistributions are waited for. Statistics are small, and wait for nothing themselves: they
        pass the weight gradients on the control lane.
        ``cost``: the layer's own."""
        link, overlap = problem.link, problem.overlap
        forward_s, backward_s = problem.seconds(stage, placed)
        halo_s, halo_back_s, dx_s = (link.seconds(each) for each in (cost.halo, cost.halo_back, cost.dx))
        beside = 1.0 if 1 in placed.parts else 0.5  # of a grid of strips, columns follow rows when the interior is computed
        hidden_s = min(beside * halo_back_s + dx_s, overlap * backward_s / 2)
        waits_s = forward_s + backward_s + link.seconds(cost.all_gather + cost.statistics + cost.statistics_back)
        waits_s += max((1 - beside) * halo_s, halo_s - overlap * forward_s) + halo_back_s + dx_s - hidden_s
        idle_s = link.latency_s(cost.halo_back + cost.dx + cost.statistics_back)  # the NIC has nothing to send meanwhile
        drains_s = overlap * (backward_s + idle_s) - hidden_s
        return cls(waits_s, drains_s, link.seconds(cost.dw), problem.memory(stage, placed).total)


def changing_bytes(problem: Problem, after: Stage) -> int:
    """Bytes of a whole batch's activations, in the form in which the layer after a change takes them."""
    return problem.batch_bytes(after.numel_in)


def joined_units(before: Stage, stage: Stage) -> int:
    """The number of units by which a layer's input is divided if it arrives divided: channels, even after flattening."""
    head, units = stage.head, before.head.units
    return units if not head.image and head.numel_in % units == 0 else head.input_units


def divided(problem: Problem, placed: Sequence[Placed], index: int) -> Stage:
    """A layer as this plan divides it: alone, or together with the others of its pair."""
    alike = all(placed[mate] == placed[index] for mate in problem.graph.mates(index))
    return problem.stage(index, placed[index], paired=alike)


def redistribution(problem: Problem, before: Stage, source: Placed, after: Stage, target: Placed) -> tuple[Cost, Cost]:
    """The change between two layers: the activations in the forward, and their gradient in the backward."""
    if not problem.charge_changes:
        return Cost(), Cost()
    nbytes = changing_bytes(problem, after)
    found = [problem.pricing.changes(before, [source], after, [target], back=back) for back in (False, True)]
    there, back = (_cost(each, nbytes) for each in found)
    return there, back


def brought(problem: Problem, placed: Sequence[Placed], index: int) -> tuple[Cost, Cost]:
    """What is sent where branches meet, of what counts with a layer: activations in the forward, gradients in the backward."""
    there, back = Cost(), Cost()
    for each in problem.graph.brought if problem.charge_changes else ():
        if each.charged == index:
            (before, source), (at, target) = ((divided(problem, placed, end), placed[end]) for end in (each.source, each.target))
            there += _cost(problem.pricing.meetings(before, [source], at, [target]), problem.batch_bytes(each.numel))
            back += _cost(problem.pricing.meetings(before, [source], at, [target], back=True), problem.batch_bytes(each.numel))
    return there, back


def returned(problem: Problem, index: int, stage: Stage, placed: Placed, main: Grid) -> tuple[Cost, Cost]:
    """What brings the output of the model to where its samples were given, and its gradient back. ``stage``: as it is divided."""
    if not problem.charge_changes or not problem.graph.ends(index):
        return Cost(), Cost()
    nbytes = problem.batch_bytes(stage.numel_out)
    found = [problem.pricing.returned(stage, placed, main, back=back) for back in (False, True)]
    there, back = (_cost(each, nbytes) for each in found)
    return there, back


def told(problem: Problem, index: int, stage: Stage, placed: Placed, main: Grid) -> int:
    """How many numbers of each sample the loss tells instead of gathering this layer's outputs; 0: it needs them whole, or they are
    not the model's. They stay divided only where their samples were given."""
    stays = placed.choice == "model" and stage.leaves_channels and (main.columns == 1 or placed.grid == main)
    return stage.layers[-1].loss_numbers if stays and problem.graph.ends(index) else 0


def _cost(change: Changes, nbytes: int) -> Cost:
    messages, each = change.one()
    return Cost(messages) + each.times(nbytes)


def layer_cost(problem: Problem, placed: Sequence[Placed], index: int) -> LayerCost:
    """What one layer of a plan sends, with the redistribution of its input, and what is brought to its outputs."""
    stage, how, pricing, before = divided(problem, placed, index), placed[index], problem.pricing, problem.graph.before[index]
    first, last, joined, main = before is None, problem.graph.ends(index), 0, main_grid(placed)
    there, back = brought(problem, placed, index)
    if before is not None:
        one, source = divided(problem, placed, before), placed[before]
        if pricing.joins(one, source, stage, how):
            joined = joined_units(one, stage)
        else:
            moved = redistribution(problem, one, source, stage, how)
            there, back = there + moved[0], back + moved[1]
    if index == problem.graph.output:
        for end in range(len(placed)):
            moved = returned(problem, end, divided(problem, placed, end), placed[end], main)
            there, back = there + moved[0], back + moved[1]
    numbers = told(problem, index, stage, how, main)
    cost = pricing.layer(stage, how, problem.batch, first=first, last=last, joined=joined, told=numbers)
    return replace(cost, redistribute=there, redistribute_back=back)


#: Costs of layers that are known, by the main grid, the layer, and how it and those near it are placed.
Known: TypeAlias = dict[tuple[Grid, int, tuple[Placed, ...]], LayerCost]


def price(problem: Problem, placed: Sequence[Placed], known: Known | None = None) -> PlanPrice:
    """The price of these placements, in the order of the problem's layers, where their main grid has put processes on hosts.

    ``known``: of the same problem, for many plans that differ in few layers; it is added to."""
    return price_there(problem.put_by(main_grid(placed)), placed, known)


def price_there(problem: Problem, placed: Sequence[Placed], known: Known | None = None) -> PlanPrice:
    """The same where processes are on hosts as the problem's pricing has them."""
    layers, main = [], main_grid(placed)
    every = [divided(problem, placed, index) for index in range(len(placed))]
    for index, (stage, how) in enumerate(zip(every, placed, strict=True)):
        forward_s, backward_s = problem.seconds(stage, how)
        if known is None:
            cost = layer_cost(problem, placed, index)
        else:
            key = main, index, tuple(placed[each] for each in problem.graph.near(index))
            if key not in known:
                known[key] = layer_cost(problem, placed, index)
            cost = known[key]
        layers.append(LayerPrice(stage, how, cost, forward_s, backward_s, problem.memory(stage, how)))
    seconds = problem.link.seconds
    compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    waits_s = queue_s = 0.0  # in backward order: weight gradients queue for the network, and compute overlaps with it
    for index in reversed(range(len(layers))):
        cost = layers[index].cost
        times = Times.of(problem, layers[index].stage, placed[index], cost)
        waits_s += times.waits_s + seconds(cost.redistribute + cost.redistribute_back)
        queue_s = max(0.0, queue_s - times.drains_s) + times.queues_s
    communication_s = sum(seconds(layer.cost.total) for layer in layers)
    return PlanPrice(tuple(layers), communication_s, waits_s + queue_s - compute_s, compute_s)
