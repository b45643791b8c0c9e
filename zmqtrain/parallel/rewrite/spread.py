"""An activation of a divided model: this process's part of it, and how the whole lies on the grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.dropout import Batch
from zmqtrain.parallel.model.parts import gather
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.placement import Divisions, Placement
from zmqtrain.parallel.redistribute import redistribute

#: The dimension that domain-parallel layers divide.
HEIGHT = 2


@dataclass(frozen=True, slots=True)
class Spread:
    """What flows between the layers of a divided model."""

    local: Tensor
    placement: Placement
    origin: Site | None = None
    """The model-parallel layer that has left it divided; the all-gather is that layer's."""

    @property
    def divided(self) -> int | None:
        """The dimension that is divided over the rows, counted from the first."""
        divided = self.placement.divided
        return None if divided is None else divided % self.local.dim()

    def with_local(self, local: Tensor) -> Spread:
        """The same place for what was computed of it, element by element."""
        return replace(self, local=local)


class Mover:
    """Brings activations where layers need them."""

    def __init__(self, fabric: Fabric, batch: Batch) -> None:
        self.fabric, self.batch = fabric, batch

    def shape(self, value: Spread) -> tuple[int, ...]:
        """Of the whole activation, with the samples of the whole batch."""
        return value.placement.whole_shape(tuple(value.local.shape), self.batch.size)

    def to(self, value: Spread, target: Placement, layer: str) -> Spread:
        """The same activation in another placement; ``layer`` needs it so."""
        if value.placement == target:
            return value
        if value.divided is not None and target == value.placement.whole() and value.origin is not None:
            divisions = value.placement.divisions
            return Spread(gather(value.local, value.divided, divisions, value.origin), target)
        local = redistribute(value.local, value.placement, target, self.shape(value), self.fabric, layer)
        return Spread(local, target)

    def whole(self, value: Spread, layer: str, grid: Grid | None = None) -> Spread:
        """Whole on each column, of ``grid`` if another one."""
        return self.to(value, Placement(grid or value.placement.grid, sample_dimension=value.placement.sample_dimension), layer)

    def on_all(self, value: Spread, grid: Grid, layer: str) -> Spread:
        """Samples over all processes."""
        return self.to(value, Placement(grid, "all", sample_dimension=value.placement.sample_dimension), layer)

    def over_rows(self, value: Spread, grid: Grid, dimension: int, divisions: Divisions, layer: str) -> Spread:
        """One dimension over the rows."""
        return self.to(value, Placement(grid, "columns", dimension, divisions, value.placement.sample_dimension), layer)
