"""Why a layer was placed as it is: what each alternative would have cost, and what would change the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from zmqtrain.parallel.plan import Choice
from zmqtrain.plan.link import NOTHING, Cost, LayerCost, Link
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import layer_cost
from zmqtrain.plan.problem import Problem

#: The largest factor by which batch size and bandwidth are varied; more would not be realistic.
FARTHEST = 1024.0
#: The steps of that factor, and how finely the turning point between two steps is then located.
STEP = 2**0.5
HALVINGS = 16


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layer placed in one way, with all others as planned. Without overlap."""

    placed: Placed
    cost: LayerCost
    """With the redistribution of its input and of that of layers that take its output."""
    seconds: float
    """Communication, and compute if its time is known; includes the time by which the next layer takes longer than planned."""


@dataclass(frozen=True, slots=True)
class Flip:
    """What would have to change, everything else being equal, for the runner-up to win. None: no factor up to 1024 does."""

    runner_up: Alternative
    batch: int | None
    bandwidth: float | None
    """bit/s"""


def alternatives(problem: Problem, placed: Sequence[Placed], index: int) -> list[Alternative]:
    """The best grid of every choice for a layer, cheapest first. The planned placement is always among them."""
    best: dict[Choice, Alternative] = {placed[index].choice: _alternative(problem, placed, index, placed[index])}
    for how in problem.options(problem.layers[index]).placed:
        if how.choice != placed[index].choice:
            found = _alternative(problem, placed, index, how)
            if how.choice not in best or found.seconds < best[how.choice].seconds:
                best[how.choice] = found
    return sorted(best.values(), key=lambda each: each.seconds)


def flip(problem: Problem, placed: Sequence[Placed], index: int, among: Sequence[Alternative]) -> Flip | None:
    """What would change the planned choice of a layer to the next best of ``among``; None if there is no other."""
    planned = placed[index]
    others = [each for each in among if each.placed != planned]
    if not others:
        return None
    runner_up = others[0]

    @cache  # between two factors that are close the batch is the same
    def wins(batch: int) -> bool:
        changed = replace(problem, batch=batch)
        if changed.obstacle(problem.layers[index], runner_up.placed) or changed.obstacle(problem.layers[index], planned):
            return False
        one, other = (_costs(changed, placed, index, how).seconds(problem.link) for how in (runner_up.placed, planned))
        return one < other

    def larger_batch(factor: float) -> bool:
        return wins(max(1, round(problem.batch * factor)))

    one, other = (_costs(problem, placed, index, how) for how in (runner_up.placed, planned))

    def faster_network(factor: float) -> bool:
        link = replace(problem.link, byte_s=problem.link.byte_s / factor)
        return one.seconds(link) < other.seconds(link)

    batch, bandwidth = _nearest(larger_batch), _nearest(faster_network)
    return Flip(
        runner_up,
        None if batch is None else max(1, round(problem.batch * batch)),
        None if bandwidth is None else 8 / problem.link.byte_s * bandwidth,
    )


@dataclass(frozen=True, slots=True)
class _Costs:
    """What a layer costs that is placed in one way, on any link."""

    cost: LayerCost
    """Of the layer itself, and of the changes before and after it: of all layers that it sends to, or that it is brought to."""
    others: tuple[tuple[Cost, Cost], ...]
    """Of each of these layers, what it sends itself, then and as planned."""
    compute_s: float

    def seconds(self, link: Link) -> float:
        """Communication and compute, and by how much longer the other layers take than planned."""
        longer_s = 0.0
        for then, planned in self.others:
            longer_s += link.seconds(then) - link.seconds(planned)
        return link.seconds(self.cost.total) + longer_s + self.compute_s


def _alternative(problem: Problem, placed: Sequence[Placed], index: int, how: Placed) -> Alternative:
    found = _costs(problem, placed, index, how)
    return Alternative(how, found.cost, found.seconds(problem.link))


def _costs(problem: Problem, placed: Sequence[Placed], index: int, how: Placed) -> _Costs:
    graph, changed = problem.graph, [*placed[:index], how, *placed[index + 1 :]]
    cost, found = layer_cost(problem, changed, index), []
    others = {*graph.after(index), *graph.mates(index)}
    others |= {each.charged for each in graph.brought if index in (each.source, each.target)}
    for other in sorted(others - {index}):
        after = layer_cost(problem, changed, other)
        found.append((_own(after).total, _own(layer_cost(problem, placed, other)).total))
        cost = replace(
            cost,
            redistribute=cost.redistribute + after.redistribute,
            redistribute_back=cost.redistribute_back + after.redistribute_back,
        )
    return _Costs(cost, tuple(found), sum(problem.seconds(problem.layers[index], how)))


def _own(cost: LayerCost) -> LayerCost:
    """The cost without redistributions."""
    return replace(cost, redistribute=NOTHING, redistribute_back=NOTHING)


def _nearest(wins: Callable[[float], bool]) -> float | None:
    """The factor nearest to 1, larger or smaller, from which on the runner-up wins."""
    lower = upper = 1.0
    while upper < FARTHEST:
        for nearer, farther in ((upper, upper * STEP), (lower, lower / STEP)):
            if wins(farther):
                return _between(wins, nearer, farther)
        upper, lower = upper * STEP, lower / STEP
    return None


def _between(wins: Callable[[float], bool], loses: float, won: float) -> float:
    for _ in range(HALVINGS):
        middle = (loses * won) ** 0.5
        loses, won = (loses, middle) if wins(middle) else (middle, won)
    return won
