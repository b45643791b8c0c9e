"""A worker's side of an FC server, if workers may be lost: a step is given up when its team is another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from zmqtrain.data.slots import Slot
from zmqtrain.data.teams import Team
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.merged_fc.client import GIVEN_UP, FcClient
from zmqtrain.merged_fc.messages import ActivationsMeta, AnswerMeta, answer_tag, gradient_tag
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

pytestmark = pytest.mark.virtual_time


class TwoInTurn(FixedMembers):
    """A worker's team, which changes when it is told to."""

    life = 7
    torn: tuple[tuple[int, int], ...] = ()

    def team(self) -> Team:
        return Team("worker/0", self.life, (("worker/0", 1),))

    def slot(self, step: int) -> Slot:
        return Slot(step, self.torn)

    def on_change(self, change: Callable[[int, tuple[str, ...]], None]) -> None:
        self._change = change

    def becomes(self, life: int) -> None:
        self.life = life
        self._change(1, ("worker/0",))


async def test_a_step_is_given_up_at_any_moment_and_what_still_comes_is_not_taken_for_another_answer() -> None:
    network = MemoryNetwork()
    own, server = network.endpoint("worker/0"), network.endpoint("fc/0")
    members = TwoInTurn(own, ("worker/0",), timeout_s=1.0)
    client = FcClient(own, "fc/0", Timeouts.of(10.0), members)
    arriving = server.subscribe("activations")

    async def train(step: int) -> tuple[AnswerMeta, list[float]]:
        into = TensorPayload.of(np.zeros(2))
        meta = ActivationsMeta(1, (True,), 2)
        return await client.train(step, 0, meta, [TensorPayload.of(np.ones(2))], [into]), into.numpy().tolist()

    async def answer(life: int, value: float) -> None:
        await server.send("worker/0", answer_tag(0, 0, life), ValuePayload(AnswerMeta(value, 0.0, 1).to_value()))
        await server.send("worker/0", gradient_tag(0, 0, 0, life), TensorPayload.of(np.full(2, value)))

    client.begin_step(0)
    waiting = asyncio.create_task(train(0))
    assert (await arriving.get())[1][-1] == 7
    members.becomes(7)
    await asyncio.sleep(1)
    assert not waiting.done(), "others may have been lost, but not of this team"
    members.becomes(8)
    assert (await waiting)[0] is GIVEN_UP
    assert (await train(0))[0] is GIVEN_UP, "what begins after that does not even send"

    members.torn = ((7, 0),)
    client.begin_step(0)
    waiting = asyncio.create_task(train(0))
    _, tag, payload = await arriving.get()
    assert (tag[-1], ActivationsMeta.from_value(payload.meta).torn) == (8, ((7, 0),))
    await answer(7, 5.0)
    await asyncio.sleep(1)
    assert not waiting.done()
    await answer(8, 3.0)
    assert await waiting == (AnswerMeta(3.0, 0.0, 1), [3.0, 3.0])
    await asyncio.sleep(1)
    assert not client._unwanted, "the old answer was taken, and is gone"
    client.begin_step(1)
    waiting = asyncio.create_task(train(1))
    await arriving.get()
    members.becomes(9)
    assert (await waiting)[0] is GIVEN_UP
    await client.finish()
    assert not client._unwanted
    arriving.close()
    for endpoint in (own, server):
        await endpoint.close()
