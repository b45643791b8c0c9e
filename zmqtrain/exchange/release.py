"""Which steps have been let begin, in a run whose workers may be lost and come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from zmqtrain.exchange.members import Members


class Release:
    """Lets each step begin once. Whoever takes part from a step on gets the state with which it begins first."""

    def __init__(self, members: Members, give: Callable[[int], Awaitable[None]]) -> None:
        """``give(step)`` gives that state to those who have asked for it."""
        self._members, self._give = members, give
        self._newest = -1

    async def begin_late(self, first: int) -> None:
        """This worker has come, has a state, and begins with this step, if there is still something to train in it."""
        self._newest = first if await self._members.release(first) else first - 1

    async def may_begin(self, step: int) -> bool:
        """Whether ``step`` may begin: not if, as far as is known, there is nothing left to train."""
        if step > self._newest:
            if not await self._members.release(step):
                return False
            self._newest = step
            await self._give(step)
        return True
