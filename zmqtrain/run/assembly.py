"""The coordinator's side of a run, put together in one place for every world: launched, emulated, simulated, embedded, in tests.

::

    settings = coordinator_settings(topology, token)
    endpoint = await open_zeromq(COORDINATOR, settings=settings)     # or an endpoint of any other network
    assembly = Assembly(endpoint, description, checkpoints=folder)   # roles may join from now on
    outcome = await assembly.run()                                   # until the run has ended
    ending = ending_of(outcome)

Roles enter by `zmqtrain.run.enter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.errors import ConnectivityError, UsageError
from zmqtrain.membership.agent_link import LEAVES
from zmqtrain.membership.common_stop import tell_again
from zmqtrain.membership.coordinator import Coordinator, EventCallback, ReportCallback
from zmqtrain.membership.description import RunDescription, serve_description
from zmqtrain.membership.environment import FEW, net_settings
from zmqtrain.membership.journal import Journal
from zmqtrain.net.curve import Identity
from zmqtrain.run.draining import check_drain, drain
from zmqtrain.run.joining import Places
from zmqtrain.run.preemption import Preemption, stop_workers
from zmqtrain.run.strength import keep_enough
from zmqtrain.topology.placement import heads_of, place
from zmqtrain.train.checkpoint.collector import CheckpointCollector, OnEvent

if TYPE_CHECKING:
    from zmqtrain.membership.actions import Outcome
    from zmqtrain.net.endpoint import Endpoint, PeerId
    from zmqtrain.net.settings import NetSettings
    from zmqtrain.topology.schema import Topology
    from zmqtrain.wire.payload import Value

#: Each member beyond the first ones lets the coordinator wait a little longer for further messages before it takes those that have
#: arrived, up to a time that nobody notices where hundreds wait for each other.
PAUSE_EACH_S, MOST_PAUSE_S = 5e-5, 0.02


def _ignore(_text: str) -> None:
    """Ignore it."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks for what happens in a run. They are called on the loop's thread and must not block."""

    on_event: EventCallback | None = None
    """``(kind, values)``: an event of the membership."""
    on_report: ReportCallback | None = None
    """``(peer, events)``: a role's own events."""
    on_checkpoint: OnEvent | None = None
    """``(kind, values)``: an event about a checkpoint."""
    say: Callable[[str], None] = _ignore
    """A line for the user."""


