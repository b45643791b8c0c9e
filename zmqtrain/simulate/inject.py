"""Injects faults at their times and steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from zmqtrain.errors import ConnectivityError, UsageError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.faults import RESTART_S, Fault
from zmqtrain.simulate.host import Plan, be_host, be_role, spawn
from zmqtrain.simulate.process import Process
from zmqtrain.simulate.succession import is_of_launcher
from zmqtrain.waiting import abandoned


class Injector:
    """Carries out a schedule on a cluster. `run` it as a task; `hear` reports the workers' progress."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault]) -> None:
        self._cluster = cluster
        self._launchers = sorted((fault for fault in faults if is_of_launcher(fault)), key=lambda fault: fault.at or 0.0)
        faults = [fault for fault in faults if not is_of_launcher(fault)]
        self._by_time = sorted((fault for fault in faults if fault.at is not None), key=lambda fault: fault.at or 0.0)
        self._by_step = [fault for fault in faults if fault.step is not None]
        self._begun: asyncio.Queue[Fault] = asyncio.Queue()
        self._heal: list[Callable[[], None]] = []
        self._plan: Plan | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self.agents: list[asyncio.Task[None]] = []
        """The lives of agents that were started again."""
        self.outside: list[Process] = []
        """Processes that were started from outside the run."""
        self.drain: Callable[[str], Awaitable[str]] | None = None
        """Lets a host leave; ``None`` while there is no launcher."""
        self._draining: set[asyncio.Future[str]] = set()  # of the launcher
        self.over = False
        """Whether the run has ended: nothing is started again."""
        self.done: list[Fault] = []
        """The faults injected so far."""

    def hear(self, peer: PeerId, what: str, values: Mapping[str, object]) -> None:
        """A worker begins a step."""
        if what != "begin_step" or not self._by_step:
            return
        due = [fault for fault in self._by_step if fault.trigger == peer and fault.step == values["step"]]
        for fault in due:
            self._by_step.remove(fault)
            self._begun.put_nowait(fault)

    def launcher_died(self) -> None:
        """A launcher has died, which is not this object's doing."""
        if self._launchers:
            self.done.append(self._launchers.pop(0))
        self.drain = None
        for draining in self._draining:  # in its process
            draining.cancel()

    async def run(self, plan: Plan) -> None:
        """Carry out the faults at their times, until cancelled."""
        self._plan = plan
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._follow_clock())
            while True:
                self._tasks.create_task(self._inject(await self._begun.get()))

    async def _follow_clock(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._tasks is not None
        for fault in self._by_time:
            await asyncio.sleep((fault.at or 0.0) - loop.time())
            self._tasks.create_task(self._inject(fault))

    async def _inject(self, fault: Fault) -> None:
        self.done.append(fault)
        cluster, network = self._cluster, self._cluster.network
        peers = cluster.peers(fault.target) if fault.target is not None else ()
        match fault.kind:
            case "kill":
                for peer in peers:
                    await cluster.kill(peer, silent=len(peers) > 1)
            case "restart":
                for peer in peers:
                    await cluster.kill(peer, silent=len(peers) > 1)
                await asyncio.sleep(RESTART_S if fault.lasts is None else fault.lasts)
                if fault.target in cluster.hosts:
                    self._start_host_again(fault.target)
                else:
                    for peer in peers:
                        await self._start_again(peer)
            case "join":
                assert fault.target is not None
                self._start_host_again(fault.target)
            case "drain":
                assert fault.target is not None
                if self.drain is not None:
                    await self._drain(self.drain(fault.target))
            case "shutdown":
                assert fault.target is not None
                cluster.hosts[fault.target].stop()
            case "pause":
                for peer in peers:
                    cluster.pause(peer)
                if fault.lasts is not None:
                    await asyncio.sleep(fault.lasts)
                    for peer in peers:
                        cluster.resume(peer)
            case "partition":
                await self._partition(fault)
            case "heal":
                heals, self._heal = self._heal, []
                for heal in heals:
                    heal()
            case "slow":
                for peer in peers:
                    cluster.slow_down(peer, fault.factor)
                if fault.lasts is not None:
                    await asyncio.sleep(fault.lasts)
                    for peer in peers:
                        cluster.slow_down(peer, 1 / fault.factor)
            case "delay":
                for peer in peers:
                    network.delays[peer] = network.delays.get(peer, 1.0) * fault.factor
                if fault.lasts is not None:
                    await asyncio.sleep(fault.lasts)
                    for peer in peers:
                        network.delays[peer] /= fault.factor
            case "corrupt":
                for peer in peers:
                    network.corrupt(peer, fault.to)
            case "drop":
                for peer in peers:
                    for other in [fault.to] if fault.to is not None else list(cluster.processes):
                        if other != peer:
                            network.drop_link(peer, other)

    async def _drain(self, leaving: Awaitable[str]) -> None:
        draining = asyncio.ensure_future(leaving)
        self._draining.add(draining)
        try:
            await asyncio.wait({draining})
        finally:
            self._draining.discard(draining)
            await abandoned([draining])
        if not draining.cancelled():
            with suppress(UsageError, ConnectivityError):  # the run needs it, or it was lost before it had left
                draining.result()

    async def _partition(self, fault: Fault) -> None:
        heals = []
        first = fault.sides[:1] if fault.one_way else fault.sides[:-1]
        for number, side in enumerate(first):
            others = [host for later in fault.sides[number + 1 :] for host in later]
            heals.append(self._cluster.network.partition(side, others, one_way=fault.one_way))
        self._heal += heals
        if fault.lasts is not None:
            await asyncio.sleep(fault.lasts)
            for heal in heals:
                if heal in self._heal:
                    self._heal.remove(heal)
                    heal()

    def _start_host_again(self, host: str) -> None:
        """The machine is there again, and something outside the run starts an agent on it."""
        assert self._plan is not None
        agent = f"agent/{host}"
        before = self._cluster.processes.get(agent)
        if not self.over and (before is None or not before.tasks):  # otherwise another fault has done so already
            life = be_host(self._plan, host)
            # The run may refuse it, which is no failure of the run.
            life.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.agents = [*(each for each in self.agents if not each.done()), life]

    async def _start_again(self, peer: PeerId) -> None:
        """Start another process with the same name: the agent does it, if the run needs the role. Otherwise it is started from
        outside, as by a user's own supervisor; the run then rejects it, and its end is no failure of the run."""
        assert self._plan is not None
        try:
            role = self._plan.description.placement.role(peer)
        except KeyError:
            return
        if peer not in self._cluster.processes:  # there was none to kill: its agent has yet to start it
            return
        host = self._cluster.hosts.get(role.host)
        topology = self._plan.description.topology
        needed = topology.elastic and (role.kind == "worker" or (role.kind in ("server", "fc") and topology.replicated))
        if needed and host is not None:
            # An agent that was started again starts all roles of its host.
            coming = any(life.get_name() == f"agent/{role.host}" and not life.done() for life in self.agents)
            if host.start_again(role) or coming:
                return
        before, agent = self._cluster.processes.get(peer), self._cluster.processes.get(f"agent/{role.host}")
        if self.over or (before is not None and before.tasks):  # there is one again already
            return
        if agent is not None and agent.killed:  # the machine is down, or starts all its roles itself when it comes back
            return
        process = spawn(self._cluster, peer, role.host)
        self.outside.append(process)
        again = be_role(self._plan, role, self._plan.environment(peer), process)
        life = process.run(asyncio.get_running_loop().create_task, again, name=f"{peer} again")
        # Also if the run, and this task with it, ends first.
        life.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([life])
