"""The end of training: a worker waits until all others have trained, however far behind they are, as long as they make progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


class AllTrained:
    """One worker's side of that wait."""

    def __init__(self, context: RoleContext, step: Callable[[], int]) -> None:
        """``step()`` returns how many steps this worker has trained."""
        self._context, self._step = context, step
        context.endpoint.serve("step", self._on_step)

    async def wait(self, members: Members, *, alike: bool) -> int:
        """Wait until all workers have called this.

        ``alike``: all groups train the same number of steps. Returns how many steps were trained; if not ``alike``, the largest
        number.

        A group that trains asynchronously may be further behind than any time-out allows. A time-out is therefore no error while
        some other group has made steps since the last time-out. Raises `PeerTimeoutError` if none has, and `PeerLostError`."""
        membership = self._context.membership
        before: list[int] = []
        while True:
            try:
                if not alike:
                    return await membership.agree("trained", self._step(), members.at(self._step()))
                await membership.barrier("trained")
            except PeerTimeoutError:
                now = await self._steps_of_groups()
                if now == before:
                    raise
                before = now
            else:
                return self._step()

    async def of_living(self, members: Members, more: Callable[[], bool]) -> int | None:
        """As `wait`, with members of whom some may be lost: returns ``None`` if others take part from now on, so that there may be
        ``more()`` to train."""
        before: list[int] = []
        while True:
            try:
                return await members.all_trained(self._step(), more)
            except PeerTimeoutError:
                now = await self._steps_of_living(members)
                if now == before:
                    raise
                before = now

    async def _steps_of_living(self, members: Members) -> list[int]:
        endpoint, step, timeout_s = self._context.endpoint, self._step(), self._context.timeouts.request_s
        others = [peer for peer in members.at(step) if peer != endpoint.peer and members.there(peer, step)]
        answers = await asyncio.gather(
            *(endpoint.request(peer, "step", timeout=timeout_s) for peer in others), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PeerLostError):
                raise answer
        return [answer.meta for answer in answers if not isinstance(answer, BaseException) and isinstance(answer.meta, int)]

    async def _steps_of_groups(self) -> list[int]:
        endpoint, placement, timeout_s = self._context.endpoint, self._context.placement, self._context.timeouts.request_s
        firsts = [placement.group_members(group)[0] for group in range(placement.groups)]
        others = [peer for peer in firsts if peer != endpoint.peer]
        answers = await asyncio.gather(*(endpoint.request(peer, "step", timeout=timeout_s) for peer in others))
        return [answer.meta for answer in answers if isinstance(answer.meta, int)]

    async def _on_step(self, caller: PeerId) -> Value:
        return self._step()
