"""How busy a server is, as events ``load``. `Load` is sans-IO: the loop's clock is an argument."""

from __future__ import annotations

import asyncio
from typing import Any

from zmqtrain.events import Recorder

#: Seconds between two events, as long as something arrives.
LOAD_S = 2.0


class LoadEvents:
    """Records the load of a loop that handles messages: `begin` and `done` for each."""

    def __init__(self, recorder: Recorder) -> None:
        """Make it in the event loop."""
        self._recorder, self._clock = recorder, asyncio.get_running_loop().time
        self._began = self._clock()
        self._load = Load(self._began)

    def begin(self) -> None:
        """A message is taken."""
        self._began = self._clock()

    def done(self, *, waiting: int, nbytes: int) -> None:
        """It was handled. ``waiting``: the messages that wait behind it. ``nbytes``: its size."""
        told = self._load.handled(self._began, self._clock(), waiting=waiting, nbytes=nbytes)
        if told is not None:
            self._recorder.event("load", **told)


class Load:
    """Tell it what the server has handled (`handled`)."""

    def __init__(self, now: float) -> None:
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._count = self._waiting = self._most = self._nbytes = 0
        self._busy_s = 0.0

    def handled(self, began: float, now: float, *, waiting: int, nbytes: int = 0) -> dict[str, Any] | None:
        """A message was handled.

        Args:
            began: when the server took it.
            now: when it was done with it.
            waiting: the messages that waited behind it at that time.
            nbytes: its size.

        Returns:
            The values of an event about everything since the previous one, if it is due.
        """
        self._count += 1
        self._waiting += waiting
        self._most = max(self._most, waiting)
        self._nbytes += nbytes
        self._busy_s += now - began
        seconds = now - self._since
        if seconds < LOAD_S:
            return None
        told: dict[str, Any] = {
            "seconds": seconds,
            "messages": self._count,
            "bytes": self._nbytes,
            "busy": min(1.0, self._busy_s / seconds),
            "waiting": self._waiting / self._count,
            "waiting_most": self._most,
        }
        self._begin(now)
        return told
