"""Sums over the buffers of several processes, block by block, so that the data being added stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

#: Elements summed at a time: 512 KB of float32, about half of a core's own cache.
BLOCK = 128 * 1024

#: Combines two tensors element by element: ``combine(left, right, out=...)``.
Combine: TypeAlias = Callable[..., Tensor]


def sum_into(targets: Sequence[Tensor], sources: Sequence[Tensor], *, scale: float = 1.0, combine: Combine = torch.add) -> None:
    """Every target becomes ``scale`` times the sum of the sources. All are flat, of one size and dtype.

    The sources are added from the first to the last, so the result has the same bits in every process. A target may be a source
    (the same memory, not a part of it).
    """
    result = _result(targets, sources)
    others = [target for target in targets if target is not result]
    whole = sources[0].numel() <= BLOCK
    for start in range(0, sources[0].numel(), BLOCK):
        blocks = sources if whole else [source[start : start + BLOCK] for source in sources]
        block = torch.empty_like(blocks[0]) if result is None else result if whole else result[start : start + BLOCK]
        if len(blocks) == 1:
            if block.data_ptr() != blocks[0].data_ptr():
                block.copy_(blocks[0])
        else:
            combine(blocks[0], blocks[1], out=block)
            for source in blocks[2:]:
                combine(block, source, out=block)
        if scale != 1.0:
            block.mul_(scale)
        for other in others:
            other[start : start + BLOCK].copy_(block)


def _result(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor | None:
    """A target in which to add: it must not be overwritten before it has been read itself."""
    for target in targets:
        if all(target.data_ptr() != source.data_ptr() for source in sources[2:]):  # the first two are read before it is written
            return target
    return None
