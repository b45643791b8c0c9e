"""A few numbers in place of a large tensor, by which two processes find out whether theirs are equal.

Of each row all elements are added up with random weights, the same for all. If a row is another one, so is its sum, unless chance
has it: wherever elements differ, by whatever pattern. So what travels, and waits to be compared, is no second model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from zmqtrain.parallel.placement import Range

#: Elements of a tensor that is compared as it is.
SMALL = 4096
#: Elements after which a `pattern` begins again: a prime number, so that it does so at another place of each row.
_PERIOD = 8191


def sketch(tensor: Tensor) -> Tensor:
    """One number for each row of a large tensor, in double precision; a small one as it is.

    If all elements of a row differ by about d, so do the numbers: a sum is divided by the root of the number of its elements.
    Linear: the sketch of a sum is the sum of the sketches.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.numel() <= SMALL or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    rows = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
    return torch.mv(rows.double(), _weights(rows.shape[1]).to(rows.device)) / math.sqrt(rows.shape[1])


@lru_cache(maxsize=4)
def _weights(length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def pattern(shape: Sequence[int], seed: int, dimension: int | None = None, ranges: Sequence[Range] = ()) -> Tensor:
    """A tensor of small random numbers, or the ``ranges`` of it along a dimension, which take no more memory than their own."""
    place = torch.zeros((), dtype=torch.int64)
    step = 1
    for number in reversed(range(len(shape))):
        along = torch.arange(shape[number])
        if number == dimension:
            along = torch.cat([along[start:stop] for start, stop in ranges])
        place = place + (along * step % _PERIOD).view(-1, *[1] * (len(shape) - 1 - number))
        step *= shape[number]
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed)).mul_(0.01)
    return numbers[place.remainder_(_PERIOD)]
