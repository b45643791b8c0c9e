"""Parameters that no worker's backward has reached, marked by the sign of zeros, so that the gradient itself carries the mark.

torch's optimizers skip a parameter without a gradient: no momentum, no weight decay, no step counted. Here gradients are sent in
whole buckets. A worker without a gradient for a parameter sends -0.0 in each of its elements; a worker with a gradient makes sure
that the first element is not -0.0. A sum of zeros is -0.0 only if all of them are, in any order, and however it is averaged or
scaled on the way. So if the sum is -0.0, no worker had a gradient.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill_unreached(gradient: Tensor) -> Tensor:
    """Mark all elements as not reached by any backward. Returns ``gradient``."""
    return gradient.fill_(-0.0)


class _Bits:
    """Selected elements of flat gradients, as integers: that of -0.0 is the smallest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._complex = dtype.is_complex
        self._type = _INTEGERS[(dtype.to_real() if dtype.is_complex else dtype).itemsize]
        self.smallest = torch.iinfo(self._type).min

    def places(self, elements: Iterable[int]) -> Tensor:
        """The positions of the elements in the bucket; for a complex number, that of its first half."""
        return torch.tensor([element * 2 if self._complex else element for element in elements], dtype=torch.int64)

    def of(self, flat: Tensor) -> Tensor:
        """The same memory as integers."""
        return (torch.view_as_real(flat).view(-1) if self._complex else flat).view(self._type)


class Parts:
    """Parameters, or parts of them, that follow one another in flat gradients. (Outside host memory each call waits for the
    device.)"""

    def __init__(self, starts: Iterable[int], numel: int, dtype: torch.dtype) -> None:
        """``starts``: the start of each part, in ascending order; empty if gradients carry no marks."""
        self.starts = tuple(starts)
        self.stops = (*self.starts[1:], numel)
        self._bits = _Bits(dtype)
        # One without elements has no place for a mark, and begins where the next one does: it counts as not reached.
        filled = [start < stop for start, stop in zip(self.starts, self.stops, strict=True)] if self.starts else []
        self._marked = [number for number, some in enumerate(filled) if some]
        self._empty = [number for number, some in enumerate(filled) if not some]
        self._firsts = self._bits.places(self.starts[number] for number in self._marked)

    def say_reached(self, flat: Tensor, but: Sequence[int] = ()) -> None:
        """Mark all parts as reached, except those with the numbers in ``but``."""
        bits, firsts = self._bits.of(flat), self._firsts.to(flat.device)
        zeros = bits.index_select(0, firsts) == self._bits.smallest
        if but:
            zeros[[place for place, number in enumerate(self._marked) if number in but]] = False
        if bool(zeros.any()):
            bits[firsts[zeros]] = 0

    def unreached(self, flat: Tensor) -> list[int]:
        """The numbers of the parts that no worker's backward has reached."""
        if not self.starts:
            return []
        zeros = self._bits.of(flat).index_select(0, self._firsts.to(flat.device)) == self._bits.smallest
        # If gradients are rounded, a first element that is too small for its type may have become -0.0, but hardly all elements.
        found = [self._marked[place] for place in zeros.nonzero()[:, 0].tolist()]
        return sorted([*self._empty, *(number for number in found if self._is_unreached(flat, number))])

    def _is_unreached(self, flat: Tensor, number: int) -> bool:
        part = flat[self.starts[number] : self.stops[number]]
        return not bool(part.any()) if part.is_complex() else bool((self._bits.of(part) == self._bits.smallest).all())


class Cuts:
    """Where pieces divide parameters, so that the rest of a parameter has a first element of its own."""

    def __init__(self, starts: Sequence[int], cuts: Iterable[int], dtype: torch.dtype) -> None:
        """``starts``: the starts of the parameters; ``cuts``: the starts of pieces."""
        own = set(starts)
        within = [cut for cut in cuts if cut not in own]
        self._bits = _Bits(dtype)
        self._cuts = self._bits.places(within)
        self._owners = self._bits.places(starts[bisect_right(starts, cut) - 1] for cut in within)

    def say_reached(self, flat: Tensor) -> None:
        """Mark the rest of a parameter as reached if the parameter is."""
        if not len(self._cuts):
            return
        bits, smallest = self._bits.of(flat), self._bits.smallest
        zeros = (bits.index_select(0, self._cuts) == smallest) & (bits.index_select(0, self._owners) != smallest)
        if bool(zeros.any()):
            bits[self._cuts[zeros]] = 0
