"""One simulated run: the coordinator, the hosts' agents and all roles as coroutines on virtual time.

::

    result = simulate(load_topology("topology.toml"))
    result.ending.status, result.seconds            # "done", virtual seconds

Everything above the transport and the devices is the code that runs in real runs. The coordinator is on the first host's network,
but survives that host.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import SimulationError, ZmqTrainError
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.coordinator import EventCallback, ReportCallback
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR, net_settings
from zmqtrain.net.endpoint import PeerId
from zmqtrain.run.again import Again, Restarts
from zmqtrain.run.assembly import Assembly, Listeners
from zmqtrain.run.ending import Ending, ending_by, ending_of
from zmqtrain.run.faults import Fault, faults_of, remaining
from zmqtrain.run.report import LOG
from zmqtrain.simulate.audit import Auditor, Compare
from zmqtrain.simulate.clock import VirtualLoop, run_virtual
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.host import Plan, be_host
from zmqtrain.simulate.inject import SimulatedFaults
from zmqtrain.simulate.logs import logs_to
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.succession import Death, Records, Succession, deaths_of, is_of_launcher
from zmqtrain.topology.links import links_of
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.collector import OnEvent
from zmqtrain.train.checkpoint.folder import find_checkpoints, step_of
from zmqtrain.train.device.profile import Profile

if TYPE_CHECKING:
    from zmqtrain.membership.context import RoleContext
    from zmqtrain.simulate.groups_alone import GroupsAlone
    from zmqtrain.simulate.servers_alone import ServersAlone
    from zmqtrain.topology.placement import Placement
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.task import Task
    from zmqtrain.train.work import ModelState

#: Receives a fact that a role states for the auditor: the peer, the kind and the values.
AuditListener = Callable[[PeerId, str, Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a simulation, beside the topology."""

    faults: Sequence[Fault] | None = None
    """The faults to inject; ``None``: those of the file."""
    data_path: str | None = None
    task: Task | None = None
    """In place of the task that ``[job] task`` names."""
    checkpoints: Path | None = None
    """Folder for checkpoints; the run's model is left beside it. Without a folder nothing is kept."""
    resume: Path | None = None
    usual_s: float | None = None
    """How many virtual seconds the run takes without faults. The auditor then demands that it ends soon after the last of them."""
    compare_model: bool = False
    """Train the task's model in one process, too, and compare the run's with it, if it is an elastic run on grids of several rows
    whose arithmetic is the same (`comparable` of `zmqtrain.simulate.one_process`, `groups_alone` and `servers_alone`)."""
    launcher_deaths: Sequence[Death] | None = None
    """When launchers die, and how long they are away; beside those among the faults. With a list, even an empty one, each launcher
    keeps a journal, and processes live on without it for ``[job] alone``."""
    preempt_at_s: float | None = None
    """The virtual time, in seconds, at which the run is asked to stop with a checkpoint."""
    on_event: EventCallback | None = None
    on_report: ReportCallback | None = None
    on_audit: AuditListener | None = None
    on_checkpoint: OnEvent | None = None
    """Called with events about checkpoints."""
    on_restart: Callable[[Again, Ending, int | None], None] | None = None
    """Called before the run begins again (``[job] restarts``), with the reason and the step of the newest checkpoint; ``None``: it
    has kept none."""
    on_begin: Callable[[Callable[[str], None]], None] | None = None
    """Called with a function that stops the run in good order, and takes the reason."""
    debug: bool = False
    """Run the loop in asyncio's debug mode, which does not change the simulation."""


@dataclass(slots=True)
class Result:
    """The result of a simulated run."""

    ending: Ending
    seconds: float
    """Virtual time from the first process's start to the end of the coordinator."""
    callbacks: int
    faults: tuple[Fault, ...]
    """The faults that were injected before the run was over, in order."""
    broken: list[str] = field(default_factory=list)
    """The violations that the auditor found, each a sentence. Empty if everything held."""
    launchers: int = 1
    """How many launchers there were, one after another."""
    records: int = 0
    """The number of records in the last one's journal, if there was one."""
    attempts: int = 1
    """How often the run has begun: more than once with ``[job] restarts``."""

    def then(self, other: Result) -> Result:
        """The result of a run that has begun again after this one: the other one's, in all."""
        return replace(
            other,
            seconds=self.seconds + other.seconds,
            callbacks=self.callbacks + other.callbacks,
            faults=(*self.faults, *other.faults),
            broken=[*self.broken, *other.broken],
            launchers=self.launchers + other.launchers,
            attempts=self.attempts + 1,
        )


