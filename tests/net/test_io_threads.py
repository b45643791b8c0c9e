"""Which of ZeroMQ's threads moves, and where connections are encrypted encrypts and decrypts, what."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.net.curve import Identity
from zmqtrain.net.node import Node
from zmqtrain.net.settings import MIB, NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.wire.tensor import TensorPayload

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not (TASKS / f"{os.getpid()}/schedstat").exists(), reason="the kernel does not count threads' time")
NBYTES = 8 * MIB


def processor_times() -> dict[str, int]:
    """Nanoseconds of each of ZeroMQ's I/O threads."""
    found = {}
    for task in TASKS.iterdir():
        if "/IO/" in (task / "comm").read_text():
            found[task.name] = int((task / "schedstat").read_text().split()[0])
    return found


async def exchange(one: Node, other: Node, count: int) -> None:
    """Each sends the other as many tensors at the same time."""

    async def send(source: Node, to: Node) -> None:
        for number in range(count):
            sent = await source.send(to.peer, ("tensor", number), TensorPayload.of(np.zeros(NBYTES, np.uint8)))
            await sent.wait_released()

    async def receive(at: Node, source: Node) -> None:
        for number in range(count):
            await at.receive(source.peer, ("tensor", number))

    async with asyncio.TaskGroup() as tasks:
        for source, to in ((one, other), (other, one)):
            tasks.create_task(send(source, to))
            tasks.create_task(receive(to, source))


def test_what_comes_is_decrypted_beside_what_goes() -> None:
    """With two threads, one does the one and the other the other, so that both processors are busy."""

    async def run() -> list[int]:
        """The times of both endpoints' threads."""
        others = processor_times()  # of endpoints that earlier tests have left
        async with (
            await open_zeromq("a", settings=NetSettings(token="t", identity=Identity(), io_threads=2)) as one,
            await open_zeromq("b", settings=NetSettings(token="t", identity=Identity(), io_threads=2)) as other,
        ):
            one.add_peer("b", other.address)
            other.add_peer("a", one.address)
            await exchange(one, other, 1)  # all connections are made
            before = processor_times()
            await exchange(one, other, 1)
            after = processor_times()
            return sorted(after[task] - before.get(task, 0) for task in after if task not in others)[-4:]

    for _ in range(4):  # ZeroMQ itself divides the work well now and then
        times = asyncio.run(run())
        assert len(times) == 4
        assert times[0] > times[-1] / 4, f"an I/O thread has next to nothing to do: {times} ns"
