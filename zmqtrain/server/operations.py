"""What changes a shard, as data: its server and its backup carry out the same operations in the same order.

===========  ===========================================  =============================================================
kind         arguments                                    meaning
===========  ===========================================  =============================================================
``push``     sender, tag, header (and the gradient)       a worker's push, as it came
``drop``     worker, life                                 this process is lost
``change``   step, members                                from this step on these train
``rest``     worker, step                                 the worker has trained all that there was since this step
``finish``   worker, life                                 the process needs no server any more
``keep``     step, show                                   keep the state for this checkpoint (``show``: to be read, too)
``free``     step                                         this checkpoint is complete, or will never be
===========  ===========================================  =============================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.value import ValuePayload

KINDS = ("push", "drop", "change", "rest", "finish", "keep", "free")
#: Topics of the messages between a shard's server and its backup: the state and the operations, and how far the backup has got.
LOG, LOGGED = "replica", "replicated"


def log_tag(shard: int) -> Tag:
    return (LOG, shard)


def logged_tag(shard: int) -> Tag:
    return (LOGGED, shard)


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a shard."""

    kind: str
    arguments: Sequence[Any]
    payload: Payload | None = None
    """push: the gradient, with the header that it came with."""

    @classmethod
    def push(cls, sender: PeerId, tag: Tag, payload: Payload) -> Operation:
        return cls("push", (sender, tag), payload)

    def message(self, number: int, *, lasting: bool, kind: str | None = None) -> Payload:
        """The message that tells the backup. ``lasting``: the gradient's memory does not change before the backup has answered."""
        head: list[Value] = [kind or self.kind, number]
        if self.payload is None:
            return ValuePayload([*head, *self.arguments])
        sender, tag = self.arguments
        payload = self.payload if lasting else own_copy(self.payload)
        return payload.with_meta([*head, sender, list(tag), self.payload.meta])

    @classmethod
    def of(cls, payload: Payload) -> tuple[str, int, Operation]:
        """The kind, the number and the operation of a message. Raises `ProtocolError`."""
        match payload.meta:
            case ["push" | "pending" as kind, int(number), str(sender), [*tag], meta]:
                return kind, number, cls.push(sender, cast(Tag, tuple(tag)), payload.with_meta(meta))
            case [str(kind), int(number), *arguments] if kind in KINDS:
                return kind, number, cls(kind, arguments)
        raise ProtocolError(f"a model server sent {payload.meta!r:.100} as an operation on a shard")


def over() -> Payload:
    """The message that tells a server that it need not keep its copy of a shard any more."""
    return ValuePayload(["over"])


def own_copy(payload: Payload) -> Payload:
    """The same in memory of its own."""
    mine = payload.empty_like()
    mine.copy_(payload)
    return mine.with_meta(payload.meta)