def simulate(topology: Topology, *, seed: int | None = None, options: Options | None = None) -> Result:
    """Run the topology's job on virtual time. The same topology, seed and options give the same run.

    Not to be called within an event loop: it has one of its own.

    Args:
        topology: the job, from `zmqtrain.load_topology`, with ``[network]``; and with modelled devices (``[compute] device =
            "modelled"``) unless torch is to train in simulated time.
        seed: of everything random; by default the job's.
        options: faults, a task, folders, callbacks (`zmqtrain.testing.Options`).

    Returns:
        How the run ended, how many virtual seconds it took, and what the auditor found.

    Raises:
        UsageError: the topology cannot be simulated.
        DeadlockError: the run has not ended, but nothing can happen any more.
        TimeLimitError: it takes longer than ``[simulation] time_limit``.
    """
    options = options or Options()
    seed = topology.job.seed if seed is None else seed
    topology = resolved(topology, seed)
    if topology.compute.profile is not None:
        Profile.load(topology.compute.profile)  # so that errors in it are reported now, and not by every worker
    faults = tuple(faults_of(topology) if options.faults is None else options.faults)
    topology = topology.model_copy(update={"faults": ()})  # they may name a host that is left out later
    restarts = Restarts(topology, place(topology), hosts_return=False)
    before: Result | None = None
    while True:
        simulation = Simulation(topology, replace(options, faults=faults))
        limit_s = topology.simulation.time_limit
        result = run_virtual(simulation.run(), seed=seed, limit_s=limit_s, debug=options.debug)
        whole = result if before is None else before.then(result)
        asked = options.preempt_at_s is not None and options.preempt_at_s <= result.seconds
        again = None if asked else restarts.after(result.ending, began=simulation.began, now=whole.seconds)
        if again is None:
            return whole
        resume = _newest(options)
        if options.on_restart is not None:
            options.on_restart(again, result.ending, resume)
        took_s = result.seconds + again.pause_s
        before, topology = replace(whole, seconds=whole.seconds + again.pause_s), again.topology
        faults = remaining(faults, result.faults, took_s, [host.name for host in topology.hosts])
        options = _later(options, took_s, resume)


def _newest(options: Options) -> int | None:
    """The step of the newest checkpoint; ``None`` if there is none."""
    found = [] if options.checkpoints is None else find_checkpoints(options.checkpoints)
    return step_of(found[-1]) if found else None


def _later(options: Options, seconds: float, resume: int | None) -> Options:
    """The options for a run that begins again after ``seconds``, from a checkpoint or as before."""
    deaths = options.launcher_deaths
    if deaths is not None:
        deaths = [(at - seconds, away_s) for at, away_s in deaths if isinstance(at, float) and at > seconds]
    return replace(
        options,
        resume=options.resume if resume is None else options.checkpoints,
        launcher_deaths=deaths,
        preempt_at_s=None if options.preempt_at_s is None else options.preempt_at_s - seconds,
    )


def resolved(topology: Topology, seed: int) -> Topology:
    """The topology with this seed, and with the default payload of simulations."""
    payload = topology.simulation.payload
    if payload is None:
        payload = "real" if topology.trains else "phantom"
    return topology.model_copy(
        update={
            "job": topology.job.model_copy(update={"seed": seed}),
            "simulation": topology.simulation.model_copy(update={"payload": payload}),
        }
    )


