"""How one layer is divided, and which part of the activations a process then holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Choice

Array: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placed:
    """A choice on a grid. ``batch`` is written with the grid 1xP, its meaning, and so is every other choice on a grid with one
    row."""

    choice: Choice
    grid: Grid
    wide: int = 1
    """Of ``domain``: into how many parts the width of an image is divided."""

    @classmethod
    def of(cls, choice: Choice, grid: Grid, wide: int = 1) -> Placed:
        """The canonical form: every choice on a grid with one row is batch parallelism."""
        if choice == "batch" or grid.rows == 1:
            return cls("batch", Grid(1, grid.size))
        return cls(choice, grid, wide if choice == "domain" else 1)

    @property
    def samples(self) -> int:
        """The number of parts into which the batch is divided: Pc."""
        return self.grid.columns

    @property
    def strips(self) -> int:
        """The number of strips into which each image is divided."""
        return self.grid.rows if self.choice == "domain" else 1

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts the height and the width of each image are divided."""
        return self.strips // self.wide, self.wide

    @property
    def strips_text(self) -> str:
        """The strips in the form of a plan: ``height``, ``width`` or ``ROWSxCOLUMNS``."""
        tall, wide = self.parts
        return "height" if wide == 1 else "width" if tall == 1 else f"{tall}x{wide}"

    def needs(self) -> Lie:
        """How its input must be divided."""
        return Lie(self.samples, 1, *self.parts)

    def leaves(self, *, channels: bool, strips: bool) -> Lie:
        """How its output is divided. ``channels``: the layer leaves channels divided if model-parallel; ``strips``: strips if
        domain-parallel."""
        divided = self.grid.rows if channels and self.choice == "model" else 1
        return Lie(self.samples, divided, *(self.parts if strips else (1, 1)))

    def __str__(self) -> str:
        if self.choice == "batch":
            return "batch"
        return f"{self.choice} {self.grid}" + ("" if self.wide == 1 else f" by {self.strips_text}")


@dataclass(frozen=True, slots=True)
class Lie:
    """How activations are divided: into how many parts of their samples, channels, rows and columns."""

    samples: int
    channels: int = 1
    strips: int = 1
    wide: int = 1

    def grid(self, size: int) -> Grid:
        """On which grid of ``size`` processes that is."""
        return Grid(size // self.samples, self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class Lies:
    """Several of them, for all pairs with others at once. `of` returns the same ones for the same divisions; others differ."""

    samples: Integers
    channels: Integers
    strips: Integers
    wide: Integers

    @classmethod
    def of(cls, lies: Sequence[Lie], dimension: int) -> Lies:
        """Along the first (0) or second (1) dimension of a table of pairs. The arrays are read-only."""
        return _lies(tuple(lies), dimension)

    def each(self) -> list[Lie]:
        """One by one."""
        numbers = (self.samples, self.channels, self.strips, self.wide)
        return [Lie(*found) for found in zip(*(each.reshape(-1).tolist() for each in numbers), strict=True)]


@lru_cache(maxsize=1024)  # the price of a plan asks for one at a time, and always for the same few
def _lies(lies: tuple[Lie, ...], dimension: int) -> Lies:
    numbers = np.array([(lie.samples, lie.channels, lie.strips, lie.wide) for lie in lies], np.int64).reshape(-1, 4).T
    numbers.flags.writeable = False  # all callers get the same
    return Lies(*(row[np.newaxis] if dimension else row[:, np.newaxis] for row in numbers))


def lacking(held: Lies, needed: Lies) -> tuple[Integers, Array]:
    """What a process lacks if it holds its part of one division of the activations and needs its part of another.

    All parts are contiguous, and rank r is in column r div Pr and row r mod Pr (`zmqtrain.parallel.grid`). So a process has at
    least one part of what it needs in the least common multiple of both divisions: Eq. 6 is the case from batch to pure model,
    (P-1)/P of all activations, from P processes. Only where rows divide the same dimension in both, into other numbers of parts,
    has some process nothing of what it needs.

    Returns the messages that a process receives, and their size as a share of the whole batch's activations: those of the process
    that lacks most. Between strips of which neither kind contains the other (2 and 3 of them) there may be a message fewer.
    Both are read-only.
    """
    return _of_one_pair(held, needed) if held.samples.size == needed.samples.size == 1 else _lacking(held, needed)


@lru_cache(maxsize=4096)  # prices ask again and again for the same few pairs, and planners once for tables of many
def _of_one_pair(held: Lies, needed: Lies) -> tuple[Integers, Array]:
    return _lacking(held, needed)


def _lacking(held: Lies, needed: Lies) -> tuple[Integers, Array]:
    pieces = _meeting(held.samples, needed.samples) * _meeting(held.channels, needed.channels)
    pieces = pieces * _meeting(held.strips, needed.strips) * _meeting(held.wide, needed.wide)
    parts = needed.samples * needed.channels * needed.strips * needed.wide
    common = np.lcm(held.samples, needed.samples)
    common = common * np.lcm(held.channels, needed.channels) * np.lcm(held.strips, needed.strips) * np.lcm(held.wide, needed.wide)
    # Of strips of height and width, row r mod Pr has the height r mod Pr div W and the width r mod W.
    rows_differ = held.strips * held.wide != needed.strips * needed.wide
    apart = _both_divide(held.channels, needed.channels) | _both_divide(held.wide, needed.wide)
    apart |= (held.strips > 1) & (needed.strips > 1) & rows_differ
    messages, share = np.where(apart, pieces, pieces - 1), 1 / parts - np.where(apart, 0, 1 / common)
    messages.flags.writeable = share.flags.writeable = False  # other callers get the same
    return messages, share


def _meeting(held: Integers, needed: Integers) -> Integers:
    """How many of the contiguous parts of one division meet one part of another: the most."""
    both = np.gcd(held, needed)
    held, needed = held // both, needed // both
    return np.where(needed == 1, held, np.where(held == 1, 1, (held - 2) // needed + 2))


def _both_divide(held: Integers, needed: Integers) -> NDArray[np.bool_]:
    """Where both divide a dimension, into different numbers of parts."""
    found: NDArray[np.bool_] = (np.minimum(held, needed) > 1) & (held != needed)
    return found
