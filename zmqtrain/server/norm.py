"""The norm of a gradient that is distributed over several servers."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.server_messages import norm_tag
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time
from zmqtrain.wire.value import ValuePayload


class ServerSum:
    """Sums a number over servers, each of which must call `of` equally often."""

    def __init__(self, endpoint: Endpoint, members: Sequence[PeerId], barrier_s: float) -> None:
        self._endpoint = endpoint
        self._members = members
        self._barrier_s = barrier_s
        self._calls = 0

    async def of(self, mine: float) -> float:
        """The sum of ``mine`` over all members, in their order, so that it has the same bits on each."""
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
        async with in_time(other, "its sum of squared gradients", self._barrier_s):
            answer = (await self._endpoint.receive(other, norm_tag(call))).meta
        if not isinstance(answer, float):
            raise ProtocolError(f"{other} sent {answer!r:.100} as its sum of squared gradients; it must be a number")
        return answer
