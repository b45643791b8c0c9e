"""Arithmetic on large payloads that lets the event loop's other work in between: while it stands still no tensor moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

#: What is worked on at once: about a millisecond, and less than a link has under way.
PIECE_BYTES = 4 << 20


async def piece_by_piece(work: Callable[..., None], *payloads: Payload) -> None:
    """Do ``work(*pieces)`` for each piece of payloads of one size, in order.

    It is done for all of them also where the caller is cancelled meanwhile: nothing is left half done.
    """
    first = payloads[0]
    if first.nbytes <= PIECE_BYTES or not all(isinstance(payload, TensorPayload) for payload in payloads):
        work(*payloads)  # also without elements in memory: in simulation arithmetic takes no time
        return
    numel = first.numel
    step = max(1, numel * PIECE_BYTES // first.nbytes)
    cancelled: asyncio.CancelledError | None = None
    for start in range(0, numel, step):
        work(*(payload.part(start, min(start + step, numel)) for payload in payloads))
        if cancelled is None:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
