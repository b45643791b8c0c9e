"""The best plan of a model that branches: the search of `zmqtrain.plan.planner` over several layers' states at once.

Layers are taken from the last to the first, as there. A path's state is how all those layers are placed on which an earlier layer
still depends: of a residual block, the one that takes the block's input and the one to whose output this input is added. When the
earlier layer is taken, what it sends to them is paid, and they are forgotten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zmqtrain.plan.layers import Stage
from zmqtrain.plan.placed import Placed
from zmqtrain.plan.price import Known, changing_bytes, price, price_there
from zmqtrain.plan.problem import Options, Problem
from zmqtrain.plan.ways import Array, Indices, State, Ways, lower, spread, states_of, times_of, unbeaten, unfit

#: The most paths that are kept after each layer. If there are more, those are kept that took least, and the result may not be best.
MOST_KEPT = 20_000


def search(problem: Problem, options: Sequence[Options], limit: float | None = None) -> tuple[list[Placed], int]:
    """The best plan, and the number of paths that were looked at. ``limit``: bytes of memory, which some plan must fit in."""
    states = [states_of(problem, option, index) for index, option in enumerate(options)]
    found, looked_at, exact = _found(problem, states, _sent(problem, states), limit)
    return (found if exact else _improved(problem, options, found, limit)), looked_at


def _found(
    problem: Problem, states: Sequence[Sequence[State]], sent: Mapping[tuple[int, int], Array], limit: float | None
) -> tuple[list[Placed], int, bool]:
    bound_s, looked_at, exact, overlaps = math.inf, 0, True, problem.overlap > 0
    if overlaps:  # a good plan, whose step time is an upper bound for all paths
        plain, looked_at, exact = _found(replace(problem, overlap=0.0), states, sent, limit)
        bound_s = price_there(problem, plain).step_s * (1 + 1e-9)
    times = [[times_of(problem, index, state) for state in here] for index, here in enumerate(states)]
    least = np.cumsum([0.0, *(min(each.memory for each in here) for here in times)])  # of the layers before each one
    ahead_s = np.cumsum([0.0, *(min(each.waits_s for each in here) for here in times)])
    first = {later: min(one for one, other in sent if other == later) for _, later in sent}  # on which each one depends
    zero = np.zeros(1)
    ways = Ways(np.zeros(1, np.int64), zero, zero, zero, np.zeros(1, np.int64))
    open_: list[int] = []  # layers of which each path's state is known by number, in the columns of ``codes``
    codes: Indices = np.zeros((1, 0), np.int64)
    trail: list[Ways] = []
    for index in reversed(range(len(states))):
        waiting = [(place, sent[index, later]) for place, later in enumerate(open_) if (index, later) in sent]
        steps, kept_codes = [], []
        for state, own in enumerate(times[index]):
            moved_s = sum((table[state, codes[:, place]] for place, table in waiting), np.zeros(len(ways.time)))
            queue_s = np.maximum(0.0, ways.until - ways.time - own.drains_s) + own.queues_s
            time = ways.time + moved_s + own.waits_s
            memory = ways.memory + own.memory if limit is not None else ways.memory
            come = Ways(np.full(len(time), state), time, time + queue_s, memory, np.arange(len(time)))
            looked_at += len(time)
            fits = np.isfinite(time) & (time + ahead_s[index] <= bound_s)
            if limit is not None:
                fits &= memory + least[index] <= limit
            steps.append(come.only(fits))
            kept_codes.append(np.column_stack([codes[fits], np.full(int(fits.sum()), state)]))
        ways, codes, open_ = _joined(steps), np.concatenate(kept_codes), [*open_, index]
        still = [place for place, later in enumerate(open_) if first.get(later, index) < index]
        codes, open_ = codes[:, still], [open_[place] for place in still]
        keep = _best(ways, _groups(codes, [len(states[each]) for each in open_]), overlaps, limit is not None)
        if len(keep) > MOST_KEPT:
            exact = False
            chosen = np.argsort(ways.until[keep], kind="stable")[: MOST_KEPT // 2]
            keep = keep[np.union1d(chosen, spread(ways.only(keep), MOST_KEPT // 2))]
        ways, codes = ways.only(keep), codes[keep]
        trail.append(ways)
    return _back(trail, states), looked_at, exact


def _sent(problem: Problem, states: Sequence[Sequence[State]]) -> dict[tuple[int, int], Array]:
    """Seconds that depend on how two layers are placed, by their numbers, the earlier one first, and by their states."""
    found: dict[tuple[int, int], Array] = {}
    tables: dict[Hashable, tuple[Array, Array]] = {}
    graph, layers, link = problem.graph, problem.layers, problem.link
    every = list(dict.fromkeys(state.placed for here in states for state in here))
    where = {each: number for number, each in enumerate(every)}

    def table(one: int, other: int, *, meet: bool, nbytes: int) -> Array:
        """Of all pairs of their states. Layers that are divided together with others leave and take other parts."""
        result = np.zeros((len(states[one]), len(states[other])))
        for source, rows in _kinds(layers[one], states[one]):
            for target, columns in _kinds(layers[other], states[other]):
                placed = ([where[states[each][at].placed] for at in numbers] for each, numbers in ((one, rows), (other, columns)))
                result[np.ix_(rows, columns)] = priced(source, target, meet, nbytes)[np.ix_(*placed)]
        return result

    def priced(before: Stage, after: Stage, meet: bool, nbytes: int) -> Array:
        key = (
            meet,
            after.alone.leaves_channels,
            after.alone.leaves((2, 1)),
            after.alone.leaves((1, 2)),
            problem.pricing.change_key(before, after),
        )
        if key not in tables:
            messages_s, unit_s = np.zeros((len(every), len(every))), np.zeros((len(every), len(every)))
            changes = problem.pricing.meetings if meet else problem.pricing.changes
            for back in (False, True) if problem.charge_changes else ():
                cost = changes(before, every, after, every, back=back)
                messages_s += cost.messages * link.alpha_s
                unit_s += cost.unit.nic_bytes * link.byte_s + cost.unit.memory_bytes * link.memory_byte_s
            tables[key] = messages_s, unit_s
        messages_s, unit_s = tables[key]
        return messages_s + nbytes * unit_s

    def add(one: int, other: int, seconds: Array) -> None:
        key, seconds = ((one, other), seconds) if one < other else ((other, one), seconds.T)
        found[key] = found[key] + seconds if key in found else seconds

    for after, before in enumerate(graph.before):
        if before is None:
            continue
        seconds = table(before, after, meet=False, nbytes=changing_bytes(problem, layers[after]))
        joins = problem.pricing.joins
        for row, source in enumerate(states[before]):
            for column, target in enumerate(states[after]):
                one, other = problem.stage(before, source.placed), problem.stage(after, target.placed)
                alike = joins(one, source.placed, other, target.placed)
                if alike or target.joined:
                    seconds[row, column] = 0.0 if alike and target.joined else math.inf
        add(before, after, seconds)
    for moved in graph.brought:
        add(moved.source, moved.target, table(moved.source, moved.target, meet=True, nbytes=problem.batch_bytes(moved.numel)))
    for place, (here, later) in enumerate(itertools.pairwise(states) if problem.main is not None else ()):
        add(place, place + 1, unfit(problem.main, here, later))
    for *first, last in graph.pairs:  # they are divided together or not at all
        for each in first:
            together = [
                [one.placed == other.placed or not (one.paired or other.paired) for other in states[last]] for one in states[each]
            ]
            add(each, last, np.where(together, 0.0, math.inf))
    return found


def _kinds(stage: Stage, states: Sequence[State]) -> Iterator[tuple[Stage, list[int]]]:
    """A layer alone and together with its pair, each with the numbers of the states in which it is so."""
    for paired in {state.paired for state in states}:
        yield stage.paired if paired else stage, [number for number, state in enumerate(states) if state.paired == paired]


def _groups(codes: Indices, sizes: Sequence[int]) -> Indices:
    """A number for each path, the same for those whose states are."""
    number = np.zeros(len(codes), np.int64)
    for place, size in enumerate(sizes):
        number = np.unique(number * size + codes[:, place], return_inverse=True)[1]
    return number


def _best(ways: Ways, groups: Indices, overlaps: bool, limited: bool) -> Indices:
    """The paths that no other path of their group beats."""
    if limited:
        order = np.argsort(groups, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else []
        return np.concatenate([part[unbeaten(ways.only(part), overlaps, limited)] for part in parts] or [order])
    order = np.lexsort((ways.until, ways.time if overlaps else ways.until, groups))
    ranks = np.unique(ways.until, return_inverse=True)[1].astype(np.float64)
    # Each group's numbers are lower than all those of the groups before it.
    return order[lower((ranks - groups * float(len(ranks) + 1))[order])]


def _joined(steps: Sequence[Ways]) -> Ways:
    names = ("state", "time", "until", "memory", "origin")
    return Ways(*(np.concatenate([getattr(step, name) for step in steps]) for name in names))


def _back(trail: Sequence[Ways], states: Sequence[Sequence[State]]) -> list[Placed]:
    at = int(np.argmin(trail[-1].until))
    found = []
    for here, ways in zip(states, reversed(trail), strict=True):
        found.append(here[ways.state[at]].placed)
        at = int(ways.origin[at])
    return found


@dataclass(frozen=True, slots=True)
class _Price:
    """What counts of a plan's price."""

    step_s: float
    memory: float


def _improved(problem: Problem, options: Sequence[Options], placed: list[Placed], limit: float | None) -> list[Placed]:
    """The plan, and then the best among those that differ from it in one layer, until it is that itself."""

    known: Known = {}

    def priced(plan: Sequence[Placed]) -> _Price:
        found = price(problem, plan, known)
        return _Price(found.step_s, found.memory.total if limit is not None else 0.0)

    best = priced(placed)
    better = True
    while better:
        better = False
        for index, option in enumerate(options):
            for how in option.placed:
                tried = [*placed[:index], how, *placed[index + 1 :]]
                found = priced(tried)
                if found.step_s < best.step_s * (1 - 1e-9) and (limit is None or found.memory <= limit):
                    placed, best, better = tried, found, True
    return placed
