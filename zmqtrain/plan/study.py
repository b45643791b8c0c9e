"""Gholami et al.'s study of AlexNet: the rules they compare, and what readings of their equations give beside what they state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.layers import stages
from zmqtrain.plan.planner import Planned, plan
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.rules import Ruled, best, every_grid, grid_for_connected, pure, same_grid
from zmqtrain.plan.shipped import IMAGES, Alexnet, before_pooling

Rule = Literal["same grid", "connected only"]
#: How much less communication than pure batch the paper states for 512 processes, and on which grid.
STATED: dict[Rule, float] = {"same grid": 5.0, "connected only": 9.7}
STATED_PROCESSES = 512
STATED_GRID = Grid(16, 32)
#: Readings that are shown for each of the stated figures.
NEAREST = 3


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


def check_study(layers: str | None, pricing: object) -> None:
    """Raise `UsageError` unless it is AlexNet by the paper's equations that is planned for."""
    if layers is None or not layers.startswith("alexnet"):
        raise UsageError('[plan] study is about AlexNet: set [plan] layers = "alexnet", or leave study out')
    if not isinstance(pricing, Paper):
        raise UsageError('[plan] study is about the paper\'s equations: set [plan] pricing = "paper", or leave study out')


def nearest(found: Sequence[Reading], rule: Rule) -> list[Reading]:
    """The first few of a rule."""
    return [each for each in found if each.rule == rule][:NEAREST]
