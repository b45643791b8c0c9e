"""Whom a late worker asks for what is beside the parameters, and when it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from tests.collectives.world import endpoints
from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.base import Replica
from zmqtrain.exchange.beside import Beside
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time


class Buffers:
    """A replica with one buffer, as far as it is asked here."""

    def __init__(self, value: float) -> None:
        self.buffer = torch.full((3,), value, dtype=torch.float64)
        self.taken: Mapping[str, Value] | None = None

    async def beside(self) -> tuple[dict[str, Payload], dict[str, Value]]:
        return {"mean": TensorPayload.of(self.buffer.clone())}, {"seen": 7}

    async def take_beside(self, tensors: Mapping[str, Payload], about: Mapping[str, Value]) -> None:
        payload = tensors["mean"]
        assert isinstance(payload, TensorPayload)
        self.buffer, self.taken = payload.tensor.clone(), about


def beside_of(node: Endpoint, buffers: Any, *, begun: bool, late: bool = False) -> Beside:
    return Beside(node, cast(Replica, buffers), lambda: begun, late=late, timeout_s=5.0)


async def test_it_takes_what_one_has_that_has_begun_at_the_end_of_a_step() -> None:
    async with endpoints(3) as nodes:
        late = Buffers(0.0)
        beside_of(nodes[0], Buffers(1.0), begun=False)
        trains = beside_of(nodes[1], Buffers(2.0), begun=True)
        taking = asyncio.create_task(beside_of(nodes[2], late, begun=False).take(["worker/0", "worker/1", "worker/2"]))
        await asyncio.sleep(1.0)  # virtual
        assert not taking.done()
        await trains.give()
        await taking
        assert late.buffer.tolist() == [2.0, 2.0, 2.0]
        assert late.taken == {"seen": 7}


async def test_one_that_rests_answers_at_once() -> None:
    async with endpoints(2) as nodes:
        late = Buffers(0.0)
        trained = beside_of(nodes[0], Buffers(3.0), begun=True)
        trained.rests = True
        await beside_of(nodes[1], late, begun=False).take(["worker/0", "worker/1"])
        assert late.buffer.tolist() == [3.0, 3.0, 3.0]


async def test_nothing_is_taken_where_nobody_has_begun_that_is_there() -> None:
    async with endpoints(3) as nodes:
        late = Buffers(0.0)
        beside_of(nodes[0], Buffers(1.0), begun=False)
        nodes[2].forget("worker/1", "it is lost")
        await beside_of(nodes[2], late, begun=False).take(["worker/0", "worker/1", "worker/2"])
        assert late.taken is None


async def test_what_nobody_has_any_more_is_missed() -> None:
    """The second one has come late, too, and the first one is lost: the initial buffers would be something else."""
    async with endpoints(3) as nodes:
        beside_of(nodes[1], Buffers(1.0), begun=False, late=True)
        nodes[2].forget("worker/0", "it is lost")
        with pytest.raises(PeerLostError, match="none is left that has what servers do not keep: mean, seen"):
            await beside_of(nodes[2], Buffers(0.0), begun=False, late=True).take(["worker/0", "worker/1", "worker/2"])
