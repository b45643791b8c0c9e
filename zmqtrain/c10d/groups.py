"""Ranks in groups, for what goes on between groups beside DistributedDataParallel."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Groups:
    """The world, divided into groups of consecutive ranks. All ranks make one, at the same point of the program."""

    def __init__(self, group_size: int | None = None) -> None:
        """``group_size``: by default the ranks of a host (``LOCAL_WORLD_SIZE``, as torchrun sets it).

        Raises `ValueError` if the world cannot be divided in this way.
        """
        self.world = dist.get_world_size()
        self.size = group_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.size < 1 or self.world % self.size:
            raise ValueError(f"{self.world} ranks cannot be divided into groups of {self.size}: pass another group_size")
        self.number = self.world // self.size
        self.group, self.place = divmod(dist.get_rank(), self.size)
        self.within: Any = None
        """The process group of this rank's own group."""
        for group in range(self.number):
            made = dist.new_group(list(range(group * self.size, (group + 1) * self.size)))
            self.within = made if group == self.group else self.within

    def counterparts(self) -> Any:
        """The process group of the ranks at this rank's place, one of each group. All ranks call it."""
        own: Any = None
        for place in range(self.size):
            made = dist.new_group(list(range(place, self.world, self.size)))
            own = made if place == self.place else own
        return own


def average_over_ranks(model: nn.Module) -> None:
    """Give all ranks the mean of their parameters and buffers; integers become rank 0's. All ranks call it."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype.is_floating_point:
                dist.all_reduce(tensor)
                tensor.div_(dist.get_world_size())
            else:
                dist.broadcast(tensor, 0)
