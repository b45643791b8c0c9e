"""A server's background work: tasks that end with it, tasks that it waits for, and messages to senders that it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from zmqtrain.errors import ProtocolError, ZmqTrainError
from zmqtrain.events import Recorder
from zmqtrain.net.endpoint import EndingError, Endpoint, PeerId, Tag

#: The most refusals being sent at once; beyond them, a flood of bad messages is dropped silently.
MOST_REFUSALS = 16


class ServerTasks:
    """Tasks of a server's group."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._ending: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it to its end, for which the server waits. Raises `EndingError`."""
        try:
            return self._tasks.create_task(coroutine)
        except RuntimeError as error:  # the group is ending because of another task's error
            coroutine.close()
            raise EndingError from error

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it, but not beyond the end of the server. Raises `EndingError`."""
        task = self.spawn(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def end(self) -> None:
        """Cancel the tasks that must not outlive the server."""
        for task in self._ending:
            task.cancel()


class Refusals:
    """Tells senders of bad messages what was wrong with them; the server continues."""

    def __init__(self, endpoint: Endpoint, method: str, recorder: Recorder, background: ServerTasks, *, timeout_s: float) -> None:
        """``method``: the sender's method that takes the message's tag and the reason."""
        self._endpoint, self._method, self._recorder = endpoint, method, recorder
        self._background, self._timeout_s = background, timeout_s
        self._under_way = 0

    def refuse(self, sender: PeerId, tag: Tag, error: ProtocolError) -> None:
        """Record it, and tell the sender."""
        self._recorder.event("refused", sender=sender, reason=str(error))
        if self._under_way < MOST_REFUSALS:
            self._under_way += 1
            self._background.run(self._tell(sender, tag, error))

    async def _tell(self, sender: PeerId, tag: Tag, error: ProtocolError) -> None:
        try:
            await self._endpoint.request(sender, self._method, list(tag), str(error), timeout=self._timeout_s)
        except ZmqTrainError as told:
            self._recorder.event("refused", sender=sender, reason=f"{sender} could not be told: {told}")
        finally:
            self._under_way -= 1
