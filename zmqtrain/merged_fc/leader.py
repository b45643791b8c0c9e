"""Several FC servers that divide the layers between them: the first one leads, and the others follow its orders.

Workers know only the first one, and it alone decides whose turn it is (`zmqtrain.merged_fc.queue`). It passes each batch on, and
all compute their parts of it at the same time; what they need from each other in between they exchange directly. So all of them
process the same turns and updates in the same order. The first one sends to each of the others:

=========  ==================================  ==============================================================
message    tag                                 carries
=========  ==================================  ==============================================================
order      ``("fc_order", number)``            an `Order`; orders are carried out by their numbers
tensor     ``("fc_order", number, part, n)``   tensor n of a worker's part, with its meta as the worker sent it
=========  ==================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from zmqtrain.errors import ProtocolError
from zmqtrain.merged_fc.executor import BatchPart, Executor, ExecutorState, Trained
from zmqtrain.merged_fc.messages import PRIORITY, ActivationsMeta
from zmqtrain.merged_fc.queue import Applied, Turn
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.waiting import task_group, together
from zmqtrain.wire.payload import Value
from zmqtrain.wire.value import ValuePayload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Train:
    """Forward, loss and backward."""

    turn: Turn
    tensors: tuple[int, ...]
    """The number of tensors that follow, for each worker's part."""


@dataclass(frozen=True, slots=True)
class Update:
    """A step of the optimizer."""

    applied: Applied


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The metrics of a batch."""

    tensors: tuple[int, ...]
    """The number of tensors that follow, all of one part."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Collect the layers' state."""


@dataclass(frozen=True, slots=True)
class End:
    """All workers have finished."""


Order: TypeAlias = Train | Update | Evaluate | Keep | End


class LeadingExecutor:
    """Implements `zmqtrain.merged_fc.executor.Executor` with its own part of the layers and those of the servers that `follow`
    it."""

    def __init__(self, executor: Executor, endpoint: Endpoint, followers: Sequence[PeerId]) -> None:
        self._executor, self._endpoint, self._followers = executor, endpoint, followers
        self._number = 0

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        order = Train(turn, tuple(len(part.tensors) for part in parts))
        return await self._all(order, parts, self._executor.train(turn, parts))

    async def update(self, applied: Applied) -> None:
        await self._all(Update(applied), (), self._executor.update(applied))

    async def evaluate(self, part: BatchPart) -> list[float]:
        return await self._all(Evaluate((len(part.tensors),)), [part], self._executor.evaluate(part))

    async def state(self) -> ExecutorState:
        return await self._all(Keep(), (), self._executor.state())

    async def become(self, state: ExecutorState) -> None:
        raise AssertionError("layers that several FC servers divide have no copies")

    async def finish(self) -> None:
        """Tell the other servers to end."""
        await self._tell(End(), ())

    async def _all(self, order: Order, parts: Sequence[BatchPart], own: Coroutine[Any, Any, T]) -> T:
        """Have an order carried out by all servers. On return ``parts`` are no longer used. Raises `PeerLostError`, and the errors
        of
        ``own``."""
        async with task_group() as tasks:
            tasks.create_task(self._tell(order, parts))
            done = tasks.create_task(own)
        return done.result()

    async def _tell(self, order: Order, parts: Sequence[BatchPart]) -> None:
        number, self._number = self._number, self._number + 1
        await together(*(self._send(to, number, order, parts) for to in self._followers))

    async def _send(self, to: PeerId, number: int, order: Order, parts: Sequence[BatchPart]) -> None:
        send = self._endpoint.send
        sent = [await send(to, order_tag(number), ValuePayload(order_to_value(order)), priority=PRIORITY)]
        for place, part in enumerate(parts):
            for index, tensor in enumerate(part.tensors):
                sent.append(await send(to, tensor_tag(number, place, index), tensor, priority=PRIORITY))
        for each in sent:  # workers may overwrite their memory once they have their answers
            await each.wait_released()


async def follow(endpoint: Endpoint, leader: PeerId, executor: Executor) -> None:
    """Follow the first FC server's orders until it says that training has ended. Raises `PeerLostError`, and the executor's
    errors."""
    number = 0
    while True:
        order = order_from_value((await endpoint.receive(leader, order_tag(number))).meta)
        match order:
            case Train(turn, tensors):
                await executor.train(turn, await _parts(endpoint, leader, number, tensors))
            case Update(applied):
                await executor.update(applied)
            case Evaluate(tensors):
                (part,) = await _parts(endpoint, leader, number, tensors)
                await executor.evaluate(part)
                del part
            case Keep():
                await executor.state()
            case End():
                return
        number += 1


async def _parts(endpoint: Endpoint, leader: PeerId, number: int, tensors: Sequence[int]) -> list[BatchPart]:
    parts = []
    for place, count in enumerate(tensors):
        came = [await endpoint.receive(leader, tensor_tag(number, place, index)) for index in range(count)]
        parts.append(BatchPart(ActivationsMeta.from_value(came[0].meta), tuple(came)))
    return parts


def order_tag(number: int) -> Tag:
    return ("fc_order", number)


def tensor_tag(number: int, part: int, place: int) -> Tag:
    return ("fc_order", number, part, place)


def order_to_value(order: Order) -> Value:
    """The order as a value for a header."""
    match order:
        case Train(turn, tensors):
            return ["train", turn.group, turn.step, turn.micro_batch, list(turn.positions), turn.last, turn.counts, list(tensors)]
        case Update(applied):
            return ["update", list(applied.groups), list(applied.steps), list(applied.staleness), applied.reason]
        case Evaluate(tensors):
            return ["evaluate", list(tensors)]
        case Keep():
            return ["keep"]
        case End():
            return ["end"]


def order_from_value(value: Value) -> Order:
    """The inverse of `order_to_value`. Raises `ProtocolError` for anything else."""
    match value:
        case ["train", int(group), int(step), int(micro_batch), list(positions), bool(last), bool(counts), list(tensors)]:
            return Train(Turn(group, step, micro_batch, _numbers(positions), last, counts), _numbers(tensors))
        case ["update", list(groups), list(steps), list(staleness), str(reason)]:
            return Update(Applied(_numbers(groups), _numbers(steps), _numbers(staleness), reason))
        case ["evaluate", list(tensors)]:
            return Evaluate(_numbers(tensors))
        case ["keep"]:
            return Keep()
        case ["end"]:
            return End()
    raise ProtocolError(f"the first FC server sent {value!r:.200}, which is not a valid order")


def _numbers(values: Sequence[Value]) -> tuple[int, ...]:
    numbers = tuple(each for each in values if isinstance(each, int))
    if len(numbers) != len(values):
        raise ProtocolError(f"an order of the first FC server has {values!r:.100} in place of numbers")
    return numbers
