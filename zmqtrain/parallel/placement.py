"""How an activation lies on a grid: which block of it each process holds. Pure algebra of shapes.

A column's processes share its samples, ``bounds(B, columns)[column]``, or each has its own share of them (samples over ``all``
processes, as batch parallelism has them). One other dimension may be divided over the rows: the features (or channels) after a
model-parallel layer, the height of an image between domain-parallel ones. Of an image the width may be divided as well: then rows
stand for the strips of a grid. What is not divided is whole on every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid

#: (start, stop).
Range: TypeAlias = tuple[int, int]
#: The range of each row, in order; together they are a whole dimension.
Divisions: TypeAlias = tuple[Range, ...]
#: The range of each dimension of a tensor.
Block: TypeAlias = tuple[Range, ...]
#: The processes whose tensors are summands of the whole one: none, this one's row, its column, or all of the grid.
Summands: TypeAlias = Literal["none", "row", "column", "all"]


R = TypeVar("R")
P = ParamSpec("P")
#: Of a function's results: models have some dozens of placements and shapes. What changes with every step must not pile up.
_MOST_REMEMBERED = 4096


def remembered(function: Callable[Concatenate[Placement, P], R]) -> Callable[Concatenate[Placement, P], R]:
    """A pure function of a placement and other things, computed once for each.

    The same placement is the same object: that is faster to see than what is in it, and equal ones may differ in ``origin``.
    """
    found: dict[Any, tuple[Placement, R]] = {}

    def run(placement: Placement, /, *rest: P.args, **_: P.kwargs) -> R:
        key = (id(placement), *rest)  # an object that is kept below shares its id with no other
        known = found.get(key)
        if known is None:
            if len(found) >= _MOST_REMEMBERED:
                found.clear()
            known = found[key] = placement, function(placement, *rest)  # type: ignore[call-arg]
        return known[1]

    run.__doc__ = function.__doc__
    return run


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
    sample_dimension: int | None = 0
    """``None``: it has no samples, or all of them on every process."""
    sample_unit: int = 1
    """How much of that dimension a sample is: more than 1 where samples and time, say, have become one dimension."""
    summands: Summands = "none"
    """Of which processes the tensors are to be added up: the gradient of a weight, of which each has that of its samples."""
    origin: str = field(default="", compare=False)
    """The model-parallel layer that has left it divided; a message that gathers it is that layer's."""
    across: int | None = None
    """A second dimension that is divided: row ``i x len(across_divisions) + j`` has range i of the first one, and range j of it."""
    across_divisions: Divisions = ()

    def __post_init__(self) -> None:
        if self.divided is None:
            if self.divisions or self.across is not None:
                raise UsageError("a placement with divisions must say which dimension they divide")
            return
        if self.samples == "all":
            raise UsageError("an activation whose samples are divided over all processes cannot be divided over rows as well")
        if self.divided == self.sample_dimension:
            raise UsageError(
                f"dimension {self.divided} has the samples, which columns divide and rows do not: they must be the first "
                "dimension of all that a divided model is given"
            )
        if self.across is None:
            check_divisions(self.divisions, self.grid.rows)
            return
        if self.across in (self.divided, self.sample_dimension):
            raise UsageError(f"dimension {self.across} cannot be divided twice")
        check_divisions(self.divisions, len(self.divisions))
        check_divisions(self.across_divisions, len(self.across_divisions))
        if len(self.divisions) * len(self.across_divisions) != self.grid.rows:
            raise UsageError(f"{len(self.divisions)} x {len(self.across_divisions)} divisions for {self.grid.rows} rows")

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
        if self.sample_dimension is None:
            return 0, batch
        unit = self.sample_unit
        start, stop = bounds(batch // unit, self.grid.columns)[column]
        if self.samples == "all":
            first, last = bounds(stop - start, self.grid.rows)[row]
            start, stop = start + first, start + last
        return start * unit, stop * unit

    def block(self, shape: Sequence[int], rank: int) -> Block:
        """What a rank holds of an activation of this shape."""
        return _block(self, tuple(shape), rank)

    def ranges(self, row: int) -> dict[int, Range]:
        """The range of each divided dimension that a row of the grid has."""
        if self.divided is None:
            return {}
        if self.across is None:
            return {self.divided: self.divisions[row]}
        first, second = divmod(row, len(self.across_divisions))
        return {self.divided: self.divisions[first], self.across: self.across_divisions[second]}

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        return _local_shape(self, tuple(shape), rank)

    def whole_shape(self, local: Sequence[int], batch: int) -> tuple[int, ...]:
        """The shape of the whole activation, of which a rank holds a part of shape ``local``."""
        shape = list(local)
        if self.sample_dimension is not None:
            shape[self.sample_dimension] = batch
        if self.divided is not None:
            shape[self.divided] = self.divisions[-1][1]
        if self.across is not None:
            shape[self.across] = self.across_divisions[-1][1]
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
        if self.across is not None and (self.across >= len(shape) or self.across_divisions[-1][1] != shape[self.across]):
            raise UsageError(f"an activation of shape {tuple(shape)} cannot be divided along its dimension {self.across}")

    def whole(self) -> Placement:
        """The same samples, with nothing divided over the rows."""
        return undivided(self)

    def along(self, dimension: int, length: int) -> Placement:
        """The same samples, and this dimension of ``length`` elements, alone, divided over the rows."""
        return _along(self, dimension, length)


@lru_cache(maxsize=_MOST_REMEMBERED)
def laid(
    grid: Grid,
    samples: Literal["columns", "all"] = "columns",
    divided: int | None = None,
    divisions: Divisions = (),
    sample_dimension: int | None = 0,
    sample_unit: int = 1,
    summands: Summands = "none",
    *,
    across: int | None = None,
    across_divisions: Divisions = (),
) -> Placement:
    """`Placement`, the same object each time."""
    return Placement(grid, samples, divided, divisions, sample_dimension, sample_unit, summands, "", across, across_divisions)


def changed(placement: Placement, **changes: Any) -> Placement:
    """`dataclasses.replace`, with the same object for the same changes of the same placement."""
    return _changed(placement, *changes.items())


@remembered
def _changed(placement: Placement, *changes: tuple[str, Any]) -> Placement:
    found = replace(placement, **dict(changes))
    return placement if (found, found.origin) == (placement, placement.origin) else found


@remembered
def settled(placement: Placement) -> Placement:
    """The placement once summands have been added up."""
    return replace(placement, summands="none")


@remembered
def undivided(placement: Placement) -> Placement:
    """The placement with nothing divided over the rows."""
    return replace(placement, divided=None, divisions=(), origin="", across=None, across_divisions=())


@remembered
def _along(placement: Placement, dimension: int, length: int) -> Placement:
    return replace(undivided(placement), divided=dimension, divisions=bounds(length, placement.grid.rows))


@remembered
def sampleless(placement: Placement) -> Placement:
    """The placement with all samples on all processes."""
    return replace(placement, samples="columns", sample_dimension=None, sample_unit=1)


@remembered
def _block(placement: Placement, shape: tuple[int, ...], rank: int) -> Block:
    placement.check(shape)
    ranges = [(0, length) for length in shape]
    if placement.sample_dimension is not None:
        ranges[placement.sample_dimension] = placement.samples_of(shape[placement.sample_dimension], rank)
    for dimension, found in placement.ranges(placement.grid.place(rank)[0]).items():
        ranges[dimension] = found
    return tuple(ranges)


@remembered
def _local_shape(placement: Placement, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return lengths(_block(placement, shape, rank))


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
