"""The norm of a gradient that lies on several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from zmqtrain.errors import PeerTimeoutError, ProtocolError
from zmqtrain.exchange.server_messages import norm_tag
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.wire.value import ValuePayload

T = TypeVar("T")


class ServerSum:
    """Sums a number over servers, each of which must call `of` equally often."""

    def __init__(self, endpoint: Endpoint, members: Sequence[PeerId], wait_s: float) -> None:
        self._endpoint = endpoint
        self._members = members
        self._wait_s = wait_s
        self._calls = 0

    async def of(self, mine: float) -> float:
        """The sum, in the order of members, so that it is the same bits on each."""
        tag = norm_tag(self._calls)
        self._calls += 1
        for other in self._members:
            if other != self._endpoint.peer:
                await self._endpoint.send(other, tag, ValuePayload(mine))
        total = 0.0
        for other in self._members:
            total += mine if other == self._endpoint.peer else await self._number(other, self._calls - 1)
        return total

    async def _number(self, other: PeerId, call: int) -> float:
        wait = self._endpoint.receive(other, norm_tag(call))
        answer = (await in_time(wait, other, "its sum of squared gradients", self._wait_s)).meta
        if not isinstance(answer, float):
            raise ProtocolError(f"{other} sent {answer!r:.100} as its sum of squared gradients")
        return answer


async def in_time(wait: Awaitable[T], peer: PeerId, what: str, limit_s: float) -> T:
    """What ``wait`` gives. Raises `PeerTimeoutError` after ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            return await wait
    except PeerTimeoutError:
        raise
    except TimeoutError:
        raise PeerTimeoutError(peer, what, limit_s) from None
