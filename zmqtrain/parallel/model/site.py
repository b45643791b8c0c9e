"""Where a layer is divided: its name, its grid, and this process's connections."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Communicator, Fabric, Label, Phase, Term
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placement import Divisions


@dataclass(frozen=True, slots=True)
class Site:
    """One process's view of the grid that a layer is divided over."""

    layer: str
    """The module's name in the model, like ``classifier.1``."""
    grid: Grid
    fabric: Fabric

    def __post_init__(self) -> None:
        if self.grid.size != self.fabric.size:
            raise UsageError(
                f"layer {self.layer}: the grid {self.grid} has {self.grid.size} processes, the group {self.fabric.size}"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Site:
        """A copy of a layer has the same connections."""
        return self

    @property
    def rank(self) -> int:
        return self.fabric.rank

    @property
    def rows(self) -> int:
        return self.grid.rows

    @property
    def row(self) -> int:
        """The row that this process is in."""
        return self.grid.place(self.rank)[0]

    @property
    def column_group(self) -> Communicator:
        """The processes that share this one's samples; its members are in the order of rows."""
        return self.fabric.among(self.grid.column(self.rank))

    def label(self, term: Term, phase: Phase = "forward") -> Label:
        """The label of this layer's messages for a term of its arithmetic, in a phase."""
        return Label(self.layer, term, phase)

    def child(self, name: str) -> Site:
        """The site of a module within this one."""
        return replace(self, layer=f"{self.layer}.{name}" if self.layer else name)

    def divide(self, count: int, what: str) -> Divisions:
        """``count`` things over the rows, as evenly as can be. Raises `UsageError` where a row would have none."""
        if count < self.rows:
            raise UsageError(f"layer {self.layer} has {count} {what}, which cannot be divided over {self.rows} rows")
        return bounds(count, self.rows)
