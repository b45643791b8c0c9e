"""One simulated host: an agent that starts its roles as coroutines, vouches for them, and tells how they end.

The agent's word is the real one's (`zmqtrain.membership.agent_link`); what is simulated is the operating system below it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import ConnectivityError
from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import net_settings
from zmqtrain.net.endpoint import PeerId
from zmqtrain.observe.recorder import Witness
from zmqtrain.run.enter import enter
from zmqtrain.run.report import report_of
from zmqtrain.simulate.clock import VirtualLoop
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.process import Process
from zmqtrain.topology.placement import RolePlacement
from zmqtrain.topology.timeouts import Ladder
from zmqtrain.waiting import first_error

if TYPE_CHECKING:
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.task import Task

KILLED = -signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Plan:
    """What every simulated process of a run is given."""

    description: RunDescription
    cluster: Cluster
    token: str
    coordinator: str
    """Address of the coordinator's endpoint."""
    task: Task | None = None
    make_device: Callable[[RoleContext], Device] | None = None
    """Makes the device of a worker that computes for real on virtual time; none: its time alone is modelled."""
    witness: Callable[[PeerId, str, Mapping[str, object]], None] | None = None

    @property
    def ladder(self) -> Ladder:
        return self.description.topology.job.ladder


def spawn(plan: Plan, peer: PeerId, host: str) -> Process:
    """A new process of that name. What was under it before is dead."""
    process = Process(peer, host)
    plan.cluster.processes[peer] = process
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.processes = [other for other in loop.processes if other.name != peer or other.tasks]
    loop.processes.append(process)
    return process


class SimulatedHost:
    """A host of the run. `run` it as a task of the agent's process."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name
        plan.cluster.hosts[name] = self
        self._ladder = plan.ladder
        self._stopping = asyncio.Event()
        self._patience_s = self._ladder.grace_s
        self._living: dict[PeerId, asyncio.Future[Any]] = {}
        self._link: AgentLink | None = None
        self._watching: asyncio.TaskGroup | None = None  # of living roles
        self._lives: dict[PeerId, asyncio.Task[None]] = {}  # the newest watch of each role
        self._stopped: set[PeerId] = set()

    async def run(self) -> None:
        """The agent's life: join, start all roles, tell how they end, leave."""
        plan = self._plan
        endpoint = plan.cluster.network.endpoint(f"agent/{self._name}", self._name, net_settings(self._ladder, plan.token))
        plan.cluster.processes[endpoint.peer].waits = endpoint.waits
        try:
            link = await AgentLink.join(endpoint, coordinator_address=plan.coordinator, ladder=self._ladder)
            link.on_halt(self._halt)
            link.on_lost(self._end_lost)
            with suppress(ConnectivityError):  # the run goes on without this host, or is over: its roles end either way
                try:
                    async with asyncio.TaskGroup() as group:
                        watching = [group.create_task(link.run()), group.create_task(self._end_roles())]
                        async with asyncio.TaskGroup() as living:
                            self._link, self._watching = link, living
                            for role in plan.description.placement.of_host(self._name):
                                self._lives[role.peer] = living.create_task(self._live(link, role), name=f"watch {role.peer}")
                        self._watching = None
                        await link.leave()
                        for task in watching:
                            task.cancel()
                except BaseExceptionGroup as errors:
                    raise first_error(errors) from None
        finally:
            self._watching = None
            for role in plan.description.placement.of_host(self._name):
                await plan.cluster.kill(role.peer)  # none of them outlives its agent
            await endpoint.close()

    def _halt(self, reason: Mapping[str, Any]) -> None:
        if reason.get("kind") == "nan":
            self._patience_s = self._ladder.request_s
        self._stopping.set()

    def _end_lost(self, peer: PeerId) -> None:
        """The run goes on without a role that may stand still for ever."""
        if self._watching is not None and peer in self._living:
            self._watching.create_task(self._plan.cluster.kill(peer), name=f"end {peer}")

    def start_again(self, role: RolePlacement) -> bool:
        """Start a role that has died once more. Returns whether there is an agent here to do so."""
        if self._watching is None or self._link is None or self._stopping.is_set() or role.peer in self._living:
            return False
        process = self._plan.cluster.processes[f"agent/{self._name}"]
        if process.killed or process.paused:
            return False
        again = self._live_after(self._lives[role.peer], self._link, role)
        self._lives[role.peer] = process.run(self._watching.create_task, again, name=f"watch {role.peer}")
        return True

    async def _live_after(self, before: asyncio.Task[None], link: AgentLink, role: RolePlacement) -> None:
        await asyncio.wait([before])  # its end must be told before
        await self._live(link, role)

    async def _live(self, link: AgentLink, role: RolePlacement) -> None:
        topology = self._plan.description.topology
        left = topology.job.restarts if topology.elastic and role.kind == "worker" else 0
        while True:
            link.started(role.peer)
            code, report = await self._watch(role)
            stopped = role.peer in self._stopped
            await link.exited(role.peer, code, report, stopped=stopped)
            if not left or stopped or self._stopping.is_set() or 0 <= code < ConnectivityError.exit_code:
                return
            left -= 1

    async def _watch(self, role: RolePlacement) -> tuple[int, Mapping[str, Any] | None]:
        """Start a role; how it ended."""
        process = spawn(self._plan, role.peer, role.host)
        loop = asyncio.get_running_loop()
        task = process.run(loop.create_task, be_role(self._plan, role, process), name=role.peer)
        self._living[role.peer] = task
        try:
            await asyncio.wait([task])
        finally:
            del self._living[role.peer]
        if process.killed:
            return KILLED, None
        if task.cancelled():
            return TERMINATED, None
        error = task.exception()
        if error is None:
            return 0, None
        report = {**report_of(error, role.peer), "host": role.host, "pid": 0}
        return int(report["exit_code"]), report

    async def _end_roles(self) -> None:
        """Once the run is to stop: roles were told by the coordinator; those that do not end by themselves are ended."""
        await self._stopping.wait()
        await self._wait_for_end(self._patience_s)
        for peer, task in list(self._living.items()):
            self._stopped.add(peer)
            task.cancel()
        await self._wait_for_end(self._ladder.grace_s / 2)
        for peer in list(self._living):
            await self._plan.cluster.kill(peer)

    async def _wait_for_end(self, timeout_s: float) -> None:
        if self._living:
            await asyncio.wait(list(self._living.values()), timeout=timeout_s)


async def be_role(plan: Plan, role: RolePlacement, process: Process) -> None:
    """A role's life, in its own process."""
    endpoint = plan.cluster.network.endpoint(role.peer, role.host, net_settings(plan.ladder, plan.token))
    process.waits = endpoint.waits
    witness: Witness | None = None
    if plan.witness is not None:
        tell, peer = plan.witness, role.peer

        def hears(what: str, values: Mapping[str, object]) -> None:
            tell(peer, what, values)

        witness = hears
    try:
        entering = enter(endpoint, plan.coordinator, plan.ladder, description=plan.description, witness=witness)
        async with entering as (entered, _):
            context = replace(entered, slowdown=lambda: plan.cluster.slowdown(role.peer))
            make = plan.make_device
            if make is not None:
                context = replace(context, make_device=lambda _role: make(context))
            from zmqtrain.run.role import run_role

            await run_role(context, task=plan.task)
    finally:
        await endpoint.close()
