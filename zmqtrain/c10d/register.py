"""Registers the backend with torch."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from zmqtrain.c10d.process_group import ZmqProcessGroup
from zmqtrain.c10d.rendezvous import rendezvous

#: The name for ``init_process_group(backend=...)``.
BACKEND = "zmq"


def create(options: _DistributedBackendOptions, _backend_options: object) -> ZmqProcessGroup:
    """A process group, once all its ranks have arrived. Called by torch."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    names = [f"rank {rank}" for rank in ranks]
    transport = rendezvous(options.store, options.group_rank, names, options.timeout)
    return ZmqProcessGroup(transport, options.group_rank, options.group_size, names)


def register() -> None:
    """Register the backend, once."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