class Assembly:
    """Coordinator, description service, checkpoint collector and preemption of one run, on one endpoint.

    Make it inside the event loop, before any role knows the endpoint's address. The endpoint stays the caller's to close.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        description: RunDescription,
        *,
        checkpoints: Path | None,
        model: Path | None = None,
        agents: bool = True,
        listeners: Listeners | None = None,
        preemption: Preemption | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Serve the requests of roles on the endpoint.

        Args:
            endpoint: the coordinator's.
            description: the run's description for the roles.
            checkpoints: the folder for checkpoints; ``None``: none are kept, and the description says so.
            model: the folder in which the run's newest model is left; ``None``: it is not kept.
            agents: whether every host has an agent that reports on its roles.
            listeners: the callbacks for what happens.
            journal: keeps what is decided, for another assembly of this run; if it holds something, this is that one.
            preemption: takes requests to stop with a checkpoint, for a caller that needs it before the run begins.

        Raises `CheckpointError` if the checkpoint to resume is missing or has another shape.
        """
        listeners = listeners or Listeners()
        if checkpoints is None:
            description = without_checkpoints(description)
        topology, placement = description.topology, description.placement
        self.description = description
        """The run's description for the roles."""
        self.timeouts = topology.job.timeouts
        self.preemption = preemption or Preemption()
        self._endpoint, self._say, self._on_event = endpoint, listeners.say, listeners.on_event
        self.coordinator = Coordinator(
            endpoint,
            placement,
            self.timeouts,
            agents=agents,
            elastic=topology.elastic,
            lasting=topology.exchange.kind == "model_server",
            whole_groups=topology.whole_groups,
            heads=heads_of(topology, placement),
            copies=topology.replicated,
            on_event=listeners.on_event,
            on_report=listeners.on_report,
            journal=journal,
        )
        self._journal = journal
        self.collector = CheckpointCollector.of(
            endpoint,
            checkpoints,
            topology,
            placement,
            resume=None if description.resume is None else Path(description.resume),
            members=lambda: self.coordinator.view.members,
            on_event=listeners.on_checkpoint,
            model=model,
            journal=journal,
        )
        serve_description(endpoint, description)
        self._leaving: asyncio.Queue[str] = asyncio.Queue()  # hosts whose agents were told to end
        endpoint.serve(LEAVES, self._on_leaves)
        self._places = Places(topology, placement)

    async def run(self) -> Outcome:
        """Keep the membership until the run has ended; meanwhile collect checkpoints, and stop with one on request.

        Returns how it ended. Cancelling it refuses all requests that wait for the coordinator, and does not notify other members.
        Errors of the coordinator's side itself are raised as an ``ExceptionGroup``.
        """
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self.collector.run(), name="collect checkpoints"),
                group.create_task(self._preempt(), name="preemption"),
                group.create_task(self._keep_enough(), name="enough workers"),
                group.create_task(self._let_leave(), name="let hosts leave"),
            ]
            outcome = await self.coordinator.run()
            for task in background:
                task.cancel()
        return outcome

    async def _preempt(self) -> None:
        """First settle what another coordinator had begun to agree on with the workers."""
        if self._journal is not None:
            workers = [peer for peer in self.coordinator.view.members if peer.startswith("worker/")]
            await tell_again(self._endpoint, workers, self._journal, timeout_s=self.timeouts.barrier_s)
            self.collector.begin_again()
        await self.preemption.run(self._endpoint, self.coordinator, self.description, self._say, self._journal)

    async def _keep_enough(self) -> None:
        await keep_enough(self.coordinator, self.description.topology, self.preemption, self._say)

    async def drain(self, host: str) -> str:
        """Let ``host`` leave, while the others train on. Raises like `zmqtrain.run.draining.drain`."""
        topology, placement = self.description.topology, self.description.placement
        return await drain(host, self._endpoint, self.coordinator, topology, placement, self._say, self._on_event)

    async def _on_leaves(self, caller: PeerId) -> Value:
        """An agent was told to end. Raises `UsageError` if the run cannot continue without its host."""
        host = caller.removeprefix("agent/")
        if not self.coordinator.running.is_set():
            raise UsageError(f"{host} cannot leave yet: not all members of the run have joined")
        check_drain(host, self.description.topology, self.description.placement, self.coordinator.view)
        self._leaving.put_nowait(host)
        return None

    async def _let_leave(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._let_one_leave(await self._leaving.get()))

    async def _let_one_leave(self, host: str) -> None:
        try:
            self._say(f"the agent of {host} was told to end (SIGTERM)")
            self._say(await self.drain(host))
        except (UsageError, ConnectivityError) as error:  # others have left or were lost meanwhile; its agent knows what to do
            self._say(str(error))

    def place_for_another(self) -> str:
        """The name of the host that a machine takes part as which comes now. Raises like `zmqtrain.run.joining.Places.take`."""
        return self._places.take(self.coordinator.view, asyncio.get_running_loop().time())

    def halt(self, reason: str) -> None:
        """Stop the run in an orderly way, without a checkpoint: every member is told once, with the reason."""
        self.coordinator.halt({"kind": "interrupted", "message": reason})

    async def stop(self) -> int | None:
        """Let all workers continue to a common step and end there. Returns the step; ``None`` if training is about to end by
        itself. Raises `ConnectivityError`, with the reason, if they cannot."""
        return await stop_workers(self._endpoint, self.coordinator, timeout_s=self.timeouts.barrier_s, journal=self._journal)


def without_checkpoints(description: RunDescription) -> RunDescription:
    """The same run, in which no worker keeps checkpoints."""
    topology = description.topology
    job = topology.job.model_copy(update={"checkpoint_every": 0})
    return replace(description, topology=topology.model_copy(update={"job": job}))


def coordinator_settings(
    topology: Topology, token: str, *, encrypted: bool, host: str = "127.0.0.1", port: int | None = None
) -> NetSettings:
    """The settings of the coordinator's endpoint. With many members it has something to do all the time, and does it in portions.

    Args:
        topology: gives the time-outs and the ports.
        token: the run's secret, from which an encrypted run's keys follow.
        encrypted: whether connections are encrypted.
        host: the address to listen on.
        port: used instead of the topology's; 0: any free port.
    """
    job = topology.job
    identity = Identity.coordinator(token) if encrypted else None
    at = job.port if port is None else port
    members = place(topology).members
    settings = net_settings(job.timeouts, token, host=host, port=at, ports=job.port_range, identity=identity, members=members)
    pause_s = min(max(0, members - FEW) * PAUSE_EACH_S, MOST_PAUSE_S)
    return replace(settings, peers=members, heartbeat_s=job.timeouts.ping_for(members), pause_s=pause_s)
