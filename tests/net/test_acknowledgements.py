"""Acknowledgements go with what is sent anyway, and alone only where nothing is."""

import asyncio

import numpy as np
import pytest

from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.node import Node
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

LATENCY_S = 0.0002


class Counting:
    """Two endpoints, and how many messages between them were nothing but an acknowledgement."""

    def __init__(self) -> None:
        self.alone = 0
        network = MemoryNetwork(self._delay)
        self.a, self.b = network.endpoint("a"), network.endpoint("b")

    def _delay(self, source: str, destination: str, lane: int, nbytes: int) -> float:
        self.alone += not nbytes  # greetings are among them, until both are connected
        return LATENCY_S


async def _answer(_caller: str, *_args: object) -> int:
    return 1


async def _connected() -> Counting:
    pair = Counting()
    pair.b.serve("ask", _answer)
    await pair.a.request("b", "ask", timeout=10)
    await asyncio.sleep(0.01)
    pair.alone = 0
    return pair


def _inflight(*nodes: Node) -> int:
    return sum(node.statistics()["inflight_bytes"] for node in nodes)


async def test_requests_and_answers_acknowledge_each_other() -> None:
    pair = await _connected()
    async with pair.a, pair.b:
        for _ in range(200):
            await pair.a.request("b", "ask", timeout=10)
        assert pair.alone == 0
        assert _inflight(pair.b)  # the last answer ...
        await asyncio.sleep(0.01)
        assert pair.alone == 1  # ... is acknowledged alone
        assert not _inflight(pair.a, pair.b)


@pytest.mark.parametrize(("nbytes", "alone"), [(4_000, False), (400_000, True)])
async def test_small_tensors_acknowledge_each_other(nbytes: int, alone: bool) -> None:
    """A large one takes longer than an acknowledgement should wait."""
    pair = await _connected()
    async with pair.a, pair.b:
        tensor = TensorPayload.of(np.ones(nbytes // 4, np.float32))
        for number in range(50):
            await pair.a.send("b", ("there", number), tensor)
            await pair.b.receive("a", ("there", number))
            await pair.b.send("a", ("back", number), tensor)
            await pair.a.receive("b", ("back", number))
        assert bool(pair.alone) == alone
        await asyncio.sleep(0.01)
        assert not _inflight(pair.a, pair.b)


async def test_one_way_all_is_acknowledged() -> None:
    pair = await _connected()
    async with pair.a, pair.b:
        for _ in range(50):
            sent = await pair.a.send("b", ("there",), TensorPayload.of(np.ones(10, np.float32)))
            await sent.wait_released()
        assert pair.alone == 50
