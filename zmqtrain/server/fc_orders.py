"""What the first of several FC servers tells the others to compute, as data.

=========  ==================================  ==============================================================
message    tag                                 carries
=========  ==================================  ==============================================================
order      ``("fc_order", number)``            an `Order`; all are carried out by their numbers
tensor     ``("fc_order", number, part, n)``   tensor n of a worker's part, with its meta as the worker sent it
=========  ==================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import Tag
from zmqtrain.server.fc_queue import Applied, Turn
from zmqtrain.wire.payload import Value


@dataclass(frozen=True, slots=True)
class Train:
    """Forward, loss and backward."""

    turn: Turn
    tensors: tuple[int, ...]
    """How many follow of each worker's part."""


@dataclass(frozen=True, slots=True)
class Update:
    """A step of the optimizer."""

    applied: Applied


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The metrics of a batch."""

    tensors: tuple[int, ...]
    """How many follow: of one part."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Bring the layers' state together."""


@dataclass(frozen=True, slots=True)
class End:
    """All workers have finished."""


Order: TypeAlias = Train | Update | Evaluate | Keep | End


def order_tag(number: int) -> Tag:
    return ("fc_order", number)


def tensor_tag(number: int, part: int, place: int) -> Tag:
    return ("fc_order", number, part, place)


def order_to_value(order: Order) -> Value:
    """For a header."""
    match order:
        case Train(turn, tensors):
            return ["train", turn.group, turn.step, turn.micro_batch, list(turn.positions), turn.last, list(tensors)]
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
        case ["train", int(group), int(step), int(micro_batch), list(positions), bool(last), list(tensors)]:
            return Train(Turn(group, step, micro_batch, _numbers(positions), last), _numbers(tensors))
        case ["update", list(groups), list(steps), list(staleness), str(reason)]:
            return Update(Applied(_numbers(groups), _numbers(steps), _numbers(staleness), reason))
        case ["evaluate", list(tensors)]:
            return Evaluate(_numbers(tensors))
        case ["keep"]:
            return Keep()
        case ["end"]:
            return End()
    raise ProtocolError(f"the first FC server orders {value!r:.200}, which is no order")


def _numbers(values: Sequence[Value]) -> tuple[int, ...]:
    numbers = tuple(each for each in values if isinstance(each, int))
    if len(numbers) != len(values):
        raise ProtocolError(f"an order of the first FC server has {values!r:.100} where numbers belong")
    return numbers
