"""Gossip between groups of ranks, for programs with DistributedDataParallel: a communication hook."""

# Annotations must not be strings here: DistributedDataParallel compares those of its hooks with its own types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from zmqtrain.c10d.averaging import Averaging
from zmqtrain.c10d.groups import Groups, average_over_ranks
from zmqtrain.c10d.servers import ModelServers
from zmqtrain.c10d.work import Handle, Lane
from zmqtrain.collectives.group import bounds
from zmqtrain.exchange.gossip.schedule import Schedule, Shape


class Gossip:
    """The state of `ddp_comm_hook`: the ranks are divided into groups (those of a host, for example) that each average their
    gradients exactly, and in each step every group averages with one other (GossipGraD, Daily et al. 2018, exchanging gradients).

    ::

        dist.init_process_group("zmq")
        gossip = zmqtrain.Gossip()
        gossip.average(model)                                   # all begin with the same parameters
        replica = DistributedDataParallel(model, process_group=gossip.within)
        replica.register_comm_hook(gossip, zmqtrain.ddp_comm_hook)
        ...
        gossip.average(model)                                   # before evaluating, and at the end

    Groups exchange gradients, not weights, so their models drift apart between calls of `average`.
    """

    def __init__(
        self, group_size: int | None = None, *, seed: int = 0, topology: Shape = "dissemination", rotation: bool = True
    ) -> None:
        """All ranks make one, at the same point of the program. ``group_size``: the number of consecutive ranks in a group; by
        default those of a host (``LOCAL_WORLD_SIZE``, as torchrun sets it). The other arguments: see ``[exchange.gossip]``.

        Raises `ValueError` if the world cannot be divided in this way, or the topology needs another number of groups.
        """
        groups = Groups(group_size)
        self.groups, self._group, self._place, self._size = groups.number, groups.group, groups.place, groups.size
        self._schedule = Schedule(self.groups, seed, topology, rotation)
        self.within: Any = groups.within
        """The process group of this rank's own group, for DistributedDataParallel."""
        self._between: Any = groups.counterparts()
        self._step = 0
        self._lane = Lane("zmqtrain-gossip")

    def average(self, model: nn.Module) -> None:
        """Give all ranks the mean of their parameters and buffers; integers become rank 0's. All ranks call it."""
        average_over_ranks(model)

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket's gradients, in place."""
        gradients, step = bucket.buffer(), self._step
        self._step += bucket.is_last()
        handle = Handle([gradients], f"gossip of step {step}")
        self._lane.submit(handle, lambda: self._average(gradients, step))
        return handle.get_future().then(lambda done: done.value()[0])

    def _average(self, gradients: Tensor, step: int) -> None:
        dist.all_reduce(gradients, group=self.within)
        partners = self._schedule.partners(step, self._group)
        scale = 1.0 / self._size
        if partners is not None:
            # Each rank of a group handles a part of the gradients, with its counterpart in the other group.
            parts = [gradients[start:stop] for start, stop in bounds(gradients.numel(), self._size)]
            own, other = parts[self._place], torch.empty_like(parts[self._place])
            sending = dist.isend(own.clone(), group=self._between, group_dst=partners.to)
            dist.recv(other, group=self._between, group_src=partners.sources[0])
            assert sending is not None
            sending.wait()
            own.add_(other)
            gathered = [torch.empty_like(part) for part in parts]
            dist.all_gather(gathered, own.clone(), group=self.within)
            for part, content in zip(parts, gathered, strict=True):
                part.copy_(content)
            scale /= 2
        gradients.mul_(scale)


def ddp_comm_hook(state: Gossip | ModelServers | Averaging, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """For ``DistributedDataParallel.register_comm_hook(state, zmqtrain.ddp_comm_hook)``: see `Gossip`, `ModelServers` and
    `Averaging`."""
    return state.exchange(bucket)
