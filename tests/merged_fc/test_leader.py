"""Several FC servers: the others are told what the first one does, with everything that it needs, in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.merged_fc.executor import BatchPart, ExecutorState, Trained
from zmqtrain.merged_fc.leader import (
    End,
    Evaluate,
    Keep,
    LeadingExecutor,
    Order,
    Train,
    Update,
    follow,
    order_from_value,
    order_to_value,
)
from zmqtrain.merged_fc.messages import ActivationsMeta
from zmqtrain.merged_fc.queue import Applied, Turn
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.waiting import together
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

TURN, APPLIED = Turn(1, 7, 0, (0, 2), True), Applied((0, 1), (7, 7), (0, 1), "all are there")


class NotingExecutor:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        self.calls.append((turn, [_noted(part) for part in parts]))
        return Trained(1.0, 0.5, ())

    async def update(self, applied: Applied) -> None:
        self.calls.append(applied)

    async def evaluate(self, part: BatchPart) -> list[float]:
        self.calls.append(_noted(part))
        return [2.0]

    async def state(self) -> ExecutorState:
        self.calls.append("state")
        return ExecutorState({}, {}, {})


def _noted(part: BatchPart) -> Any:
    return part.meta, [tensor.numpy().tolist() for tensor in part.tensors]  # type: ignore[attr-defined]


def part_of(*values: float) -> BatchPart:
    meta = ActivationsMeta(2, (True,), len(values), divisor=5.0, hyperparameters=[None, {"lr": 0.5}])
    target = TensorPayload.of(np.arange(len(values)))
    return BatchPart(meta, (TensorPayload.of(np.array(values), meta.to_value()), target))


@pytest.mark.parametrize("others", [1, 3])
async def test_all_do_the_same(others: int) -> None:
    network, peers = MemoryNetwork(), [f"fc/{number}" for number in range(1, others + 1)]
    nodes = {peer: network.endpoint(peer) for peer in ("fc/0", *peers)}
    executors = {peer: NotingExecutor() for peer in nodes}
    leading = LeadingExecutor(executors["fc/0"], nodes["fc/0"], peers)

    async def lead() -> None:
        assert (await leading.train(TURN, [part_of(1, 2, 3), part_of(4, 5)])).loss == 1
        await leading.update(APPLIED)
        assert await leading.evaluate(part_of(6)) == [2]
        await leading.state()
        await leading.finish()

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(lead())
        for peer in peers:
            tasks.create_task(follow(nodes[peer], "fc/0", executors[peer]))
    assert len(executors["fc/0"].calls) == 4
    assert executors["fc/0"].calls[0][1][1] == (part_of(4, 5).meta, [[4, 5], [0, 1]])
    for peer in peers:
        assert executors[peer].calls == executors["fc/0"].calls
    for node in nodes.values():
        await node.close()


async def test_one_that_is_lost_ends_it() -> None:
    network = MemoryNetwork()
    first, other = network.endpoint("fc/0"), network.endpoint("fc/1")
    leading = LeadingExecutor(NotingExecutor(), first, ["fc/1"])

    async def lose() -> None:
        await asyncio.sleep(0)
        first.forget("fc/1", "its process ended")

    async with asyncio.timeout(5):
        with pytest.raises(PeerLostError, match="fc/1"):
            await together(leading.train(TURN, [part_of(1)]), lose())
    for node in (first, other):
        await node.close()


@pytest.mark.parametrize("order", [Train(TURN, (2, 2)), Update(APPLIED), Evaluate((3,)), Keep(), End()])
def test_orders_travel(order: Order) -> None:
    assert order_from_value(msgpack.unpackb(msgpack.packb(order_to_value(order)))) == order


@pytest.mark.parametrize("value", [None, [], ["train", 1], ["update", ["a"], [], [], ""], ["evaluate", 3], ["end", 1], ["dance"]])
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="first FC server"):
        order_from_value(value)
