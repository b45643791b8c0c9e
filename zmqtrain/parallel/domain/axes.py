"""Settings that layers have once for all axes of an image, or for each: the first is that of dimension 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from zmqtrain.parallel.geometry import Range

#: The first dimension of an image that is not samples or channels.
FIRST = 2


def each(value: float | Sequence[float] | None, axes: int) -> tuple[int, ...]:
    """A setting for each axis."""
    return (value,) * axes if isinstance(value, int) else tuple(value)  # type: ignore[arg-type]


def pad(tensor: Tensor, rows: Mapping[int, tuple[int, int]], value: float = 0.0) -> Tensor:
    """Rows before and after, by dimension; negative numbers cut off."""
    if all(ends == (0, 0) for ends in rows.values()):
        return tensor
    ends = [rows.get(dim, (0, 0)) for dim in range(tensor.dim() - 1, FIRST - 1, -1)]
    return functional.pad(tensor, [number for pair in ends for number in pair], value=value)


def along(vector: Tensor, dim: int, dimensions: int) -> Tensor:
    """A vector as a factor of the rows of an image with so many dimensions."""
    return vector.reshape([-1 if number == dim else 1 for number in range(dimensions)])


def lengths(outputs: Mapping[int, Range]) -> dict[int, int]:
    """How many rows of each dimension."""
    return {dim: stop - start for dim, (start, stop) in outputs.items()}
