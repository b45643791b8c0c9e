"""The best plan: dynamic programming over layers, whose states are choices on grids, and whose edges are redistributions.

Layers are taken in the order of the backward, from the last to the first. Without overlap and without a memory limit, the best path
to each state is one number. Otherwise several paths may lead to the best end: a path that took longer may have left fewer weight
gradients waiting for the network, or need less memory. So each state keeps the paths that no other path beats in all of these:

* the time so far, A;
* the time so far if everything that waits for the network were waited for now, A + Q (a path that is no later in both can never
  become later: later compute takes at most Q off a queue Q, and no less off a longer queue);
* the memory so far, if it is limited.

This is for layers that take each the outputs of the one before it; `zmqtrain.plan.branching` is for models that branch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Plan
from zmqtrain.plan.branching import search
from zmqtrain.plan.layers import Stage
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import PlanPrice, Times, changing_bytes, divided, price, price_there, returned
from zmqtrain.plan.problem import Options, Problem, main_grid, plan_of
from zmqtrain.plan.ways import Array, State, Ways, spread, states_of, times_of, unbeaten, unfit
from zmqtrain.topology.rounded import rounded_size

#: The number of paths that all states of all layers may keep together, which bounds the planner's time; and the fewest per state.
MOST_WAYS = 400_000
FEWEST_WAYS = 48
#: The number of paths after which no further main grid is tried, where the output's way back makes one of them costly.
MOST_RETURNING = 1_000_000


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan, and the alternatives."""

    problem: Problem
    placed: tuple[Placed, ...]
    price: PlanPrice
    options: tuple[Options, ...]
    ways: int = 0
    """The number of paths that the search has looked at: its work. 0: the plan was given, not searched for."""

    @property
    def plan(self) -> Plan:
        """The plan in the form that `zmqtrain.parallelize` takes."""
        return plan_of(self.problem, self.placed)


def plan(problem: Problem) -> Planned:
    """The plan with the shortest step. Raises `UsageError` if nothing can be divided, or no plan fits in memory.

    The result is exact, unless memory is limited and more paths lead to a state than `MOST_WAYS` allows; then paths are kept that
    are spread over their memory, always including the smallest. Of a model that branches also `branching.MOST_KEPT` is a limit.
    """
    options = tuple(problem.options(stage) for stage in problem.layers)
    if problem.processes > 1 and not any(how.choice != "whole" or how.samples > 1 for option in options for how in option.placed):
        stage, option = problem.layers[0], options[0]
        reasons = "; ".join(f"{what}: {why}" for what, why in option.excluded.items() if what != "whole")
        raise UsageError(
            f"no grid of {problem.processes} processes divides any layer for a batch of {problem.batch}: "
            f"choose another number of processes, or a larger batch. Layer {stage.name}: {reasons}"
        )
    tables: _Tables = {}
    found, ways = _fitting(problem, options, tables)
    found, more = _by_main_grid(problem, options, found, tables)
    ways += more
    problem = problem.put_by(main_grid(found))
    return Planned(problem, tuple(found), price(problem, found), options, ways)


#: Placements, and seconds for messages and for a byte of every change between them; by the layers' part in them.
_Tables: TypeAlias = dict[Any, tuple[tuple[Placed, ...], Array, Array]]


def _fitting(problem: Problem, options: Sequence[Options], tables: _Tables) -> tuple[list[Placed], int]:
    """The best plan that fits in memory, and the number of paths that were looked at."""
    found, ways = _search(problem, options, tables)
    limit = problem.memory_bytes
    if limit is None or price(problem, found).memory.total <= limit:
        return found, ways
    found, more = _search(problem, options, tables, limit)
    return found, ways + more


