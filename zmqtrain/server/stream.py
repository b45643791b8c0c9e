"""What a shard's server sends its backup: messages in one order, from a queue, so that the shard's work goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from zmqtrain.errors import PeerLostError
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.wire.payload import Payload

#: The priority of what answers to workers wait for.
FIRST = 1 << 20
#: The bytes that may wait beyond a copy of the shard itself. A shard whose operations come faster than the network takes them
#: waits.
MOST_WAITING_BYTES = 64 << 20


class Stream:
    """The messages for one backup. `run` it as a task."""

    def __init__(self, endpoint: Endpoint, to: PeerId, tag: Tag) -> None:
        self.to = to
        self.lost: PeerLostError | None = None
        """The error that ended it."""
        self._endpoint, self._tag = endpoint, tag
        self._queue: deque[tuple[Payload, int]] = deque()
        self._nbytes = 0
        self._most = MOST_WAITING_BYTES
        self._changed = asyncio.Event()
        self._closed = False

    def begin(self, messages: Iterable[Payload]) -> None:
        """Send these first, however large they are."""
        for message in messages:
            self.put(message, 0)
        self._most += self._nbytes

    def put(self, message: Payload, priority: int = FIRST) -> None:
        """Send the message after all others. Its memory must not change before the backup has answered."""
        if not self._closed:
            self._queue.append((message, priority))
            self._nbytes += message.nbytes
            self._changed.set()

    async def room(self) -> None:
        """Wait until few bytes are waiting."""
        while self._nbytes > self._most and not self._closed:
            self._changed.clear()
            await self._changed.wait()

    def fail(self, error: PeerLostError) -> None:
        """The backup is out of reach; what was sent may not have arrived."""
        if not self._closed:
            self.lost = error
            self.close()

    def close(self) -> None:
        """Send nothing more: the backup is gone."""
        self._closed = True
        self._queue.clear()
        self._nbytes = 0
        self._changed.set()

    async def run(self) -> None:
        """Send until closed, or until the backup is lost."""
        while not self._closed:
            if not self._queue:
                self._changed.clear()
                await self._changed.wait()
                continue
            message, priority = self._queue.popleft()
            try:
                await self._endpoint.send(self.to, self._tag, message, priority=priority)
            except PeerLostError as error:
                self.fail(error)
            else:
                self._nbytes = max(0, self._nbytes - message.nbytes)
                self._changed.set()
