"""Paths of the search for a plan: the states that layers may be in, what a path has cost so far, and which paths may still win."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import Times, joined_units, returned, told
from zmqtrain.plan.problem import Options, Problem

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

#: This many paths of a state are compared in time, queue and memory together; beyond that, in two of the three at a time.
MOST_COMPARED = 512


@dataclass(frozen=True, slots=True)
class State:
    """How a layer is placed, and whether its input arrives divided as the layer before has left it."""

    placed: Placed
    joined: bool = False
    paired: bool = False
    """Whether the layer is divided together with the others of its pair."""
    begun: bool = False
    """Where the plan's main grid is given: whether the rows of a grid compute this layer or one before it."""

    def begins(self, main: Grid) -> bool:
        """Whether the first layer may be in this state."""
        return self.begun == (self.placed.choice != "batch") and (not self.begun or self.placed.grid == main)


def states_of(problem: Problem, options: Options, index: int) -> list[State]:
    """The states of a layer."""
    found = [State(how, paired=problem.divides_pair(index, how)) for how in options.placed]
    place = problem.graph.before[index]
    if place is not None:
        joins, every = problem.pricing.joins, list(found)
        found += [
            replace(each, joined=True)
            for each in every
            if joins(problem.stage(place, each.placed), each.placed, problem.stage(index, each.placed), each.placed)
        ]
    if problem.main is None:
        return found
    found = [replace(each, begun=True) for each in found] + [each for each in found if each.placed.choice == "batch"]
    return found if index else [each for each in found if each.begins(problem.main)]


def unfit(main: Grid | None, states: Sequence[State], after: Sequence[State]) -> Array:
    """0 where a layer may be in one of the states ``after`` if the layer before it is in one of ``states``, else infinite: the
    first grid with rows must be the main one."""
    if main is None:
        return np.zeros((len(states), len(after)))
    begun = np.array([[state.begun] for state in states])
    begins, still = np.array([state.begins(main) for state in after]), np.array([state.begun for state in after])
    return np.where(np.where(begun, still, begins | ~still), 0.0, math.inf)


def times_of(problem: Problem, index: int, state: State) -> Times:
    """A layer's times in a state."""
    stage, graph = problem.stage(index, state.placed), problem.graph
    before, joined = graph.before[index], 0
    if state.joined and before is not None:
        joined = joined_units(problem.stage(before, state.placed), stage)
    first, last = before is None, graph.ends(index)
    main = problem.main or Grid(problem.processes, 1)  # at least
    numbers = told(problem, index, stage, state.placed, main)
    cost = problem.pricing.layer(stage, state.placed, problem.batch, first=first, last=last, joined=joined, told=numbers)
    times = Times.of(problem, stage, state.placed, cost)
    back_s = sum(problem.link.seconds(each) for each in returned(problem, index, stage, state.placed, main))
    return replace(times, waits_s=times.waits_s + back_s)


@dataclass(frozen=True, slots=True)
class Ways:
    """Paths from the last layer to a layer: their state there, their costs so far, and the paths that they continue."""

    state: Indices
    time: Array
    until: Array
    """A + Q"""
    memory: Array
    origin: Indices

    def only(self, which: Any) -> Ways:
        return Ways(self.state[which], self.time[which], self.until[which], self.memory[which], self.origin[which])


def unbeaten(ways: Ways, overlaps: bool, limited: bool) -> Indices:
    """The paths that no other path beats. Without overlap, only the time when everything has finished counts."""
    time = ways.time if overlaps else ways.until
    if not limited:
        order = np.lexsort((ways.until, time))
        return order[lower(ways.until[order])]
    order = np.lexsort((ways.until, time, ways.memory))
    keep = lower(time[order]) | lower(ways.until[order])
    if not overlaps or len(order) > MOST_COMPARED:
        return order[keep]
    for place, way in enumerate(order):  # in the order of memory: only paths before it can beat it
        if not keep[place]:
            others = order[:place]
            beaten = (time[others] <= time[way]) & (ways.until[others] <= ways.until[way])
            keep[place] = not beaten.any()
    return order[keep]


def lower(values: Array) -> NDArray[np.bool_]:
    """Which values are lower than all values before them."""
    keep = np.ones(len(values), np.bool_)
    keep[1:] = values[1:] < np.minimum.accumulate(values)[:-1]
    return keep


def spread(ways: Ways, most: int) -> Indices:
    """At most ``most`` of them, evenly spread over their memory (or over time, if memory is not limited)."""
    count = len(ways.time)
    if count <= most:
        return np.arange(count)
    order = np.lexsort((ways.time, ways.memory))
    return order[np.unique(np.linspace(0, count - 1, most).astype(np.int64))]
