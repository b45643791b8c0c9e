"""Waiting until what an endpoint has sent has arrived, or can no longer arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.link import Link


class Flush:
    """Checks an endpoint's links whenever it is told that something `moved`."""

    def __init__(self, links: Mapping[PeerId, Link]) -> None:
        self._links = links
        self._waiting = 0
        self._moved: asyncio.Event | None = None  # shared by all waiters

    @property
    def waits(self) -> bool:
        """Whether anybody waits until something has arrived."""
        return self._waiting > 0

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for a move."""
        return self._moved is not None

    def moved(self) -> None:
        """Something may have arrived, or a link has ended."""
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def all_arrived(self, limit_s: float) -> list[PeerId]:
        """Wait until the links are idle, at most ``limit_s`` seconds. Returns the peers of those that are not."""
        with suppress(TimeoutError), self._wait():
            async with asyncio.timeout(limit_s):
                while self._where(lambda link: not link.idle):
                    await self._next_move()
        return self._where(lambda link: not link.idle)  # everything may have arrived while this task waited for its turn

    async def on_its_way_arrived(self, patience_s: float) -> list[PeerId]:
        """Wait until nothing is on its way, or nothing has arrived anywhere for ``patience_s`` seconds. Returns the peers to which
        something is still on its way."""
        arrived = self._arrived()
        with suppress(TimeoutError), self._wait():
            async with asyncio.timeout(patience_s) as limit:
                while self.undelivered():
                    await self._next_move()
                    if arrived != (arrived := self._arrived()):
                        limit.reschedule(asyncio.get_running_loop().time() + patience_s)
        return self.undelivered()

    def undelivered(self) -> list[PeerId]:
        """The peers to which something is on its way."""
        return self._where(lambda link: link.delivering)

    @contextmanager
    def _wait(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _next_move(self) -> None:
        self._moved = self._moved or asyncio.Event()
        await self._moved.wait()

    def _where(self, condition: Callable[[Link], bool]) -> list[PeerId]:
        return [link.peer for link in self._links.values() if condition(link)]

    def _arrived(self) -> tuple[tuple[PeerId, int], ...]:
        """How far all links are; another value means progress."""
        return tuple((link.peer, sum(sending.arrived for sending in link.sending)) for link in self._links.values())
