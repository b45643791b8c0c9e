"""Registers the backend with torch, which calls `register` itself while it is imported (the entry point ``torch.backends``).

So this module imports nothing at its top: every ``import torch`` where zmqtrain is installed pays for it. What the backend consists
of is imported when a process group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from zmqtrain.c10d.process_group import ZmqProcessGroup

#: The name for ``init_process_group(backend=...)``.
BACKEND = "zmq"


def create(options: _DistributedBackendOptions, _backend_options: object) -> ZmqProcessGroup:
    """A process group, once all its ranks have arrived. Called by torch."""
    import torch
    import torch.distributed as dist

    from zmqtrain.c10d.process_group import ZmqProcessGroup
    from zmqtrain.c10d.rendezvous import rendezvous

    if not torch.cuda.is_available():
        # Not known before: to ask takes time, which `import torch` does not have. Torch's ShardedTensor takes GPUs where it can.
        dist.Backend.backend_capability[BACKEND] = ["cpu"]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    names = [f"rank {rank}" for rank in ranks]
    transport = rendezvous(options.store, options.group_rank, names, options.timeout)
    return ZmqProcessGroup(transport, options.group_rank, options.group_size, names)


def register() -> None:
    """Register the backend, once. A torch without distributed training has none."""
    import torch.distributed as dist

    # An error here would be one of `import torch`, in programs that do not use this backend.
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
