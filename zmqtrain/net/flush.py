"""Waiting until what an endpoint has sent has arrived, or does not arrive any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.link import Link


class Flush:
    """Looks at an endpoint's links whenever it is told that something `moved`."""

    def __init__(self, links: Mapping[PeerId, Link]) -> None:
        self._links = links
        self._moved: asyncio.Event | None = None  # of those who wait

    def moved(self) -> None:
        """Something may have arrived, or a link has ended."""
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def all_arrived(self, limit_s: float) -> list[PeerId]:
        """Wait until the links are idle, at most so long. Returns the peers of those that are not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._where(lambda link: not link.idle):
                    await self._next_move()
        return self._where(lambda link: not link.idle)  # all may have come while this waited for its turn

    async def on_its_way_arrived(self, patience_s: float) -> list[PeerId]:
        """Wait until nothing is on its way, or nothing has arrived anywhere for so long. Returns to whom something still is."""
        arrived = self._arrived()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s) as limit:
                while self._where(lambda link: link.delivering):
                    await self._next_move()
                    if arrived != (arrived := self._arrived()):
                        limit.reschedule(asyncio.get_running_loop().time() + patience_s)
        return self._where(lambda link: link.delivering)

    async def _next_move(self) -> None:
        self._moved = self._moved or asyncio.Event()
        await self._moved.wait()

    def _where(self, condition: Callable[[Link], bool]) -> list[PeerId]:
        return [link.peer for link in self._links.values() if condition(link)]

    def _arrived(self) -> tuple[tuple[PeerId, int], ...]:
        """How far all links are: another value means progress."""
        return tuple((link.peer, sum(sending.arrived for sending in link.sending)) for link in self._links.values())
