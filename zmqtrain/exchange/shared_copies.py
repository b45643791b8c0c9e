"""Copies made for sending: in memory that the processes of a host share, so that a message contains only their location."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from zmqtrain.arena.arena import Arena
from zmqtrain.errors import HostMemoryError
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

#: Makes a payload of the same dtype and size, with undefined content, that is kept for the whole run.
Like: TypeAlias = Callable[[Payload], Payload]


def like_in(arena: Arena | None) -> Like:
    """A function that allocates payloads in shared memory, as far as there is any."""

    def like(payload: Payload) -> Payload:
        if arena is None or not isinstance(payload, TensorPayload) or not payload.nbytes:
            return payload.empty_like()
        try:
            block = arena.allocate(payload.nbytes, "a copy to be sent")
        except HostMemoryError:
            return payload.empty_like()
        return TensorPayload.received(block.memory, payload.dtype, (payload.numel,))

    return like
