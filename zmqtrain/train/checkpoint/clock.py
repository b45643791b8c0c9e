"""Checkpoints by time or on request: all workers agree on a step that none of them has passed, and write one there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from zmqtrain.errors import ConnectivityError
from zmqtrain.membership.common_stop import stop_together
from zmqtrain.membership.journal import Journal
from zmqtrain.net.endpoint import Endpoint, PeerId

if TYPE_CHECKING:
    from zmqtrain.topology.placement import Placement
    from zmqtrain.topology.schema import Topology


class CheckpointClock:
    """The coordinator's side. `run` it as a task; it asks the workers only after `begin`."""

    def __init__(
        self,
        endpoint: Endpoint,
        workers: Callable[[], Sequence[PeerId]],
        every_s: float | None,
        *,
        timeout_s: float,
        journal: Journal | None = None,
    ) -> None:
        """``every_s``: the interval; ``None``: only on request (`ask`)."""
        self._journal = journal
        self._endpoint, self._workers, self._every_s, self._timeout_s = endpoint, workers, every_s, timeout_s
        self._begun, self._asked = asyncio.Event(), asyncio.Event()

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        topology: Topology,
        placement: Placement,
        journal: Journal | None = None,
        members: Callable[[], Collection[PeerId]] | None = None,
    ) -> CheckpointClock:
        """The clock of a run. ``journal`` keeps what was decided. ``members``: who is there now."""
        every_s = topology.job.checkpoint_s

        def workers() -> Sequence[PeerId]:
            here = () if members is None or not placement.spare_workers else members()
            first = [worker.peer for worker in placement.workers]
            return [*first, *(spare.peer for spare in placement.spare_workers if spare.peer in here)]

        return cls(endpoint, workers, every_s, timeout_s=topology.job.timeouts.barrier_s, journal=journal)

    def begin(self) -> None:
        """A worker that keeps checkpoints has started (scripts and modelled devices keep none)."""
        self._begun.set()

    def ask(self) -> None:
        """Have a checkpoint written now, or as soon as workers that keep checkpoints have started."""
        self._asked.set()

    async def run(self, complete: Callable[[int], Awaitable[None]]) -> None:
        """Run until training is about to end. ``complete(step)`` waits for a checkpoint: there is one at a time."""
        await self._begun.wait()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._asked.wait()
            self._asked.clear()
            try:
                step = await stop_together(
                    self._endpoint, self._workers(), timeout_s=self._timeout_s, why="keep", journal=self._journal
                )
            except ConnectivityError:
                continue  # some workers are gone or busy; whether that ends the run is decided elsewhere
            if step is None:
                return
            await complete(step)
