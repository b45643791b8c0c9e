"""How one layer is divided, and what part of the activations a process then holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Choice


@dataclass(frozen=True, slots=True)
class Placed:
    """A choice on a grid. ``batch`` is written on the grid 1xP, which is what it means, and so is whatever else has one row."""

    choice: Choice
    grid: Grid

    @classmethod
    def of(cls, choice: Choice, grid: Grid) -> Placed:
        """The one way to write it: everything with one row is batch parallelism."""
        if choice == "batch" or grid.rows == 1:
            return cls("batch", Grid(1, grid.size))
        return cls(choice, grid)

    @property
    def samples(self) -> int:
        """Into how many parts the batch is divided: Pc."""
        return self.grid.columns

    @property
    def strips(self) -> int:
        """Into how many strips each image is divided."""
        return self.grid.rows if self.choice == "domain" else 1

    def needs(self) -> Lie:
        """How its input must lie."""
        return Lie(self.samples, 1, self.strips)

    def leaves(self, *, channels: bool, strips: bool) -> Lie:
        """How its output lies, if the layer leaves channels divided where it is model-parallel, and strips where by domain."""
        divided = self.grid.rows if channels and self.choice == "model" else 1
        return Lie(self.samples, divided, self.strips if strips else 1)

    def __str__(self) -> str:
        return "batch" if self.choice == "batch" else f"{self.choice} {self.grid}"


@dataclass(frozen=True, slots=True)
class Lie:
    """How activations lie: into how many parts their samples, channels and rows are divided."""

    samples: int
    channels: int = 1
    strips: int = 1


@dataclass(frozen=True, slots=True)
class Change:
    """What a process must receive for activations to go from one placement to another."""

    pieces: int
    """Among how many processes: 1 where it has all that it needs."""
    share: float
    """What it receives, as a share of the whole batch's activations."""


def change(source: Placed, target: Placed) -> Change:
    """What lacks to a process between layers whose outputs are whole on their columns, or in strips: see `lacking`."""
    return lacking(source.needs(), target.needs())


def lacking(held: Lie, needed: Lie) -> Change:
    """What lacks to a process that holds its part of activations that lie so, and needs that of another division.

    A process holds 1/Pc of the samples, and of their images 1/Pr where they lie in strips. Finer parts lie within coarser ones
    (rank r is in column r mod Pc and row r div Pc), so what it has of what it needs is one part in lcm of both; where neither is
    finer, that is so for the process that lacks most. Eq. 6 is the case from batch to pure model: (P-1)/P of all activations, from
    P processes.
    """
    parts = needed.samples * needed.channels * needed.strips
    common = math.lcm(held.samples, needed.samples)
    common *= math.lcm(held.channels, needed.channels) * math.lcm(held.strips, needed.strips)
    return Change(common // parts, 1 / parts - 1 / common)