def _by_main_grid(problem: Problem, options: Sequence[Options], found: list[Placed], tables: _Tables) -> tuple[list[Placed], int]:
    """The best plan if what depends on its main grid counts, too: the output's way back, and which processes share a host.
    ``found``: the best one without them.

    The main grid depends on the first layers, and these on the last ones: so each main grid is a search of its own. None of them
    can be better than the best plan without them if that has no such way back, and each process has a host of its own.
    """
    best_s, looked_at, main = price(problem, found).step_s, 0, main_grid(found)
    stays_s, moves_s = (
        sum(
            problem.link.seconds(each)
            for end in range(len(found))
            for each in returned(problem, end, divided(problem, found, end), found[end], grid)
        )
        for grid in (Grid(problem.processes, 1), main)
    )
    batch = Placed.of("batch", main)
    shared = problem.put_by(main) is not problem  # hosts have several processes
    if moves_s == stays_s and not shared:
        return found, 0
    candidates = [[batch for _ in found]] if all(batch in option.placed for option in options) else []
    for grid in sorted(problem.grids(), key=lambda each: (each not in (main, found[-1].grid), each.rows)):
        if grid.rows == 1 or looked_at > MOST_RETURNING:
            continue
        try:
            tried, more = _fitting(problem.with_main(grid), options, tables)
        except UsageError:  # with this grid nothing fits in memory
            continue
        looked_at += more
        candidates.append(tried)
    for tried in candidates:
        priced = price(problem, tried)
        if priced.step_s < best_s and (problem.memory_bytes is None or priced.memory.total <= problem.memory_bytes):
            found, best_s = tried, priced.step_s
    return found, looked_at


def _search(problem: Problem, options: Sequence[Options], tables: _Tables, limit: float | None = None) -> tuple[list[Placed], int]:
    """The best plan, and the number of paths that were looked at. Raises `UsageError` if there is none."""
    if problem.main is not None and not _possible(problem, options, problem.main):
        raise UsageError(f"no layer can be the first that is computed by rows on the grid {problem.main}")
    if limit is not None:
        every = (states_of(problem, option, index) for index, option in enumerate(options))
        least = sum(min(times_of(problem, index, state).memory for state in here) for index, here in enumerate(every))
        if least > limit:
            raise UsageError(
                f"no plan fits in memory: a process needs at least {rounded_size(least)}, but may use only {rounded_size(limit)}. "
                "Use more processes or a smaller batch, or raise [plan] memory"
            )
    return _chain(problem, options, limit, tables) if problem.graph.chain else search(problem, options, limit)


def _possible(problem: Problem, options: Sequence[Options], main: Grid) -> bool:
    """Whether some plan has this main grid: a layer that can be on it, and batch parallelism for all layers before that one."""
    for option in options:
        if any(how.choice != "batch" and how.grid == main for how in option.placed):
            return True
        if not any(how.choice == "batch" for how in option.placed):
            return False
    return False


