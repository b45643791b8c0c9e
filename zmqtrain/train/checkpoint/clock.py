"""Checkpoints by time: at a fixed interval all workers agree on a step that none has passed yet, and write a checkpoint there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
        self, endpoint: Endpoint, workers: Sequence[PeerId], every_s: float, *, timeout_s: float, journal: Journal | None = None
    ) -> None:
        self._journal = journal
        self._endpoint, self._workers, self._every_s, self._timeout_s = endpoint, workers, every_s, timeout_s
        self._begun = asyncio.Event()

    @classmethod
    def of(
        cls, endpoint: Endpoint, topology: Topology, placement: Placement, journal: Journal | None = None
    ) -> CheckpointClock | None:
        """The clock of a run; ``None`` if checkpoints are not taken by time. ``journal`` keeps what was decided."""
        every_s = topology.job.checkpoint_s
        if every_s is None:
            return None
        workers = tuple(worker.peer for worker in placement.workers)
        return cls(endpoint, workers, every_s, timeout_s=topology.job.timeouts.barrier_s, journal=journal)

    def begin(self) -> None:
        """A worker that keeps checkpoints has started (scripts and modelled devices keep none)."""
        self._begun.set()

    async def run(self, complete: Callable[[int], Awaitable[None]]) -> None:
        """Run until training is about to end. ``complete(step)`` waits for a checkpoint: there is one at a time."""
        await self._begun.wait()
        while True:
            await asyncio.sleep(self._every_s)
            try:
                step = await stop_together(
                    self._endpoint, self._workers, timeout_s=self._timeout_s, why="keep", journal=self._journal
                )
            except ConnectivityError:
                continue  # some workers are gone or busy; whether that ends the run is decided elsewhere
            if step is None:
                return
            await complete(step)
