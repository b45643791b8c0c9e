"""How the ranks of a process group find each other: through torch's store, before anything else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from zmqtrain.arena import Arena, shared_memory_missing
from zmqtrain.c10d.one_host import OneHost
from zmqtrain.c10d.transport import Transport
from zmqtrain.errors import PeerTimeoutError, UsageError

SETTING = "timeout= of init_process_group() or new_group()"


def rendezvous(store: Store, rank: int, names: Sequence[str], timeout: timedelta) -> Transport:
    """Meet the other ranks. Raises `PeerTimeoutError` naming a rank that does not come, and `UsageError` where this cannot be."""
    missing = shared_memory_missing()
    if missing is not None:
        raise UsageError(f'the "zmq" backend needs shared memory, and {missing}')
    here = _this_host()
    store.set(f"host/{rank}", here)
    hosts = [_get(store, f"host/{other}", name, timeout) for other, name in enumerate(names)]
    away = [name for name, host in zip(names, hosts, strict=True) if host != here]
    if away:
        raise UsageError(
            f'the "zmq" backend joins ranks of one host, and {", ".join(away[:8])} of this group run on another one (or in another '
            "container): use zmqtrain launch for several hosts, or zmqtrain.ddp_comm_hook between them"
        )
    if rank == 0:
        region = Arena.create(len(names))
        store.set("memory", region.path)
        arena = Arena(region, 0)
    else:
        arena = Arena.join(_get(store, "memory", names[0], timeout), rank)
    return OneHost(arena, rank, names, timeout_s=timeout.total_seconds(), setting=SETTING)


def _get(store: Store, key: str, name: str, timeout: timedelta) -> str:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # torch's stores raise DistStoreError, which is one
        raise PeerTimeoutError(name, "it to join the process group", timeout.total_seconds(), SETTING) from error
    content: bytes = store.get(key)
    return content.decode()


def _this_host() -> str:
    """What processes have in common that can share memory: the machine, and its process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