def _chain(
    problem: Problem, options: Sequence[Options], limit: float | None, tables: _Tables, edges: _Edges | None = None
) -> tuple[list[Placed], int]:
    """The search where each layer takes the outputs of the one before it. ``edges``: of the same problem, with another overlap."""
    bound_s, looked_at = math.inf, 0
    states = [states_of(problem, option, index) for index, option in enumerate(options)]
    every = sorted({state for here in states for state in here}, key=str)
    number = {state: index for index, state in enumerate(every)}
    edges = edges or _Edges(problem, every, tables)
    if problem.overlap > 0:  # a good plan, whose step time is an upper bound for all paths
        plain, looked_at = _chain(replace(problem, overlap=0.0), options, limit, tables, edges)
        bound_s = price_there(problem, plain).step_s * (1 + 1e-9)
    times = [[times_of(problem, index, state) for state in here] for index, here in enumerate(states)]
    least = np.cumsum([0.0, *(min(each.memory for each in here) for here in times)])  # of the layers before each one
    ahead_s = np.cumsum([0.0, *(min(each.waits_s for each in here) for here in times)])
    most = max(FEWEST_WAYS, MOST_WAYS // (len(options) * len(every)))
    trail: list[Ways] = []
    for index in reversed(range(len(options))):
        here = [number[state] for state in states[index]]
        edges_s = edges.seconds(index)
        before = trail[-1] if trail else None
        steps = []
        for state, own in zip(here, times[index], strict=True):
            ways = _arrive(before, state, edges_s, own)
            looked_at += len(ways.time)
            ways = ways.only(np.isfinite(ways.time))
            if bound_s < math.inf:
                ways = ways.only(ways.time + ahead_s[index] <= bound_s)
            if limit is None:
                ways = replace(ways, memory=np.zeros_like(ways.memory))
            else:
                ways = ways.only(ways.memory + least[index] <= limit)
            ways = ways.only(unbeaten(ways, problem.overlap > 0, limit is not None))
            steps.append(ways.only(spread(ways, most)))
        trail.append(_joined(steps))
    return _back(trail, every), looked_at


class _Edges:
    """The cost of every change, in forward and backward: seconds for messages, and per byte of activations."""

    def __init__(self, problem: Problem, every: Sequence[State], tables: _Tables) -> None:
        self._problem, self._every, self._tables = problem, every, tables
        self._known: dict[Any, tuple[Array, Array]] = {}
        self._unfit = unfit(problem.main, every, every)

    def seconds(self, index: int) -> Array:
        """Between a layer and the one after it; infinite if they do not fit together."""
        layers = self._problem.layers
        before, after = layers[index], layers[min(index + 1, len(layers) - 1)]
        key = self._problem.pricing.change_key(before, after)
        if key not in self._known:
            self._known[key] = self._edges(before, after)
        messages_s, unit_s = self._known[key]
        return messages_s + unit_s * changing_bytes(self._problem, after) + self._unfit

    def _changes(self, before: Stage, after: Stage, wanted: Sequence[Placed]) -> tuple[Array, Array]:
        problem, link = self._problem, self._problem.link
        key = problem.pricing.change_key(before, after)
        placed, messages_s, unit_s = self._tables.get(key, ((), np.zeros(0), np.zeros(0)))
        if not set(wanted) <= set(placed):
            placed = tuple(wanted)
            messages_s, unit_s = np.zeros((len(placed), len(placed))), np.zeros((len(placed), len(placed)))
            for back in (False, True) if problem.charge_changes else ():
                found = problem.pricing.changes(before, placed, after, placed, back=back)
                messages_s += found.messages * link.alpha_s
                unit_s += found.unit.nic_bytes * link.byte_s + found.unit.memory_bytes * link.memory_byte_s
            self._tables[key] = placed, messages_s, unit_s
        where = {each: number for number, each in enumerate(placed)}
        these = np.ix_(*[[where[each] for each in wanted]] * 2)
        return messages_s[these], unit_s[these]

    def _edges(self, before: Stage, after: Stage) -> tuple[Array, Array]:
        problem = self._problem
        placed = sorted({state.placed for state in self._every}, key=str)
        messages_s, unit_s = self._changes(before, after, placed)
        where = {each: number for number, each in enumerate(placed)}
        each = [where[state.placed] for state in self._every]
        messages_s, unit_s = messages_s[np.ix_(each, each)], unit_s[np.ix_(each, each)]
        joined = np.array([state.joined for state in self._every])
        messages_s[:, joined], unit_s[:, joined] = math.inf, 0.0
        for one, source in enumerate(self._every):
            if problem.pricing.joins(before, source.placed, after, source.placed):
                same = np.array(each) == each[one]
                messages_s[one, same & joined], messages_s[one, same & ~joined] = 0.0, math.inf
        return messages_s, unit_s


def _arrive(before: Ways | None, state: int, edges_s: Array, own: Times) -> Ways:
    """All paths to this state of a layer, from those to any state of the layer after it."""
    if before is None:
        time = np.array([own.waits_s])
        zero = np.zeros(1, np.int64)
        return Ways(zero + state, time, time + own.queues_s, np.array([own.memory]), zero - 1)
    queue = np.maximum(0.0, before.until - before.time - own.drains_s) + own.queues_s
    time = before.time + edges_s[state, before.state] + own.waits_s
    return Ways(
        np.full(len(time), state, np.int64),
        time,
        time + queue,
        before.memory + own.memory,
        np.arange(len(time), dtype=np.int64),
    )


def _joined(steps: Sequence[Ways]) -> Ways:
    names = ("state", "time", "until", "memory", "origin")
    return Ways(*(np.concatenate([getattr(step, name) for step in steps]) for name in names))


def _back(trail: Sequence[Ways], every: Sequence[State]) -> list[Placed]:
    """From the first layer's best path back to the last layer."""
    at = int(np.argmin(trail[-1].until))
    found = []
    for ways in reversed(trail):
        found.append(every[ways.state[at]].placed)
        at = int(ways.origin[at])
    return found
