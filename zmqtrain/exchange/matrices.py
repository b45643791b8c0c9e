"""Where the matrices lie in flat buckets, and in parts of them: what PowerSGD compresses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from zmqtrain.errors import UsageError
from zmqtrain.exchange.base import Bucket
from zmqtrain.wire.compress import Matrix, shrinks


def matrices_of(bucket: Bucket, start: int = 0, stop: int | None = None) -> tuple[Matrix, ...]:
    """The matrices among elements ``start`` to ``stop`` of the bucket. Raises `UsageError` if nobody knows them."""
    if not bucket.shapes:
        raise UsageError(
            '[exchange] compression = "powersgd" divides matrices into factors, but a profile has only the sizes of layers: set '
            '[job] task and [simulation] payload = "real", or choose another compression'
        )
    if not shrinks("powersgd", bucket.gradients.dtype):
        return ()
    return matrices_in(bucket.shapes, start, bucket.parameters.numel if stop is None else stop)


def matrices_in(shapes: Sequence[Sequence[int]], start: int, stop: int) -> tuple[Matrix, ...]:
    """The matrices among elements ``start`` to ``stop`` of parameters with these ``shapes``, which lie one after another; they are
    placed from ``start`` on.

    A parameter is the matrix of its first dimension by all others. Of one that is cut, the rows that are there whole are a matrix.
    Vectors are none."""
    found, first = [], 0
    for shape in shapes:
        numel, columns = prod(shape), prod(shape[1:])
        if len(shape) > 1 and numel:
            begin = -(-max(0, start - first) // columns)
            end = max(0, min(stop - first, numel)) // columns
            if begin < end:
                found.append(Matrix(first + begin * columns - start, end - begin, columns))
        first += numel
    return tuple(found)
