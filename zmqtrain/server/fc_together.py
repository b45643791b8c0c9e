"""Several FC servers that have the layers divided among them: the first one leads, the others do what it does.

Workers know the first one only, and it alone decides whose turn it is (`zmqtrain.server.fc_queue`). It passes each batch on, and
all compute their parts of it at once; what they need of each other in between they exchange by themselves. So all of them see the
same turns and updates in the same order.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from zmqtrain.exchange.fc_messages import PRIORITY, ActivationsMeta
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.server.fc_orders import (
    End,
    Evaluate,
    Keep,
    Order,
    Train,
    Update,
    order_from_value,
    order_tag,
    order_to_value,
    tensor_tag,
)
from zmqtrain.server.fc_queue import Applied, Turn
from zmqtrain.server.head import Head, Part, State, Trained
from zmqtrain.waiting import task_group, together
from zmqtrain.wire.value import ValuePayload

T = TypeVar("T")


class LeadingHead:
    """Implements `zmqtrain.server.head.Head` by its own part of the layers and those of ``followers``, which `follow`."""

    def __init__(self, head: Head, endpoint: Endpoint, followers: Sequence[PeerId]) -> None:
        self._head, self._endpoint, self._followers = head, endpoint, followers
        self._number = 0

    async def train(self, turn: Turn, parts: Sequence[Part]) -> Trained:
        order = Train(turn, tuple(len(part.tensors) for part in parts))
        return await self._all(order, parts, self._head.train(turn, parts))

    async def update(self, applied: Applied) -> None:
        await self._all(Update(applied), (), self._head.update(applied))

    async def evaluate(self, part: Part) -> list[float]:
        return await self._all(Evaluate((len(part.tensors),)), [part], self._head.evaluate(part))

    async def state(self) -> State:
        return await self._all(Keep(), (), self._head.state())

    async def finish(self) -> None:
        """Tell the others that this was all."""
        await self._tell(End(), ())

    async def _all(self, order: Order, parts: Sequence[Part], own: Coroutine[Any, Any, T]) -> T:
        """Have it done by all. On return ``parts`` are used no more. Raises `PeerLostError`, and what ``own`` raises."""
        async with task_group() as tasks:
            tasks.create_task(self._tell(order, parts))
            done = tasks.create_task(own)
        return done.result()

    async def _tell(self, order: Order, parts: Sequence[Part]) -> None:
        number, self._number = self._number, self._number + 1
        await together(*(self._send(to, number, order, parts) for to in self._followers))

    async def _send(self, to: PeerId, number: int, order: Order, parts: Sequence[Part]) -> None:
        send = self._endpoint.send
        sent = [await send(to, order_tag(number), ValuePayload(order_to_value(order)), priority=PRIORITY)]
        for place, part in enumerate(parts):
            for index, tensor in enumerate(part.tensors):
                sent.append(await send(to, tensor_tag(number, place, index), tensor, priority=PRIORITY))
        for each in sent:  # the workers' memory is theirs again once they have their answers
            await each.wait_released()


async def follow(endpoint: Endpoint, leader: PeerId, head: Head) -> None:
    """Do what the first FC server does, until it says that this was all. Raises `PeerLostError`, and what the head raises."""
    number = 0
    while True:
        order = order_from_value((await endpoint.receive(leader, order_tag(number))).meta)
        match order:
            case Train(turn, tensors):
                await head.train(turn, await _parts(endpoint, leader, number, tensors))
            case Update(applied):
                await head.update(applied)
            case Evaluate(tensors):
                (part,) = await _parts(endpoint, leader, number, tensors)
                await head.evaluate(part)
                del part
            case Keep():
                await head.state()
            case End():
                return
        number += 1


async def _parts(endpoint: Endpoint, leader: PeerId, number: int, tensors: Sequence[int]) -> list[Part]:
    parts = []
    for place, count in enumerate(tensors):
        came = [await endpoint.receive(leader, tensor_tag(number, place, index)) for index in range(count)]
        parts.append(Part(ActivationsMeta.from_value(came[0].meta), tuple(came)))
    return parts
