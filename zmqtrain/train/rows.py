"""How buckets describe parameters that are divided over the rows of a group's grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from zmqtrain.exchange.base import Rows
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.shard import Shard


def rows_of(name: str, shards: Mapping[str, Shard] | None) -> tuple[str, int]:
    """The grid over whose rows a parameter is divided, and the elements of the largest part; ``("", 0)`` if it is whole."""
    shard = None if shards is None else shards[name]
    if shard is None or shard.dimension is None:
        return "", 0
    return str(_grid(shard)), max(math.prod(shard.local_shape(row)) for row in range(len(shard.members)))


def rows_of_bucket(names: Sequence[str], shards: Mapping[str, Shard] | None) -> Rows | None:
    """What all parameters of a bucket have in common; ``None`` if they are whole."""
    shard = None if shards is None else shards[names[0]]
    if shards is None or shard is None or shard.dimension is None:
        return None
    grid = _grid(shard)
    parts = [[math.prod(shards[name].local_shape(row)) for name in names] for row in range(grid.rows)]
    return Rows(
        positions=tuple(grid.row(grid.rank(row, 0)) for row in range(grid.rows)),
        numels=tuple(map(sum, parts)),
        own=grid.place(shard.summed_over[0])[0],
        starts=tuple(
            tuple(start for start, numel in zip(accumulate(numels, initial=0), numels, strict=False) if numel) for numels in parts
        ),
    )


def _grid(shard: Shard) -> Grid:
    return Grid(len(shard.members), len(shard.summed_over))
