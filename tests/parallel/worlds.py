"""Calls a function on several ranks: threads with a table for a network, or with real endpoints in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.testing.threads import run_ranks


@dataclass
class Outcome:
    """What a world left behind."""

    results: list[Any]
    messages: list[Counter[Label]]
    nbytes: list[Counter[Label]]


def on_threads(size: int, function: Callable[[Fabric], Any], *, timeout_s: float = 60.0) -> Outcome:
    results, world = run_ranks(size, function)
    return Outcome(results, [each.messages for each in world.traffic], [each.nbytes for each in world.traffic])


def on_endpoints(size: int, function: Callable[[Fabric], Any], *, timeout_s: float = 60.0) -> Outcome:
    return asyncio.run(_on_endpoints(size, function, timeout_s))


async def _on_endpoints(size: int, function: Callable[[Fabric], Any], timeout_s: float) -> Outcome:
    network = MemoryNetwork()
    peers = tuple(f"worker/{rank}" for rank in range(size))
    endpoints = [network.endpoint(peer) for peer in peers]
    for one in endpoints:
        for other in endpoints:
            if one is not other:
                one.add_peer(other.peer, other.address)
    fabrics = [
        NetworkFabric(each, peers, "group", condition=threading.Condition(), clock=time.monotonic, timeout_s=timeout_s)
        for each in endpoints
    ]

    async def run(fabric: NetworkFabric) -> Any:
        try:
            return await asyncio.to_thread(function, fabric)
        except BaseException:
            await endpoints[fabric.rank].close()
            raise

    try:
        results = await asyncio.gather(*map(run, fabrics))
    finally:
        for fabric in fabrics:
            await fabric.close()
        for each in endpoints:
            await each.close()
    return Outcome(list(results), [each.messages for each in fabrics], [each.nbytes for each in fabrics])
