"""Stop a run with a checkpoint: its machines are about to be taken away, or the user wants it to end.

Ctrl-C, ``zmqtrain stop`` and SIGTERM ask the launcher for it, and the run counts as interrupted. SIGUSR1 asks for it, to the
launcher or to any agent, and the run counts as preempted (`zmqtrain.launcher.signals` says which other signals mean the same).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqtrain.errors import ConnectivityError
from zmqtrain.membership.common_stop import stop_together

if TYPE_CHECKING:
    from zmqtrain.membership.coordinator import Coordinator
    from zmqtrain.membership.description import RunDescription
    from zmqtrain.membership.journal import Journal
    from zmqtrain.net.endpoint import Endpoint, PeerId
    from zmqtrain.wire.payload import Value

#: The exit code of a preempted run, which can be continued with ``--resume``.
PREEMPTED = 128 + signal.SIGUSR1
#: The exit code of a run that the user has stopped.
INTERRUPTED = 128 + signal.SIGINT
#: The request by which agents ask to stop.
PREEMPT = "preempt"


class Preemption:
    """The coordinator's side. `run` it as a task beside the coordinator."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._by = "a signal"
        self._person = False

    def ask(self, by: str = "a signal", *, person: bool = False) -> None:
        """Stop the run with a checkpoint. Further calls have no effect. ``person``: the user asks, and can ask again to stop at
        once."""
        if not self._asked.is_set():
            self._by, self._person = by, person
            self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether the run was asked to stop."""
        return self._asked.is_set()

    async def run(
        self,
        endpoint: Endpoint,
        coordinator: Coordinator,
        description: RunDescription,
        say: Callable[[str], None],
        journal: Journal | None = None,
    ) -> None:
        """Wait for a request to stop, and have all workers stop; the run then ends by itself. If that is not possible, it is
        halted.

        Cancel it when the run has ended."""

        async def on_preempt(caller: PeerId) -> Value:
            self.ask(caller)
            return None

        endpoint.serve(PREEMPT, on_preempt)
        await self._asked.wait()
        timeouts = description.topology.job.timeouts
        why = ""
        kept = "model could be left" if description.script else "checkpoint could be written"  # a script keeps its own checkpoints
        if not coordinator.running.is_set():
            why = "training had not begun"
        else:
            once_more = " (ask again to stop at once)" if self._person else ""
            what = "leave the model" if description.script else "keep a checkpoint"
            say(f"{self._by} asks to stop: all workers continue to a common step and {what}{once_more}")
            try:
                if await stop_workers(endpoint, coordinator, timeout_s=timeouts.barrier_s, journal=journal) is None:
                    say("training is about to end by itself")
                    return
                await asyncio.sleep(timeouts.barrier_s)  # the run ends meanwhile, and this task with it
                why = f"the run had not ended {timeouts.barrier_s:g} s later"
            except ConnectivityError as error:
                why = str(error)
        message = f"{self._by} asked to stop, but no {kept}: {why}"
        if self._person:
            say(f"stopping (ask again to stop at once); no {kept}: {why}")
        kind, code = ("interrupted", INTERRUPTED) if self._person else ("preempted", PREEMPTED)
        coordinator.halt({"kind": kind, "message": message, "exit_code": code})


async def stop_workers(
    endpoint: Endpoint, coordinator: Coordinator, *, timeout_s: float, journal: Journal | None = None
) -> int | None:
    """Let the workers that are in the run continue to a common step and stop there. Returns the step; ``None`` if training is
    about to end by itself. Raises like `stop_together`."""
    workers = [peer for peer in coordinator.view.members if peer.startswith("worker/")]
    return await stop_together(endpoint, workers, timeout_s=timeout_s, journal=journal)
