"""The event loop of ranks whose own threads block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from zmqtrain.net.loop import new_event_loop

T = TypeVar("T")


class NetworkThread:
    """An event loop in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="zmqtrain-c10d-network", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on the loop; block until it is done. Returns its result."""
        return self.begin(work).result()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``work`` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """End the thread. Nothing may be called any more."""
        self.call(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def close(self) -> None:
        """End the loop and the thread."""
        self.stop()
        self.loop.close()
