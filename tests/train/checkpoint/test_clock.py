"""Checkpoints that somebody asks for: all workers keep one at a common step, and training goes on."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.membership.common_stop import Here, StopPoint
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.train.checkpoint.clock import CheckpointClock

pytestmark = pytest.mark.virtual_time


async def test_without_an_interval_checkpoints_are_kept_only_on_request() -> None:
    network = MemoryNetwork()
    endpoints = [network.endpoint(peer) for peer in (COORDINATOR, "worker/0", "worker/1")]
    points = [StopPoint(endpoint, timeout_s=60.0) for endpoint in endpoints[1:]]
    for endpoint in endpoints[1:]:
        endpoint.add_peer(COORDINATOR, endpoints[0].address)
        endpoints[0].add_peer(endpoint.peer, endpoint.address)
    clock = CheckpointClock(endpoints[0], lambda: ("worker/0", "worker/1"), None, timeout_s=60.0)
    complete: list[int] = []

    async def completed(step: int) -> None:
        complete.append(step)

    async def train(point: StopPoint, seconds: float) -> list[int]:
        point.open(0, None)
        kept = []
        for step in range(40):
            if await point.here(step) is Here.KEEP:
                kept.append(step)
            await asyncio.sleep(seconds)
        return kept

    running = asyncio.create_task(clock.run(completed))
    clock.begin()
    asyncio.get_running_loop().call_later(10.0, clock.ask)
    kept = await asyncio.gather(train(points[0], 1.0), train(points[1], 1.5))
    running.cancel()
    await asyncio.wait([running])
    assert kept == [complete, complete]
    assert len(complete) == 1
    for endpoint in endpoints:
        await endpoint.close()
