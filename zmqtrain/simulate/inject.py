"""What faults happen to in a simulated run: its machines. Implements `zmqtrain.run.injector.Machines`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from zmqtrain.errors import ConnectivityError, UsageError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.run.faults import Fault
from zmqtrain.run.injector import Heal, Injector
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.host import Plan, be_host, be_role, spawn
from zmqtrain.simulate.process import Process
from zmqtrain.simulate.succession import is_of_launcher
from zmqtrain.waiting import abandoned


class SimulatedFaults:
    """The faults of one simulated run. `run` it as a task; `hear` reports the workers' progress."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault]) -> None:
        self._cluster = cluster
        self._launchers = sorted((fault for fault in faults if is_of_launcher(fault)), key=lambda fault: fault.at or 0.0)
        self._injector = Injector(self, [fault for fault in faults if not is_of_launcher(fault)])
        self._plan: Plan | None = None
        self.agents: list[asyncio.Task[None]] = []
        """The lives of agents that were started again."""
        self.outside: list[Process] = []
        """Processes that were started from outside the run."""
        self.leave: Callable[[str], Awaitable[str]] | None = None
        """Lets a host leave; ``None`` while there is no launcher."""
        self._draining: set[asyncio.Future[str]] = set()  # of the launcher
        self.over = False
        """Whether the run has ended: nothing is started again."""

    @property
    def done(self) -> Sequence[Fault]:
        """The faults injected so far."""
        return self._injector.done

    def hear(self, peer: PeerId, what: str, values: Mapping[str, object]) -> None:
        """A worker states a fact."""
        if what == "begin_step":
            step = values["step"]
            assert isinstance(step, int)
            self._injector.hear(peer, step)

    def launcher_died(self) -> None:
        """A launcher has died, which is not this object's doing."""
        if self._launchers:
            self._injector.done.append(self._launchers.pop(0))
        self.leave = None
        for draining in self._draining:  # in its process
            draining.cancel()

    async def run(self, plan: Plan) -> None:
        """Carry out the faults at their times, until cancelled."""
        self._plan = plan
        await self._injector.run()

    # What happens to machines -------------------------------------------------------------------------------------------------

    async def kill(self, target: str) -> None:
        peers = self._cluster.peers(target)
        for peer in peers:
            await self._cluster.kill(peer, silent=len(peers) > 1)

    async def restart(self, target: str, after_s: float) -> None:
        await self.kill(target)
        await asyncio.sleep(after_s)
        if target in self._cluster.hosts:
            self._start_host_again(target)
        else:
            for peer in self._cluster.peers(target):
                await self._start_again(peer)

    async def join(self, host: str) -> None:
        self._start_host_again(host)

    async def drain(self, host: str) -> None:
        if self.leave is None:
            return
        draining = asyncio.ensure_future(self.leave(host))
        self._draining.add(draining)
        try:
            await asyncio.wait({draining})
        finally:
            self._draining.discard(draining)
            await abandoned([draining])
        if not draining.cancelled():
            with suppress(UsageError, ConnectivityError):  # the run needs it, or it was lost before it had left
                draining.result()

    async def shut_down(self, host: str) -> None:
        self._cluster.hosts[host].stop()

    async def pause(self, target: str) -> None:
        for peer in self._cluster.peers(target):
            self._cluster.pause(peer)

    async def resume(self, target: str) -> None:
        for peer in self._cluster.peers(target):
            self._cluster.resume(peer)

    async def part(self, one: Sequence[str], others: Sequence[str], *, one_way: bool) -> Heal:
        restore = self._cluster.network.partition(one, others, one_way=one_way)

        async def heal() -> None:
            restore()

        return heal

    async def slow(self, target: str, factor: float) -> None:
        for peer in self._cluster.peers(target):
            self._cluster.slow_down(peer, factor)

    async def delay(self, target: str, factor: float) -> None:
        delays = self._cluster.network.delays
        for peer in self._cluster.peers(target):
            delays[peer] = delays.get(peer, 1.0) * factor

    async def corrupt(self, target: str, to: str | None) -> None:
        for peer in self._cluster.peers(target):
            self._cluster.network.corrupt(peer, to)

    async def drop(self, target: str, to: str | None) -> None:
        for peer in self._cluster.peers(target):
            for other in [to] if to is not None else list(self._cluster.processes):
                if other != peer:
                    self._cluster.network.drop_link(peer, other)

    # Coming back --------------------------------------------------------------------------------------------------------------

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
