"""Stop an elastic run that has had too few workers for too long (``[job] min_workers``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from zmqtrain.membership.coordinator import Coordinator
    from zmqtrain.membership.view import View
    from zmqtrain.run.preemption import Preemption
    from zmqtrain.topology.schema import Topology


async def keep_enough(coordinator: Coordinator, topology: Topology, preemption: Preemption, say: Callable[[str], None]) -> None:
    """While fewer than ``min_workers`` are left, wait for others to come back; in the end have the run stop with a checkpoint.

    Workers that have trained all their steps count as there. Run it as a task beside the coordinator; it returns when the run has
    ended, or has been asked to stop."""
    job, every = topology.job, topology.compute.workers
    least = job.min_workers
    if least is None:
        return

    def lost(view: View) -> int:
        """How many are missing of those with which the run began; others may have come in their place. One that waits for others of
        its group does not train."""
        first = {f"worker/{rank}" for rank in range(every)}
        wait = sum(not worker.ready for worker in view.workers()) if topology.whole_groups else 0
        return sum(peer in first for peer in view.lost) + wait - sum(worker.peer not in first for worker in view.workers())

    def enough(view: View) -> bool:
        return every - lost(view) >= least

    await coordinator.running.wait()
    while await coordinator.until(lambda view: not enough(view)):
        say(
            f"{lost(coordinator.view)} of {every} workers are lost, and min_workers is {least}: unless others come back, the run "
            f"stops with a checkpoint in {job.min_workers_wait:g} s"
        )
        try:
            async with asyncio.timeout(job.min_workers_wait):
                if not await coordinator.until(enough):
                    return
        except TimeoutError:
            preemption.ask(f"[job] min_workers = {least}")
            return
        say(f"{least} workers or more are there again")
