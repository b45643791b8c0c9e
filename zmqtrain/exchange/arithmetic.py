"""Arithmetic on whole buckets, outside the event loop: while the loop computes, no message is sent and no heartbeat is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from zmqtrain.waiting import to_the_end
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

T = TypeVar("T")

#: Work on fewer bytes is done at once: handing it to a thread would take as long.
INLINE_BYTES = 128 * 1024


class Arithmetic:
    """One thread that performs work in the order of requests. On virtual time all work is done at once."""

    def __init__(self, name: str) -> None:
        """The thread, called ``name``, is started when there is work for it."""
        self._thread = ThreadPoolExecutor(1, name)

    async def do(self, work: Callable[[], T], *payloads: Payload) -> T:
        """Run ``work()`` and return its result, or raise its error. ``payloads``: what it reads and writes, which shows its size.

        The work runs to its end even if the caller is cancelled, and only then may the caller reuse the payloads' memory.
        """
        return await self.do_sized(work, sum(payload.nbytes for payload in payloads if isinstance(payload, TensorPayload)))

    async def do_sized(self, work: Callable[[], T], nbytes: int) -> T:
        """Run ``work``, which reads and writes ``nbytes`` bytes, as `do` does."""
        if nbytes < INLINE_BYTES:
            return work()
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def close(self) -> None:
        """No more work will be requested."""
        self._thread.shutdown(wait=False)
