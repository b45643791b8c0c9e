"""How an activation lies on a grid: which block of it each process holds. Pure algebra of shapes.

A column's processes share its samples, ``bounds(B, columns)[column]``, or each has its own share of them (samples over ``all``
processes, as batch parallelism has them). One other dimension may be divided over the rows: the features (or channels) after a
model-parallel layer, the height of an image between domain-parallel ones. What is not divided is whole on every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid

#: (start, stop).
Range: TypeAlias = tuple[int, int]
#: The range of each row, in order; together they are a whole dimension.
Divisions: TypeAlias = tuple[Range, ...]
#: The range of each dimension of a tensor.
Block: TypeAlias = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of an activation are. Shapes are those of the whole activation, all samples of the group's batch."""

    grid: Grid
    samples: Literal["columns", "all"] = "columns"
    """Samples over the columns, the same on all rows; or over all processes, a column's part split further over its rows."""
    divided: int | None = None
    """The dimension that is divided over the rows; negative numbers count from the last one."""
    divisions: Divisions = ()
    """How it is divided."""
    sample_dimension: int = 0

    def __post_init__(self) -> None:
        if self.divided is None:
            if self.divisions:
                raise UsageError("a placement with divisions must say which dimension they divide")
            return
        if self.samples == "all":
            raise UsageError("an activation whose samples are divided over all processes cannot be divided over rows as well")
        if self.divided == self.sample_dimension:
            raise UsageError(f"dimension {self.divided} has the samples, which columns divide and rows do not")
        check_divisions(self.divisions, self.grid.rows)

    @classmethod
    def over_rows(cls, grid: Grid, dimension: int, length: int, sample_dimension: int = 0) -> Placement:
        """``length`` elements of a dimension, divided as evenly as can be."""
        return cls(grid, "columns", dimension, bounds(length, grid.rows), sample_dimension)

    @property
    def copies(self) -> int:
        """How many processes hold the same block."""
        return self.grid.rows if self.samples == "columns" and self.divided is None else 1

    def samples_of(self, batch: int, rank: int) -> Range:
        """Which of ``batch`` samples a rank holds; maybe none."""
        row, column = self.grid.place(rank)
        start, stop = bounds(batch, self.grid.columns)[column]
        if self.samples == "columns":
            return start, stop
        first, last = bounds(stop - start, self.grid.rows)[row]
        return start + first, start + last

    def block(self, shape: Sequence[int], rank: int) -> Block:
        """What a rank holds of an activation of this shape."""
        self.check(shape)
        ranges = [(0, length) for length in shape]
        ranges[self.sample_dimension] = self.samples_of(shape[self.sample_dimension], rank)
        if self.divided is not None:
            ranges[self.divided] = self.divisions[self.grid.place(rank)[0]]
        return tuple(ranges)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        return lengths(self.block(shape, rank))

    def whole_shape(self, local: Sequence[int], batch: int) -> tuple[int, ...]:
        """The shape of the whole activation, of which a rank holds a part of shape ``local``."""
        shape = list(local)
        shape[self.sample_dimension] = batch
        if self.divided is not None:
            shape[self.divided] = self.divisions[-1][1]
        return tuple(shape)

    def check(self, shape: Sequence[int]) -> None:
        """Raise `UsageError` if an activation of this shape cannot lie so."""
        if self.divided is None:
            return
        if not -len(shape) <= self.divided < len(shape) or self.divided % len(shape) == self.sample_dimension:
            raise UsageError(f"an activation of shape {tuple(shape)} cannot be divided along its dimension {self.divided}")
        if self.divisions[-1][1] != shape[self.divided]:
            raise UsageError(
                f"dimension {self.divided} of shape {tuple(shape)} has {shape[self.divided]} elements, and the divisions "
                f"{self.divisions[-1][1]}"
            )

    def whole(self) -> Placement:
        """The same samples, with nothing divided over the rows."""
        return replace(self, divided=None, divisions=())

    def flattened(self, shape: Sequence[int], first: int = 1) -> Placement:
        """The placement after ``flatten(first)``.

        Raises `UsageError` where a block would not be one range of the flattened dimension: strips of an image with several
        channels must be brought together before.
        """
        self.check(shape)
        if self.sample_dimension >= first:
            raise UsageError(f"flattening from dimension {first} on would mix the samples of dimension {self.sample_dimension}")
        if self.divided is None:
            return self
        divided = self.divided % len(shape)
        if divided < first:
            return replace(self, divided=divided)
        if any(length != 1 for length in shape[first:divided]):
            raise UsageError(
                f"an activation of shape {tuple(shape)} divided along dimension {divided} cannot be flattened in parts: "
                "redistribute it first"
            )
        inner = math.prod(shape[divided + 1 :])
        return replace(self, divided=first, divisions=scaled(self.divisions, inner))


def check_divisions(divisions: Divisions, rows: int) -> None:
    """Raise `UsageError` unless there is a range for each row, one after the other from 0 on."""
    if len(divisions) != rows:
        raise UsageError(f"{len(divisions)} divisions for {rows} rows")
    end = 0
    for start, stop in divisions:
        if start != end or stop < start:
            raise UsageError(f"the divisions {divisions} do not follow one another from 0 on")
        end = stop


def scaled(divisions: Divisions, factor: int) -> Divisions:
    """Divisions of a dimension in which each element has become ``factor``."""
    return tuple((start * factor, stop * factor) for start, stop in divisions)


def lengths(block: Block) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(stop - start for start, stop in block)


def volume(block: Block) -> int:
    """Number of elements of a block."""
    return math.prod(lengths(block))


def common(one: Block, other: Block) -> Block | None:
    """The elements that are in both blocks; ``None`` where there are none."""
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(block: Block, outer: Block) -> tuple[slice, ...]:
    """Where a block lies in the tensor of one that contains it."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(block, outer, strict=True))
