"""Log lines about callers that were not admitted: at once about the first, then about many together."""

from __future__ import annotations

import asyncio
import logging

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.trouble import Intruders, Intrusion

log = logging.getLogger(__name__)


class IntruderLog:
    """Logs in the name of an endpoint. Call `tell` at the end for what has not been logged yet."""

    def __init__(self, peer: PeerId) -> None:
        self.count = 0
        """The number of callers so far."""
        self._peer = peer
        self._intruders = Intruders()
        self._pardoned = 0  # callers that may connect and disconnect without a log line
        self._loop = asyncio.get_running_loop()
        self._telling: asyncio.TimerHandle | None = None

    def pardon(self, count: int) -> None:
        """Do not log the next ``count`` callers that disconnect before they send anything."""
        self._pardoned += count

    def note(self, intrusion: Intrusion, origin: str) -> None:
        """A caller was not admitted."""
        if intrusion in (Intrusion.NO_KEY, Intrusion.NO_TOKEN) and self._pardoned:
            self._pardoned -= 1
            return
        self.count += not intrusion.of_admitted
        self._intruders.note(intrusion, origin)
        if self._telling is None:
            self._telling = self._loop.call_at(self._intruders.due(self._loop.time()), self.tell)

    def tell(self) -> None:
        """Log all callers since the last line now."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        told = self._intruders.tell(self._loop.time())
        if told is not None:
            log.warning("%s: %s", self._peer, told)
