"""Where a replica's buckets are: in memory shared by the processes of its host, if there is any."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.arena.region import PAGE

#: ``allocate(numel, dtype)``: zeroed host memory, one dimension, in whole pages, so that a device can pin each block.
Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]


def allocate_privately(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of this process alone, zeroed: one dimension."""
    nbytes = -(-numel * dtype.itemsize // PAGE) * PAGE
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return _kept(torch.frombuffer(pages, dtype=dtype, count=numel), pages)


def allocate_in(arena: Arena | None) -> Allocate:
    """A function that allocates what the processes of a host see of a replica.

    The function raises `HostMemoryError` if the host has too little memory left.
    """
    if arena is None:
        return allocate_privately

    def shared(numel: int, dtype: torch.dtype) -> Tensor:
        # Other processes pin their blocks, too, and no page may be pinned twice.
        nbytes = numel * dtype.itemsize
        block = arena.allocate(-(-nbytes // PAGE) * PAGE + PAGE, "a bucket of the model")
        tensor = torch.frombuffer(block.memory, dtype=dtype, count=numel, offset=-block.place.start % PAGE)
        return _kept(tensor.zero_(), block.memory)

    return shared


def _kept(tensor: Tensor, memory: object) -> Tensor:
    """The tensor keeps the memory even if torch gives it another one (``share_memory_``), since the network may still use it."""
    vars(tensor)["memory"] = memory
    return tensor
