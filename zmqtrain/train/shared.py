"""Where a replica's buckets lie: in the memory that the processes of its host share, if there is any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.train.replica import allocate


def allocate_in(arena: Arena | None) -> Callable[[int, Tensor], Tensor]:
    """Allocates a replica's buckets. What is in a device's own memory stays there.

    The function raises `HostMemoryError` where the host has too little memory left.
    """
    if arena is None:
        return allocate

    def shared(numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return allocate(numel, like)
        block = arena.allocate(numel * like.element_size(), "a bucket of the model")
        tensor = torch.frombuffer(block.memory, dtype=like.dtype)
        return tensor.zero_()

    return shared