class Simulation:
    """A single run. `run` it on a virtual loop."""

    def __init__(self, topology: Topology, options: Options) -> None:
        self._topology, self._options = topology, options
        self._deaths: list[Death] | None = None  # of launchers; none: there is one, without a journal
        self.launchers, self.records = 1, 0
        self.began = False
        """Whether all roles have joined."""
        self._placement = place(topology)
        self._timeouts = topology.job.timeouts
        clock = lambda: asyncio.get_running_loop().time()  # noqa: E731
        self._groups = _groups_alone(topology, self._placement, options)
        compare = _comparing(topology, options) if self._groups is None else self._groups.differs
        compare = compare if options.compare_model else None
        self._auditor = Auditor(topology, self._placement, clock, usual_s=options.usual_s, compare=compare)

    async def run(self) -> Result:
        """Raises the errors of `simulate`."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_exception_handler(self._unhandled)
        with logs_to(self._log):
            return await self._run(loop)

    async def _run(self, loop: VirtualLoop) -> Result:
        network = SimulatedNetwork(links_of(self._topology), loop.world.random("network"))
        cluster = Cluster(network, self._placement, self._topology.network.slowdowns())
        faults = tuple(self._options.faults or ())
        injector = SimulatedFaults(cluster, faults)
        if self._options.launcher_deaths is not None or any(map(is_of_launcher, faults)):
            self._deaths = [*(self._options.launcher_deaths or ()), *deaths_of(faults)]
        try:
            outcome = await self._live(loop, cluster, injector)
            ending = ending_of(outcome, stopped=self._auditor.stopped_at is not None)
        except (SimulationError, asyncio.CancelledError):
            raise
        except (ZmqTrainError, ExceptionGroup) as error:
            ending = ending_by(error, COORDINATOR)
            ending = replace(ending, error={**(ending.error or {}), "host": "", "pid": 0})
        seconds = loop.time()
        await self._end(cluster, injector)
        broken = self._auditor.verdict(ending, seconds, injector.done)
        return Result(ending, seconds, loop.callbacks, tuple(injector.done), broken, self.launchers, self.records)

    async def _live(self, loop: VirtualLoop, cluster: Cluster, injector: SimulatedFaults) -> Outcome:
        topology, options = self._topology, self._options
        deaths = self._deaths
        description = RunDescription(
            topology,
            self._placement,
            os.getcwd(),
            options.data_path or topology.data.path,
            None if options.resume is None else str(options.resume),
            alone_s=0.0 if deaths is None else topology.job.alone,
        )
        agents: list[asyncio.Task[Any]] = []
        injecting: list[asyncio.Task[None]] = []

        def begin(number: int, journal: Records | None) -> tuple[Assembly, Callable[[], Awaitable[None]]]:
            members = self._placement.members
            settings = net_settings(self._timeouts, "", members=members)
            settings = replace(settings, heartbeat_s=self._timeouts.ping_for(members))
            if journal is not None:
                settings = replace(settings, epoch=number)
            endpoint = cluster.network.endpoint(COORDINATOR, topology.hosts[0].name, settings)
            assembly = Assembly(
                endpoint,
                description,
                checkpoints=options.checkpoints,
                model=None if options.checkpoints is None else options.checkpoints.parent,
                listeners=Listeners(self._event, self._report, options.on_checkpoint, lambda text: self._log(COORDINATOR, text)),
                journal=journal,
            )
            injector.leave = assembly.drain
            if options.on_begin is not None:
                options.on_begin(assembly.halt)
            if options.preempt_at_s is not None and number == 1:
                loop.call_later(options.preempt_at_s, assembly.preemption.ask)
            if number == 1:
                self._auditor.goes_on_at(assembly.collector.first_step)
                plan = Plan(
                    description=assembly.description,
                    cluster=cluster,
                    token="",
                    coordinator=endpoint.address,
                    task=options.task,
                    make_device=_torch_device if topology.trains else None,
                    audit=self._hear(injector),
                )
                injecting.append(asyncio.create_task(injector.run(plan), name="inject faults"))
                agents.extend(be_host(plan, host.name) for host in topology.hosts if self._placement.of_host(host.name))
            return assembly, endpoint.close

        if deaths is None:
            assembly, close = begin(1, None)
            try:
                outcome = await assembly.run()
                await self._wait_for_agents(cluster, agents, injector)
            finally:
                await close()
        else:
            succession = Succession(cluster.network, begin, deaths, partial(self._launcher_died, injector))
            outcome = await succession.run(lambda: self._wait_for_agents(cluster, agents, injector))
            self.launchers, self.records = succession.launchers, succession.records
        injecting[0].cancel()
        await asyncio.wait(injecting)
        return outcome

    def _launcher_died(self, injector: SimulatedFaults) -> None:
        self._auditor.launcher_died()
        injector.launcher_died()

    async def _wait_for_agents(self, cluster: Cluster, first: Sequence[asyncio.Task[Any]], injector: SimulatedFaults) -> None:
        """Like the launcher: agents end by themselves, or are ended after the grace time, with their roles."""
        injector.over = True
        agents = [*first, *injector.agents]
        # One that is cut off notices that its connection is silent, then that it is lost, and ends its roles.
        patience_s = self._timeouts.silent_s + self._timeouts.lost_s + self._timeouts.grace_s
        _, left = await asyncio.wait(agents, timeout=patience_s)
        for agent in (task.get_name() for task in agents if task in left):
            came_late = any(life.get_name() == agent for life in injector.agents)  # it may still look for the run
            if cluster.processes[agent].paused or came_late:  # a paused process cannot end by itself
                for peer in cluster.peers(agent.removeprefix("agent/")):
                    await cluster.kill(peer)
            else:
                self._auditor.note(f"{agent} did not end within {patience_s:g} s after the run")

    async def _end(self, cluster: Cluster, injector: SimulatedFaults) -> None:
        """Nothing may be left running that a real machine would have to clean up."""
        for process in list(cluster.processes.values()):
            process.resume()
            if process in injector.outside:
                await cluster.kill(process.name)
            elif process.tasks and not process.killed:
                names = ", ".join(task.get_name() for task in process.tasks)
                self._auditor.note(f"{process.name} still runs after the run's end: {names}")
                await cluster.kill(process.name)

    def _hear(self, injector: SimulatedFaults) -> AuditListener:
        def hear(peer: PeerId, what: str, values: Mapping[str, object]) -> None:
            self._auditor.hear(peer, what, values)
            injector.hear(peer, what, values)
            if self._groups is not None:
                self._groups.hear(peer, what, values)
            if self._options.on_audit is not None:
                self._options.on_audit(peer, what, values)

        return hear

    def _event(self, kind: str, values: dict[str, Any]) -> None:
        self.began = self.began or kind == "running"
        self._auditor.membership_event(kind, values)
        if self._options.on_event is not None:
            self._options.on_event(kind, values)

    def _report(self, peer: PeerId, events: list[dict[str, Any]]) -> None:
        self._auditor.report(peer, events)
        if self._options.on_report is not None:
            self._options.on_report(peer, events)

    def _log(self, peer: PeerId, text: str) -> None:
        """Put what a real process would print into the role's log."""
        if self._options.on_report is not None:
            self._options.on_report(peer, [{"kind": LOG, "peer": peer, "text": text + "\n", "quiet": True}])

    def _unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that no code handles is a defect, however the run ends."""
        error = context.get("exception")
        self._auditor.note(f"unhandled: {context.get('message')}: {type(error).__name__}: {error}")


def _groups_alone(topology: Topology, placement: Placement, options: Options) -> GroupsAlone | ServersAlone | None:
    if not (topology.whole_groups and topology.trains and options.compare_model) or options.resume is not None:
        return None
    from zmqtrain.simulate import groups_alone, servers_alone

    given = topology, placement, options.task, options.data_path or topology.data.path
    if servers_alone.comparable(topology):
        return servers_alone.ServersAlone(*given)
    return groups_alone.GroupsAlone(*given) if groups_alone.comparable(topology) else None


def _comparing(topology: Topology, options: Options) -> Compare | None:
    if not (topology.elastic and topology.trains):
        return None
    from zmqtrain.simulate.one_process import comparable, difference, trained_alone

    def compare(step: int, state: ModelState) -> str | None:
        alone = trained_alone(topology, step, options.task, options.data_path or topology.data.path)
        return None if alone is None else difference(state, alone)

    return compare if comparable(topology) else None


def _torch_device(context: RoleContext) -> Device:
    from zmqtrain.simulate.torch_device import SimulatedTorch

    return SimulatedTorch(context)
