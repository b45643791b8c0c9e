"""Words about callers that were not let in: at once about the first, then about many together."""

from __future__ import annotations

import asyncio
import logging

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.trouble import Intruders, Intrusion

log = logging.getLogger(__name__)


class IntruderLog:
    """Logs in the name of an endpoint. At the end, `tell` what is still untold."""

    def __init__(self, peer: PeerId) -> None:
        self.count = 0
        """Callers so far."""
        self._peer = peer
        self._intruders = Intruders()
        self._pardoned = 0  # callers that may come and go without a word
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.TimerHandle | None = None

    def pardon(self, count: int) -> None:
        """Do not log the next ``count`` callers that disconnect before they send anything."""
        self._pardoned += count

    def note(self, intrusion: Intrusion, origin: str) -> None:
        """A caller was not let in."""
        if intrusion is Intrusion.NO_KEY and self._pardoned:
            self._pardoned -= 1
            return
        self.count += 1
        self._intruders.note(intrusion, origin)
        if self._telling is None:
            self._telling = self._loop.call_at(self._intruders.due(self._loop.time()), self.tell)

    def tell(self) -> None:
        """Now, of all that have come since the last time."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        told = self._intruders.tell(self._loop.time())
        if told is not None:
            log.warning("%s: %s", self._peer, told)
