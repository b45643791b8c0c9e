"""Arithmetic on whole buckets, away from the event loop: while the loop computes, no message moves and no heartbeat is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

T = TypeVar("T")

#: Less than this is computed at once: to ask a thread takes as long.
INLINE_BYTES = 128 * 1024


class Arithmetic:
    """One thread that computes what it is asked for, one after another, in the order in which it was asked. On virtual time
    everything is computed at once."""

    def __init__(self, name: str) -> None:
        """The thread, called ``name``, is started when there is something for it."""
        self._thread = ThreadPoolExecutor(1, name)

    async def do(self, work: Callable[[], T], *payloads: Payload) -> T:
        """What ``work()`` returns or raises. ``payloads``: what it reads and writes, and so how much there is to do.

        It is done to its end also where the caller is cancelled meanwhile, who gets the payloads' memory back after that.
        """
        return await self.do_sized(work, sum(payload.nbytes for payload in payloads if isinstance(payload, TensorPayload)))

    async def do_sized(self, work: Callable[[], T], nbytes: int) -> T:
        """Run ``work`` as `do` does, where it reads and writes ``nbytes`` bytes."""
        if nbytes < INLINE_BYTES:
            return work()
        outcome = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            while not outcome.done():
                with suppress(asyncio.CancelledError):  # once is enough
                    await asyncio.wait({outcome})
            raise

    def close(self) -> None:
        """Nothing more will be asked for."""
        self._thread.shutdown(wait=False)
