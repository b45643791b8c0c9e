"""``python -m benchmarks study``: Gholami et al.'s study of AlexNet (SPAA 2018), by the planner's own functions.

How much less communication than pure batch parallelism their rules need, by their printed equations, and what other readings of
these equations give beside what the paper states. What it leaves open is read as `PROBLEM` has it. Computed, not measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.case import Case, case_of
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.planner import Planned, plan
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.rules import Ruled, best, every_grid, grid_for_connected, pure, same_grid
from zmqtrain.plan.shipped import IMAGES, Alexnet, before_pooling

Rule = Literal["same grid", "connected only"]
#: How much less communication than pure batch the paper states for 512 processes, and on which grid.
STATED: dict[Rule, float] = {"same grid": 5.0, "connected only": 9.7}
STATED_PROCESSES = 512
STATED_GRID = Grid(16, 32)
_RULES: dict[Rule, str] = {"same grid": "one grid for all layers", "connected only": "a grid for connected layers only"}
#: Readings that are shown for each of the stated figures.
NEAREST = 3
PROCESSES = (8, 32, 128, 512)
#: AlexNet without groups on images of 227 x 227, float32, no biases, activations after pooling, logarithms to the base of 2, all
#: sums of Eq. 8, and no gradient of the first layer's input; 2 us and 6 GB/s, and communication alone.
PROBLEM = Problem(stages(Alexnet().layers()), 2048, STATED_PROCESSES, Link(2e-6, 1 / 6e9))


@dataclass(frozen=True, slots=True)
class Compared:
    """The rules on so many processes, all against pure batch."""

    problem: Problem
    batch: Ruled
    same: Ruled
    connected: Ruled
    connected_charged: Ruled
    """The same rule where the change between the convolutions and the rest is charged by Eq. 6."""
    free: Planned
    """Any choice and grid for each layer. Without Eq. 6, as the rules."""
    free_charged: Planned

    def gain(self, seconds: float) -> float:
        """How many times less time than pure batch."""
        return self.batch.price.exposed_s / seconds if seconds else 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reading of the paper gives for a rule on `STATED_PROCESSES`."""

    rule: Rule
    network: str
    activations: Literal["after pooling", "before pooling"]
    dx: bool
    best: Ruled
    gain: float
    stated_grid_gain: float
    """On the grid that the paper names."""

    @property
    def distance(self) -> float:
        """Of the nearer of the two from what the paper states, as a share."""
        return min(abs(gain / STATED[self.rule] - 1) for gain in (self.gain, self.stated_grid_gain))

    def __str__(self) -> str:
        terms = "all sums" if self.dx else "no sums of input gradients"
        return f"{self.network}, activations {self.activations}, {terms}"


def bench_study(processes: Sequence[int] = PROCESSES) -> Iterator[Case]:
    """A case for each rule on each number of processes, and for the readings that come nearest to what the paper states."""
    for size in processes:
        each = compare(replace(PROBLEM, processes=size))
        head = f"AlexNet on {size} processes"
        yield case_of("study", f"{head}, pure batch", each.batch.price.exposed_s * 1e3, "ms", digits=2)
        best_of: dict[Rule, Ruled] = {"same grid": each.same, "connected only": each.connected}
        for rule, ruled in best_of.items():
            gain = each.gain(ruled.price.exposed_s)
            stated = STATED[rule] if size == STATED_PROCESSES else None
            yield _gain(f"{head}, {_RULES[rule]}, best on {ruled.grid}", gain, stated)
        yield _gain(f"{head}, {_RULES['connected only']}, with Eq. 6", each.gain(each.connected_charged.price.exposed_s))
        yield _gain(f"{head}, any choice and grid for each layer", each.gain(each.free.price.exposed_s))
        yield _gain(f"{head}, any choice and grid for each layer, with Eq. 6", each.gain(each.free_charged.price.exposed_s))
    found = readings(PROBLEM)
    for rule, stated in STATED.items():
        for read in nearest(found, rule):
            yield _gain(f"{_RULES[rule]}, best on {read.best.grid}: {read}", read.gain, stated)
            yield _gain(f"{_RULES[rule]}, on {STATED_GRID}: {read}", read.stated_grid_gain, stated)


def _gain(case: str, gain: float, stated: float | None = None) -> Case:
    """How many times less communication than pure batch, beside what the paper states."""
    return case_of("study", case, gain, "times less", "stated in the paper", stated, "value/peer", digits=2)


def compare(problem: Problem) -> Compared:
    """The rules on the problem's processes. As Eq. 8 has no changes of placement, the rules are compared without them."""
    free = replace(problem, charge_changes=False)
    charged = replace(problem, charge_changes=True)
    return Compared(
        problem,
        pure(free)[0],
        best(every_grid(free, "same grid", same_grid)),
        best(every_grid(free, "connected only", grid_for_connected)),
        best(every_grid(charged, "connected only", grid_for_connected)),
        plan(free),
        plan(charged),
    )


def readings(problem: Problem) -> list[Reading]:
    """What all readings give on `STATED_PROCESSES`, the nearest to the stated figures first, by rule."""
    found = []
    for image, grouped, pooled, dx in itertools.product(IMAGES, (False, True), (True, False), (True, False)):
        table = Alexnet(image, grouped)
        layers = table.layers() if pooled else before_pooling(table.layers())
        read = replace(
            problem,
            layers=stages(layers),
            processes=STATED_PROCESSES,
            pricing=Paper(problem.pricing.word_bytes, dx),
            charge_changes=False,
        )
        base_s = pure(read)[0].price.exposed_s
        for rule, place in (("same grid", same_grid), ("connected only", grid_for_connected)):
            plans = every_grid(read, rule, place)
            first = best(plans)
            stated = next(each for each in plans if each.grid == STATED_GRID)
            found.append(
                Reading(
                    rule,  # type: ignore[arg-type]
                    table.name,
                    "after pooling" if pooled else "before pooling",
                    dx,
                    first,
                    base_s / first.price.exposed_s,
                    base_s / stated.price.exposed_s,
                )
            )
    return sorted(found, key=lambda each: (each.rule, each.distance))


def nearest(found: Sequence[Reading], rule: Rule) -> list[Reading]:
    """The first few of a rule."""
    return [each for each in found if each.rule == rule][:NEAREST]
