"""The team that a worker belongs to, with model servers, where groups of several workers survive losses (`zmqtrain.data.teams`).

When the team changes, all its workers give up the steps that the old team has under way, and go on as the new one::

    change of the team -> exchanges under way are abandoned, their buckets are free -> the step ends, and counts only as far as the
    old team's pushes have arrived -> ... -> read the parameters with which the new team begins -> its first step
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from zmqtrain.data.teams import Team
from zmqtrain.exchange.members import Members
from zmqtrain.net.endpoint import PeerId
from zmqtrain.waiting import abandoned


class OwnTeam:
    """Follows the changes of this worker's team. Make it before the first step; `stop` it."""

    def __init__(
        self,
        members: Members,
        *,
        changed: Callable[[], Awaitable[None]],
        read: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """``changed()`` is called at once when the team is another one, and abandons what the old one has under way; what it
        returns is awaited until that is free. ``read()`` reads the parameters with which a team begins."""
        self.now: Team | None = members.team()
        """The team now; ``None`` for a worker that comes late, until it takes part."""
        self._members, self._changed, self._read = members, changed, read
        # The life of the team with whose first parameters this worker has begun.
        self._entered: int | None = None if self.now is None else self.now.life
        self._giving_up: asyncio.Task[None] | None = None
        self._entering: asyncio.Task[None] | None = None
        members.on_change(self._on_change)
        members.before_steps(self.enter)

    def _on_change(self, step: int, living: tuple[PeerId, ...]) -> None:
        """All know who trains from a step on."""
        team = self._members.team()
        if team is None or (self.now is not None and team.life == self.now.life):
            return
        self.now = team
        freed = self._changed()
        if self._entering is not None:
            self._entering.cancel()
        self._giving_up = asyncio.get_running_loop().create_task(_after(self._giving_up, freed), name="give up a team's steps")

    async def enter(self) -> bool:
        """Read the parameters with which this worker's team begins. Returns whether there was nothing to read any more; if not, the
        team may be another one meanwhile."""
        team = self.now
        if team is None or self._entered == team.life:
            return True
        if self._giving_up is not None:
            await asyncio.wait({self._giving_up})
        if self.now is team:
            self._entering = entering = asyncio.get_running_loop().create_task(self._read(), name="enter")
            try:
                await asyncio.wait({entering})
            finally:
                self._entering = None
                await abandoned([entering])
            if self.now is team:
                entering.result()
                self._entered = team.life
        return False

    async def entered(self) -> None:
        """Return when this worker has the parameters with which its newest team begins."""
        while not await self.enter():
            await self._members.settled()

    async def stop(self) -> None:
        if self._giving_up is not None:
            await abandoned([self._giving_up])


async def _after(before: asyncio.Task[None] | None, freed: Awaitable[None]) -> None:
    if before is not None:
        await asyncio.wait({before})
    await freed
