"""Settings that layers have once for both axes of an image, or for each: 0 is the height, 1 the width."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    """A setting for height and width."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def pad(tensor: Tensor, axis: int, rows: tuple[int, int], value: float = 0.0) -> Tensor:
    """Rows before and after, along an axis; negative numbers cut off."""
    if rows == (0, 0):
        return tensor
    return functional.pad(tensor, (0, 0, *rows) if axis == 0 else rows, value=value)


def sizes(axis: int, along: int, other: int) -> tuple[int, int]:
    """(height, width) of an image that has this size along the axis."""
    return (along, other) if axis == 0 else (other, along)
