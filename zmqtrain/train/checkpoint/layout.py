"""Which elements of which parameters lie where in a replica's buckets, so that what a checkpoint keeps bucket by bucket (servers'
pieces, an exchange's own state) can be taken apart and put together again for another grid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zmqtrain.errors import CheckpointError
from zmqtrain.parallel.shard import Shard
from zmqtrain.train.replica import TorchReplica
from zmqtrain.wire.payload import Value

#: Of one parameter: its shape, the dimension that is divided, each row's ranges of it, and the order in which its dimensions lie in
#: memory.
_Row = tuple[tuple[int, ...], int | None, tuple[tuple[tuple[int, int], ...], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The buckets of a compute group's workers."""

    parameters: Mapping[str, _Row]
    buckets: tuple[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]], ...]
    """Each bucket's names, and for each row the positions of its workers in their group; no rows if all of them have the same."""
    group_size: int
    _last: dict[tuple[int, int], list[tuple[str, Tensor]]] = field(default_factory=dict, compare=False, repr=False)
    """The last `places`, of a row of a bucket: a bucket has many pieces, and its places take twice its memory."""

    @classmethod
    def of(cls, replica: TorchReplica, shards: Mapping[str, Shard], group_size: int) -> Layout:
        """Of a replica, whose parameters may be parts as ``shards`` says."""
        parameters: dict[str, _Row] = {}
        for name, parameter in replica.named.items():
            shard, strides = shards.get(name), parameter.stride()
            order = tuple(sorted(range(parameter.dim()), key=lambda dimension: -strides[dimension]))
            divided = shard is not None and shard.dimension is not None
            parameters[name] = (
                tuple(parameter.shape if shard is None else shard.shape),
                shard.dimension if shard is not None else None,
                tuple(tuple((start, stop) for start, stop in row) for row in shard.pieces) if shard is not None and divided else (),
                order,
            )
        buckets = tuple((bucket.names, () if bucket.rows is None else bucket.rows.positions) for bucket in replica.buckets)
        return cls(parameters, buckets, group_size)

    def to_value(self) -> Value:
        """Encode the layout as plain values."""
        parameters = {
            name: [list(shape), dimension, [[list(each) for each in row] for row in pieces], list(order)]
            for name, (shape, dimension, pieces, order) in self.parameters.items()
        }
        buckets = [[list(names), [list(row) for row in rows]] for names, rows in self.buckets]
        return {"parameters": parameters, "buckets": buckets, "group_size": self.group_size}  # type: ignore[dict-item]

    @classmethod
    def from_value(cls, value: Any) -> Layout:
        """Raises `TypeError`, `ValueError` and `KeyError` for anything but a result of `to_value`."""
        parameters: dict[str, _Row] = {}
        for name, (shape, dimension, pieces, order) in dict(value["parameters"]).items():
            rows = tuple(tuple((int(start), int(stop)) for start, stop in row) for row in pieces)
            parameters[str(name)] = (
                tuple(map(int, shape)),
                None if dimension is None else int(dimension),
                rows,
                tuple(map(int, order)),
            )
        buckets = tuple((tuple(map(str, names)), tuple(tuple(map(int, row)) for row in rows)) for names, rows in value["buckets"])
        return cls(parameters, buckets, int(value["group_size"]))

    def row_of(self, bucket: int, position: int) -> int:
        """The row of the bucket that a worker has."""
        _, rows = self.buckets[bucket]
        return next((row for row, positions in enumerate(rows) if position in positions), 0)

    def sharers(self, bucket: int, row: int) -> tuple[int, ...]:
        """The positions of the workers that have a row of the bucket."""
        _, rows = self.buckets[bucket]
        return rows[row] if rows else tuple(range(self.group_size))

    def places(self, bucket: int, row: int) -> list[tuple[str, Tensor]]:
        """The bucket's parameters on a row, in the order in which they lie in it, each with the places of its elements in the whole
        parameter (one dimension, int64)."""
        if (bucket, row) not in self._last:
            self._last.clear()
            self._last[bucket, row] = [(name, self._elements(name, row)) for name in self.buckets[bucket][0]]
        return self._last[bucket, row]

    def numel(self, bucket: int, row: int) -> int:
        """The bucket's elements on a row."""
        return sum(places.numel() for _, places in self.places(bucket, row))

    def _elements(self, name: str, row: int) -> Tensor:
        shape, dimension, pieces, order = self.parameters[name]
        every = torch.arange(math.prod(shape)).view(shape)
        if dimension is not None:
            every = torch.cat([every.narrow(dimension, start, stop - start) for start, stop in pieces[row]], dimension)
        return every.permute(order).reshape(-1)


@dataclass(slots=True)
class Wholes:
    """Values kept for elements of parameters, put together from ranges of one layout's buckets, and cut for another's."""

    _elements: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))  # kind -> parameter -> flat values
    _scalars: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def put(self, layout: Layout, bucket: int, row: int, start: int, kind: str, values: Tensor) -> None:
        """Elements ``start`` and following of a row of a bucket have these ``values`` (one dimension). Raises `CheckpointError`."""
        stop = start + values.numel()
        if not 0 <= start <= stop <= layout.numel(bucket, row):
            raise CheckpointError(
                f"the checkpoint has {stop} elements of bucket {bucket}, which has fewer: use an earlier checkpoint"
            )
        for name, places, first, last in _within(layout, bucket, row, start, stop):
            whole = self._elements[kind].get(name)
            if whole is None:
                numel = math.prod(layout.parameters[name][0])
                whole = self._elements[kind][name] = values.new_zeros(numel)
            whole[places] = values[first:last]

    def put_scalar(self, name: str, kind: str, value: Tensor) -> None:
        """The parameter has one ``value``, such as a number of steps."""
        self._scalars[kind].setdefault(name, value)

    @staticmethod
    def spans(layout: Layout, bucket: int, row: int, start: int, stop: int) -> list[tuple[str, int]]:
        """The parameters of which a range of a bucket has elements, and where these begin in the range."""
        return [(name, first) for name, _, first, _ in _within(layout, bucket, row, start, stop)]

    def take(self, layout: Layout, bucket: int, row: int, start: int, stop: int, kind: str) -> list[Tensor | None]:
        """The values of elements ``start`` to ``stop`` of a row of a bucket, by parameter; ``None`` for one that has none."""
        kept = self._elements.get(kind, {})
        return [
            kept[name][places] if name in kept else self._scalars.get(kind, {}).get(name)
            for name, places, *_ in _within(layout, bucket, row, start, stop)
        ]

    @property
    def kinds(self) -> list[str]:
        return sorted(self._elements.keys() | self._scalars.keys())


def _within(layout: Layout, bucket: int, row: int, start: int, stop: int) -> Iterator[tuple[str, Tensor, int, int]]:
    """Each parameter in a range: the places of its elements in the whole, and where they begin and end in the range."""
    places = layout.places(bucket, row)
    for (name, own), offset in zip(places, _offsets([each.numel() for _, each in places]), strict=True):
        first, last = max(start, offset), min(stop, offset + own.numel())
        if first < last:
            yield name, own[first - offset : last - offset], first - start, last - start


def _offsets(numels: Sequence[int]) -> list[int]:
    return list(accumulate(numels, initial=0))[:-1]
