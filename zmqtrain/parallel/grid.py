"""The Pr x Pc grid of a compute group: which processes share weights, and which share samples."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zmqtrain.errors import UsageError

_GRID = re.compile(r"(\d{1,5})x(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Grid:
    """P = ``rows`` x ``columns`` processes. Pr = ``rows`` divides a layer's model or domain, Pc = ``columns`` the batch.

    Rank r is the process in row ``r % rows`` and column ``r // rows``: a column's processes are neighbours. So what rank r has of
    the samples contains the place ``r / P`` of the batch, on every grid, and little has to move from one grid to another. The
    processes of a *row* have the same part of the weights and different samples: they sum weight gradients. Those of a *column*
    have the same samples and different parts of the weights (or of the image): they gather activations and sum their gradients.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise UsageError(f"the grid {self.rows}x{self.columns} has no processes: both numbers must be at least 1")

    @classmethod
    def parse(cls, text: str) -> Grid:
        """The grid in a text like ``2x4`` (Pr x Pc). Raises `UsageError`."""
        match = _GRID.fullmatch(text)
        if match is None:
            raise UsageError(f'{text!r} is no grid: write "PRxPC", like "2x4"')
        return cls(int(match[1]), int(match[2]))

    @property
    def size(self) -> int:
        """The number of processes: rows times columns."""
        return self.rows * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"

    def place(self, rank: int) -> tuple[int, int]:
        """(row, column) of a rank."""
        column, row = divmod(rank, self.rows)
        return row, column

    def rank(self, row: int, column: int) -> int:
        """The rank at a place."""
        return column * self.rows + row

    def row(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's row, which share its part of the weights; in order of their columns."""
        return tuple(range(rank % self.rows, self.size, self.rows))

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's column, which share its samples; in order of their rows."""
        first = rank - rank % self.rows
        return tuple(range(first, first + self.rows))
