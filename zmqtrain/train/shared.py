"""Where a replica's buckets lie: in the memory that the processes of its host share, if there is any."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.arena.region import PAGE

#: ``allocate(numel, dtype)``: zeroed memory of the host, in whole pages, which a device can pin one by one.
Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


def allocate_privately(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of this process's own."""
    nbytes = -(-numel * dtype.itemsize // PAGE) * PAGE
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def allocate_in(arena: Arena | None) -> Allocate:
    """Allocates what the processes of a host see of a replica.

    The function raises `HostMemoryError` where the host has too little memory left.
    """
    if arena is None:
        return allocate_privately

    def shared(numel: int, dtype: torch.dtype) -> Tensor:
        # Others pin it, too; and no page is pinned twice.
        nbytes = numel * dtype.itemsize
        block = arena.allocate(-(-nbytes // PAGE) * PAGE + PAGE, "a bucket of the model")
        return torch.frombuffer(block.memory, dtype=dtype, count=numel, offset=-block.place.start % PAGE).zero_()

    return shared
