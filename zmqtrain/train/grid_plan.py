"""Who trains on which grid after workers were lost or have come. Pure.

A grid of Pr rows goes on with as many columns as there are workers for, and with no more than the job's; or, if the job names
others, with the grid that needs the most of those that are there. The others are spares. While the rows stay, each worker stays in
its row if there is a place, so that only those move of whom a row has too many, or who come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.data.slots import Life
from zmqtrain.net.endpoint import PeerId


@dataclass(frozen=True, slots=True)
class Shapes:
    """The grids that a run may have."""

    rows: int
    columns: int
    """The job's, of which there may be fewer."""
    others: tuple[tuple[int, int], ...] = ()
    """Rows and columns of smaller grids, of which the first one of a size is preferred."""

    def largest(self, workers: int) -> tuple[int, int] | None:
        """Rows and columns of the grid with the most of so many workers; ``None`` if they are too few for any."""
        own = self.rows, min(self.columns, workers // self.rows)
        able = [shape for shape in (*self.others, own) if 0 < shape[0] * shape[1] <= workers]
        return max(able, key=lambda shape: shape[0] * shape[1], default=None)


@dataclass(frozen=True, slots=True)
class Era:
    """A stretch of a run in which the same workers train on the same grid."""

    number: int
    rows: int
    workers: tuple[Life, ...]
    """By their positions in the group: column after column."""

    @property
    def columns(self) -> int:
        return len(self.workers) // self.rows

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer, _ in self.workers)

    def row(self, row: int) -> tuple[Life, ...]:
        """The workers that have this row's part of the model, by column."""
        return self.workers[row :: self.rows]

    def holders(self, row: int, order: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """The names of those of a row, in this order."""
        there = {peer for peer, _ in self.row(row)}
        return tuple(peer for peer in order if peer in there)

    def lost(self, living: Mapping[PeerId, int]) -> tuple[PeerId, ...]:
        """Its workers that are not there any more."""
        return tuple(peer for peer, process in self.workers if living.get(peer) != process)


@dataclass(frozen=True, slots=True)
class Standing:
    """What all workers that are there know of the newest era."""

    number: int
    """-1: none has begun."""
    columns: int
    holders: tuple[tuple[PeerId, ...], ...]
    """For each row, those of its workers that are still there, by rank."""
    begun: int = -1
    """The newest step that may have begun anywhere."""
    ended: bool = False
    """Whether its workers have ended it, and form the next one."""

    @property
    def broken(self) -> bool:
        """Whether it cannot go on."""
        return self.number < 0 or sum(map(len, self.holders)) < self.columns * len(self.holders)

    @property
    def over(self) -> bool:
        """Whether another era is to follow at once."""
        return self.ended or self.broken

    def grows(self, workers: int, shapes: Shapes) -> bool:
        """Whether so many ``workers`` can form a larger grid."""
        rows, columns = shapes.largest(workers) or (0, 0)
        return rows * columns > len(self.holders) * self.columns

    @property
    def gone(self) -> tuple[int, ...]:
        """The rows whose part of the model nobody has any more."""
        return tuple(row for row, there in enumerate(self.holders) if not there) if self.number >= 0 else ()

    @property
    def givers(self) -> tuple[PeerId, ...]:
        """One worker of each row, which together have the model; none if no era has begun."""
        return tuple(there[0] for there in self.holders) if self.number >= 0 else ()


def next_era(standing: Standing, living: Mapping[PeerId, int], shapes: Shapes) -> Era | None:
    """The era that follows, of those that are ``living`` (by rank); ``None`` if they are too few for any grid."""
    shape = shapes.largest(len(living))
    if shape is None:
        return None
    rows, columns = shape
    kept = standing.holders if rows == len(standing.holders) else ((),) * rows  # otherwise there are no such rows any more
    seats = [list(there[:columns]) for there in kept]
    seated = {peer for row in seats for peer in row}
    others = iter([peer for peer in living if peer not in seated])
    for row in _by_need(seats, columns):
        seats[row].append(next(others))
    workers = tuple((seats[row][column], living[seats[row][column]]) for column in range(columns) for row in range(rows))
    return Era(standing.number + 1, rows, workers)


def _by_need(seats: Sequence[Sequence[PeerId]], columns: int) -> list[int]:
    """The row of each empty seat: column after column."""
    return [row for column in range(columns) for row, there in enumerate(seats) if column >= len(there)]
