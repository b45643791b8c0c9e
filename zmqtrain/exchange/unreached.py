"""Parameters that no worker's backward has reached, told by the sign of a zero: so the gradient itself says it, at no cost.

An optimizer of torch passes over a parameter without a gradient: no momentum, no weight decay, no step counted. Here gradients
travel in buckets, whole. A worker that has none for a parameter gives -0.0 in each of its elements; one that has some takes care
that the first element is not -0.0. A sum of zeros is -0.0 if all of them are, in any order, and however it is averaged or scaled on
the way: so where the sum is -0.0 no worker had a gradient, which can be read from the sum alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill_unreached(gradient: Tensor) -> Tensor:
    """Say of all elements that nothing has reached them. Returns ``gradient``."""
    return gradient.fill_(-0.0)


class _Bits:
    """Chosen elements of flat gradients, as integers: that of -0.0 is the smallest. All tensors are in host memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._complex = dtype.is_complex
        self._type = _INTEGERS[(dtype.to_real() if dtype.is_complex else dtype).itemsize]
        self.smallest = torch.iinfo(self._type).min

    def places(self, elements: Iterable[int]) -> Tensor:
        """Where the elements are in the bucket; for a complex number, its first half counts."""
        return torch.tensor([element * 2 if self._complex else element for element in elements], dtype=torch.int64)

    def of(self, flat: Tensor) -> Tensor:
        """The same memory."""
        return (torch.view_as_real(flat).view(-1) if self._complex else flat).view(self._type)


class Parts:
    """The parameters, or parts of them, that lie one after another in flat gradients in host memory."""

    def __init__(self, starts: Iterable[int], numel: int, dtype: torch.dtype) -> None:
        """``starts``: of each part, in ascending order; none where gradients say nothing of it."""
        self.starts = tuple(starts)
        self.stops = (*self.starts[1:], numel)
        self._bits = _Bits(dtype)
        self._firsts = self._bits.places(self.starts)

    def say_reached(self, flat: Tensor, but: Sequence[int] = ()) -> None:
        """All parts have a gradient, ``but`` some (their numbers)."""
        bits = self._bits.of(flat)
        zeros = bits.index_select(0, self._firsts) == self._bits.smallest
        if but:
            zeros[list(but)] = False
        if bool(zeros.any()):
            bits[self._firsts[zeros]] = 0

    def unreached(self, flat: Tensor) -> list[int]:
        """The numbers of the parts that no worker's backward has reached."""
        if not self.starts:
            return []
        zeros = self._bits.of(flat).index_select(0, self._firsts) == self._bits.smallest
        # Where gradients are rounded, a first element that is too small for its type may have become -0.0; hardly all of them.
        return [number for number in zeros.nonzero()[:, 0].tolist() if self._is_unreached(flat, number)]

    def _is_unreached(self, flat: Tensor, number: int) -> bool:
        part = flat[self.starts[number] : self.stops[number]]
        return not bool(part.any()) if part.is_complex() else bool((self._bits.of(part) == self._bits.smallest).all())


class Cuts:
    """Where parameters are cut in two, so that the rest of one has a first element of its own."""

    def __init__(self, starts: Sequence[int], cuts: Iterable[int], dtype: torch.dtype) -> None:
        """``starts``: of the parameters; ``cuts``: of pieces, wherever they begin."""
        within = [cut for cut in cuts if cut not in set(starts)]
        self._bits = _Bits(dtype)
        self._cuts = self._bits.places(within)
        self._owners = self._bits.places(starts[bisect_right(starts, cut) - 1] for cut in within)

    def say_reached(self, flat: Tensor) -> None:
        """The rest is reached where the parameter is."""
        if not len(self._cuts):
            return
        bits, smallest = self._bits.of(flat), self._bits.smallest
        zeros = (bits.index_select(0, self._cuts) == smallest) & (bits.index_select(0, self._owners) != smallest)
        if bool(zeros.any()):
            bits[self._cuts[zeros]] = 0
