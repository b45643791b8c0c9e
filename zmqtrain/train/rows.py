"""Parameters that are divided over the rows of a group's grid, as buckets must know it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zmqtrain.exchange.base import Rows
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.shard import Shard


def rows_of(name: str, shards: Mapping[str, Shard] | None) -> tuple[str, int]:
    """The grid over whose rows a parameter is divided, and the elements of the largest part; ``("", 0)`` where it is whole."""
    shard = None if shards is None else shards[name]
    if shard is None or shard.dimension is None:
        return "", 0
    return str(_grid(shard)), max(math.prod(shard.local_shape(row)) for row in range(len(shard.members)))


def rows_of_bucket(names: Sequence[str], shards: Mapping[str, Shard] | None) -> Rows | None:
    """What all parameters of a bucket have in common; ``None`` where they are whole."""
    shard = None if shards is None else shards[names[0]]
    if shards is None or shard is None or shard.dimension is None:
        return None
    grid = _grid(shard)
    return Rows(
        positions=tuple(grid.row(row * grid.columns) for row in range(grid.rows)),
        numels=tuple(sum(math.prod(shards[name].local_shape(row)) for name in names) for row in range(grid.rows)),
        own=shard.summed_over[0] // grid.columns,
    )


def share_of(shard: Shard, size: int) -> float:
    """By what the gradient of a parameter is multiplied before it is summed over all ``size`` workers of a group: where those of a
    column compute the same, each contributes its part of it. 1 for what is divided, and summed over its row alone."""
    return 1.0 if shard.dimension is not None else len(shard.summed_over) / size


def _grid(shard: Shard) -> Grid:
    return Grid(len(shard.members), len(shard.summed_over))
