"""One simulated host: it runs the real agent (`zmqtrain.run.agent`); only the operating system below it is simulated."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from zmqtrain.errors import ConnectivityError, TooLateError
from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.net.endpoint import PeerId
from zmqtrain.observe.recorder import AuditEvents
from zmqtrain.run.agent import Agent
from zmqtrain.run.enter import enter
from zmqtrain.run.report import report_of
from zmqtrain.simulate.clock import VirtualLoop
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.memory import SimulatedMember
from zmqtrain.simulate.process import Process
from zmqtrain.topology.placement import RolePlacement

if TYPE_CHECKING:
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.task import Task

KILLED = -signal.SIGKILL
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Plan:
    """The objects that all simulated processes of a run share."""

    description: RunDescription
    cluster: Cluster
    token: str
    coordinator: str
    """Address of the coordinator's endpoint."""
    task: Task | None = None
    make_device: Callable[[RoleContext], Device] | None = None
    """Makes the device of a worker that really computes, on virtual time; none: only its time is modelled."""
    audit: Callable[[PeerId, str, Mapping[str, object]], None] | None = None

    def environment(self, peer: PeerId) -> RoleEnvironment:
        """How a process finds the run."""
        timeout_s, members = self.description.topology.job.timeout_s, self.description.placement.members
        return RoleEnvironment(peer, self.coordinator, self.token, timeout_s=timeout_s, members=members)


def spawn(cluster: Cluster, peer: PeerId, host: str) -> Process:
    """Make a new process with this name. A previous process with the name must be dead."""
    process = Process(peer, host)
    cluster.processes[peer] = process
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.processes = [other for other in loop.processes if other.name != peer or other.tasks]
    loop.processes.append(process)
    return process


class SimulatedRole:
    """Implements `zmqtrain.run.agent.RoleProcess`: a role as a coroutine in a simulated process."""

    pid = None

    def __init__(self, cluster: Cluster, role: RolePlacement, process: Process, life: asyncio.Task[None]) -> None:
        self._cluster, self._role, self._process, self._life = cluster, role, process, life
        self._report: Mapping[str, Any] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        life.add_done_callback(self._end)

    @property
    def exited(self) -> asyncio.Future[int]:
        return self._exited

    def signal(self, number: signal.Signals) -> None:
        if self._exited.done():
            return
        if number == signal.SIGKILL:
            self._killing = asyncio.get_running_loop().create_task(self._cluster.kill(self._role.peer), name="kill")
        else:
            self._life.cancel()  # as a real role's signal handler does

    async def flush(self, timeout_s: float) -> None:
        """Nothing to do: log lines are collected elsewhere (`zmqtrain.simulate.logs`)."""

    def report(self) -> Mapping[str, Any] | None:
        return self._report

    def close(self) -> None:
        """Nothing to release."""

    def _end(self, life: asyncio.Task[None]) -> None:
        code = 0
        if self._process.killed:
            code = KILLED
        elif life.cancelled():
            code = TERMINATED
        elif (error := life.exception()) is not None:
            self._report = {**report_of(error, self._role.peer), "host": self._role.host, "pid": 0}
            code = int(self._report["exit_code"])
        if not self._exited.done():
            self._exited.set_result(code)


#: Runs a role in a simulated process.
Become: TypeAlias = Callable[[RolePlacement, RoleEnvironment, Process], Coroutine[Any, Any, None]]


class SimulatedProcesses:
    """Implements `zmqtrain.run.agent.Processes` for one host of a cluster."""

    def __init__(self, cluster: Cluster, become: Become) -> None:
        self._cluster, self._become = cluster, become

    async def start(self, role: RolePlacement, environment: RoleEnvironment, printed: Callable[[str], None]) -> SimulatedRole:
        process, loop = spawn(self._cluster, role.peer, role.host), asyncio.get_running_loop()
        life = process.run(loop.create_task, self._become(role, environment, process), name=role.peer)
        return SimulatedRole(self._cluster, role, process, life)


class SimulatedHost:
    """A host of the run. `run` it as a task of the agent's process."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name
        plan.cluster.hosts[name] = self
        self._agent: Agent | None = None

    async def run(self) -> None:
        """The agent's life: join, act as the host's agent, and end all its roles."""
        plan, environment = self._plan, self._plan.environment(f"agent/{self._name}")
        endpoint = plan.cluster.network.endpoint(
            environment.peer, self._name, net_settings(environment.timeouts, environment.token, members=environment.members)
        )
        plan.cluster.processes[endpoint.peer].waits = endpoint.waits
        try:
            # If it cannot join, or is given up: the run continues without this host, or is over. Its roles end in either case.
            with suppress(ConnectivityError):
                link = await AgentLink.join(endpoint, coordinator_address=environment.coordinator, timeouts=environment.timeouts)
                processes = SimulatedProcesses(plan.cluster, partial(be_role, plan))
                self._agent = Agent(link, plan.description, environment, processes)
                await self._agent.run()
        finally:
            self._agent = None
            for role in plan.description.placement.of_host(self._name):
                await plan.cluster.kill(role.peer)  # no role outlives its agent
            await endpoint.close()

    def stop(self) -> None:
        """The agent gets SIGTERM, if there is one."""
        process = self._plan.cluster.processes[f"agent/{self._name}"]
        if self._agent is not None and not process.killed:
            process.run(self._agent.stop)

    def start_again(self, role: RolePlacement) -> bool:
        """Start a dead role again. Returns whether there is an agent here to do so."""
        process = self._plan.cluster.processes[f"agent/{self._name}"]
        if self._agent is None or process.killed or process.paused:
            return False
        return process.run(self._agent.start_again, role)


def be_host(plan: Plan, name: str) -> asyncio.Task[None]:
    """Begin the life of a host's agent. Returns the task, which has the agent's name."""
    agent = f"agent/{name}"
    life = spawn(plan.cluster, agent, name).run(asyncio.get_running_loop().create_task, SimulatedHost(plan, name).run())
    life.set_name(agent)
    return life


async def be_role(plan: Plan, role: RolePlacement, environment: RoleEnvironment, process: Process) -> None:
    """Run a role in its own process."""
    timeouts = environment.timeouts
    settings = net_settings(timeouts, environment.token, members=environment.members)
    endpoint = plan.cluster.network.endpoint(role.peer, role.host, settings)
    process.waits = endpoint.waits
    memory = plan.cluster.memory(role.host)
    slot = [other.peer for other in plan.description.placement.of_host(role.host)].index(role.peer)
    place = memory.enter(role.peer, slot)
    audit: AuditEvents | None = None
    if plan.audit is not None:
        tell, peer = plan.audit, role.peer

        def hears(what: str, values: Mapping[str, object]) -> None:
            tell(peer, what, values)

        audit = hears
    try:
        entering = enter(endpoint, environment.coordinator, timeouts, description=plan.description, audit=audit)
        async with entering as (entered, _):
            context = replace(entered, slowdown=lambda: plan.cluster.slowdown(role.peer))
            if context.topology.compute.shared_memory:
                context = replace(context, make_member=partial(SimulatedMember, place, environment.timeouts.barrier_s))
            make = plan.make_device
            if make is not None:
                context = replace(context, make_device=lambda _role: make(context))
            from zmqtrain.run.role import run_role

            await run_role(context, task=plan.task)
    except TooLateError:  # as in a real process (`zmqtrain.launcher.child`)
        pass
    finally:
        place.end()
        await endpoint.close()
