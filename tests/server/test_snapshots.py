"""A server that follows the order of another, driven by hand."""

from __future__ import annotations

import asyncio

import pytest
import torch

from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.server_messages import (
    BucketDescription,
    Configuration,
    PushMeta,
    initial_tag,
    parameters_tag,
    push_tag,
)
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.server.model_server import ModelServer
from zmqtrain.server.settings import ServerSettings
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

pytestmark = pytest.mark.virtual_time

WORKERS = ("worker/0", "worker/1")
CONFIGURATION = Configuration(
    buckets=(BucketDescription(8, "float64", 0),),
    optimizer=OptimizerSpec("torch.optim:SGD", ({"lr": 1.0},)),
    groups=(("worker/0",), ("worker/1",)),
    servers=("server/0", "server/1"),
    split_bytes=16,
    policy="async",
    bound=0,
    snapshot=True,
    clip_norm=0.0,
    restored=False,
)


async def quiet() -> None:
    """Let everything that was sent reach the server's coroutines; nothing here waits for a clock."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_steps_that_are_ordered_together_are_answered_one_by_one() -> None:
    """Group 0's step comes first in the order but last in the mail, so both steps are applied at one stroke. Its answer must be of
    the version that it has on all servers: without group 1's update."""
    network = MemoryNetwork()
    ends: dict[str, Endpoint] = {peer: network.endpoint(peer) for peer in (*WORKERS, "server/0", "server/1")}
    for end in ends.values():
        for other in ends.values():
            end.add_peer(other.peer, other.address)
    pieces = [piece for piece in CONFIGURATION.pieces() if piece.server == 1]
    assert len(pieces) == 2
    server = asyncio.create_task(ModelServer(ends["server/1"], ServerSettings(1, WORKERS)).run())

    async def push(group: int, piece: int) -> None:
        gradient = TensorPayload.of(torch.ones(2, dtype=torch.float64), PushMeta(group, 0).to_value())
        await ends[WORKERS[group]].send("server/1", push_tag(piece, 0), gradient)
        await quiet()

    async def read(group: int, step: int | None) -> set[float]:
        values: set[float] = set()
        for piece in pieces:
            tag = initial_tag(piece.index) if step is None else parameters_tag(piece.index, step)
            payload = await ends[WORKERS[group]].receive("server/1", tag)
            assert isinstance(payload, TensorPayload)
            values |= set(payload.tensor.tolist())
        return values

    async with asyncio.timeout(10.0):
        await ends["worker/0"].request("server/1", "configure", CONFIGURATION.to_value(), timeout=5.0)
        for piece in pieces:
            await ends["worker/0"].send("server/1", initial_tag(piece.index), TensorPayload.of(torch.zeros(2, dtype=torch.float64)))
        assert await read(0, None) == await read(1, None) == {0.0}
        for piece in pieces:
            await push(1, piece.index)
        await push(0, pieces[0].index)
        for group in (0, 1):
            await ends["server/0"].send("server/1", ("order",), ValuePayload(["step", group]))
            await quiet()
        await push(0, pieces[1].index)  # now both steps are complete, in their order
        assert await read(0, 1) == {-1.0}
        assert await read(1, 1) == {-2.0}
        for worker in WORKERS:
            await ends[worker].request("server/1", "finished", timeout=5.0)
        await server
    for end in ends.values():
        await end.close()
