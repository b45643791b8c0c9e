"""Several workers of one host, each in a thread with an arena of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from zmqtrain.arena import Arena, Region
from zmqtrain.host.team import Team

T = TypeVar("T")
MIB = 1 << 20


def teams(region: Region, size: int, *, number: int = 0, timeout_s: float = 60.0) -> list[Team]:
    """The members of a team of all this region's first processes."""
    names = [f"worker/{rank}" for rank in range(size)]
    return [
        Team(Arena.join(region.path, rank), range(size), rank, names=names, number=number, timeout_s=timeout_s)
        for rank in range(size)
    ]


def together(work: Callable[[int], T], size: int) -> list[T]:
    """Call ``work(rank)`` in as many threads."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def ended_process() -> int:
    """The number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
