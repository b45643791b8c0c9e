"""The launcher: one run from the topology to its summary."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from zmqtrain.errors import ZmqTrainError
from zmqtrain.launcher.addresses import addresses_towards, endpoint_at, listening_address
from zmqtrain.launcher.detached import leave_terminal
from zmqtrain.launcher.emulate import EmulatedEngine, Emulation, emulated
from zmqtrain.launcher.engine import (
    Engine,
    EngineRun,
    Gathered,
    Gathering,
    GatheringEngine,
    Handle,
    RemoteEngine,
    engine_faults,
    make_engine,
)
from zmqtrain.launcher.local import LocalEngine
from zmqtrain.launcher.nursery import Nursery
from zmqtrain.launcher.signals import wanted_on_sigterm
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.observe.live import View
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.processors import gpus
from zmqtrain.run.assembly import Assembly, Listeners, coordinator_settings
from zmqtrain.run.ending import Ending, ending_of
from zmqtrain.run.preemption import INTERRUPTED, Preemption
from zmqtrain.run.record import RunRecord
from zmqtrain.run.report import report_of
from zmqtrain.topology.cautions import cautions
from zmqtrain.topology.hosts import is_loopback
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Host


class Launch:
    """One run. Make it, then ``exit_code = await launch.run()``."""

    def __init__(
        self,
        description: RunDescription,
        directory: RunDirectory,
        view: View,
        *,
        emulation: Emulation | None = None,
        engine: Engine | None = None,
    ) -> None:
        """``emulation``: put all hosts on this machine, behind a network like the file's. Then run in a loop that is dilated so.
        ``engine``: what starts the agents; by default the one that the topology names. Where it gathers the hosts first, the
        description's are not final.
        """
        self._description, self._directory, self._view = description, directory, view
        self._topology, self._placement = description.topology, description.placement
        self._timeouts = self._topology.job.timeouts
        self._emulation, self._engine = emulation, engine
        self._record = RunRecord(description, directory, view, world="real" if emulation is None else "emulated")
        self._facts: dict[str, object] = {}  # for the summary
        self._token = secrets.token_hex(16)
        self._interrupts = 0
        self._stopped = False  # by `halt`
        self._assembly: Assembly | None = None
        self._preemption = Preemption()
        self._life: asyncio.Task[Ending] | None = None

    def halt(self, reason: str) -> None:
        """Stop the run in good order; it has not failed. On the loop's thread, while `run` is going on."""
        self._stopped = True
        self._record.quiet = True
        if self._assembly is not None:
            self._assembly.halt(reason)

    async def run(self) -> int:
        """Start everything, wait until it has ended, and write the run directory. Returns the exit code."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._view.begin(self._record.title())
        if not isinstance(self._engine, GatheringEngine):
            self._warn()
        with self._signals(loop):
            self._life = asyncio.create_task(self._live(), name="run")
            try:
                ending = await self._life
            except asyncio.CancelledError:
                ending = Ending("interrupted", INTERRUPTED)
            except (ZmqTrainError, ExceptionGroup) as error:
                report = report_of(error, "launcher")
                ending = Ending("failed", report["exit_code"], report)
        self._view.end()
        self._record.write_up(ending, loop.time() - began, self._facts)
        (self._directory.path / "pid").unlink(missing_ok=True)
        return ending.exit_code

    async def _live(self) -> Ending:
        async with AsyncExitStack() as stack:
            engine = None if self._emulation is not None else self._engine or make_engine(self._topology.engine.kind)
            gathered: Gathered | None = None
            if isinstance(engine, GatheringEngine):
                stack.push_async_callback(engine.close)
                gathered = await self._gather(engine)
            encrypted = self._topology.encrypted(emulated=self._emulation is not None)
            settings = coordinator_settings(self._topology, self._token, encrypted=encrypted)
            description = self._description
            hosts = tuple(host for host in self._topology.hosts if self._placement.of_host(host.name))
            towards: dict[str, str] = {}  # this machine's address, as each host sees it
            if gathered is not None:
                towards = {host.name: gathered.towards[host.name] for host in hosts}
                if not all(is_loopback(address) for address in towards.values()):
                    settings = replace(settings, host=listening_address(towards.values()))
                settings = replace(settings, port=gathered.port)  # at the file's, an engine may listen itself
            elif isinstance(engine, RemoteEngine):
                towards = await addresses_towards(hosts, self._topology.engine.address)
                settings = replace(settings, host=listening_address(towards.values()))
            elif self._emulation is not None:
                emulator, said = await stack.enter_async_context(emulated(self._topology, self._placement, self._emulation))
                self._view.note(said)
                self._facts = emulator.facts()
                settings = emulator.settings(COORDINATOR, settings)
                description = replace(description, topology=emulator.moved(self._topology))
                engine = emulator
            assert engine is not None
            if isinstance(engine, LocalEngine | EmulatedEngine):
                engine.use(await stack.enter_async_context(Nursery()))
            self._facts["encrypted"] = encrypted
            endpoint = await open_zeromq(COORDINATOR, settings=settings)
            stack.push_async_callback(endpoint.close)
            coordinators = {
                host.name: endpoint_at(towards[host.name], endpoint.address) if towards else endpoint.address for host in hosts
            }
            if isinstance(engine, RemoteEngine):
                stack.push_async_callback(engine.close)
                endpoint.pardon(len(hosts))  # who try the way from each host
                with engine_faults(self._topology.engine.kind, "look at the hosts"):
                    await engine.open(self._engine_run(hosts, coordinators))
            record = self._record
            self._assembly = Assembly(
                endpoint,
                description,
                checkpoints=self._directory.checkpoints,
                model=self._directory.path,
                listeners=Listeners(record.membership_event, record.report, record.checkpoint_event, record.note),
                preemption=self._preemption,
            )
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self._assembly.run(), name="coordinator")
                handles = await self._start_agents(stack, engine, hosts, coordinators)
                # Whatever is left of them is ended before the endpoint closes.
                outcome = await self._watch(self._assembly.coordinator, running, handles)
            return self._ending(outcome)

    async def _gather(self, engine: GatheringEngine) -> Gathered:
        """Find out which machines the hosts are, and place the roles on them."""
        with engine_faults(self._topology.engine.kind, "gather the hosts"):
            gathered = await engine.gather(Gathering(self._topology, self._directory.path, self._record.note))
        self._topology, self._placement = gathered.topology, place(gathered.topology)
        self._description = replace(self._description, topology=self._topology, placement=self._placement)
        self._record.settle(self._description)
        self._directory.write("topology.toml", self._topology.to_toml())
        self._warn()
        self._token = gathered.token or self._token
        return gathered

    def _warn(self) -> None:
        """Say what the person may not have meant."""
        for caution in cautions(self._topology, self._placement, gpus()):
            self._record.note(str(caution))

    def _engine_run(self, hosts: tuple[Host, ...], coordinators: Mapping[str, str]) -> EngineRun:
        script = self._description.script
        return EngineRun(
            topology=self._topology,
            hosts=hosts,
            coordinators=coordinators,
            folder=Path.cwd(),
            directory=self._directory.path,
            script=script[0] if script else None,
            timeouts=self._timeouts,
            say=self._record.note,
            log=self._record.agent_log,
        )

    async def _start_agents(
        self, stack: AsyncExitStack, engine: Engine, hosts: tuple[Host, ...], coordinators: Mapping[str, str]
    ) -> dict[str, Handle]:
        handles: dict[str, Handle] = {}
        stack.push_async_callback(self._stop_agents, engine, handles)
        command = (sys.executable, "-m", "zmqtrain", "agent")
        remote, kind = isinstance(engine, RemoteEngine), self._topology.engine.kind

        async def start(host: Host) -> None:
            job, coordinator = self._topology.job, coordinators[host.name]
            environment = RoleEnvironment(
                f"agent/{host.name}", coordinator, self._token, timeout_s=job.timeout_s, ports=job.port_range
            )
            if remote:
                environment = replace(environment, host=host.address, bind=host.listens_at)
            with engine_faults(kind, f"start the agent of {host.name}"):
                handle = await engine.start(host, command, environment.to_environ())
                if not isinstance(handle, Handle):
                    raise TypeError(f"its start returns {type(handle).__name__}, which is no handle: it has no wait")
            handles[host.name] = handle

        async with asyncio.TaskGroup() as group:
            for host in hosts:
                group.create_task(start(host), name=f"start the agent of {host.name}")
        return handles

    async def _stop_agents(self, engine: Engine, handles: dict[str, Handle]) -> None:
        """End what is left of them, all at once; without any patience when the person has none."""
        grace_s = self._timeouts.grace_s if self._interrupts < 2 else 0.0
        with engine_faults(self._topology.engine.kind, "stop agents"):
            await asyncio.gather(*(engine.stop(handle, grace_s) for handle in handles.values()))

    async def _watch(self, coordinator: Coordinator, running: asyncio.Task[Outcome], handles: dict[str, Handle]) -> Outcome:
        """The run's outcome. An agent that ends before its time is a lost host: its roles have died with it."""
        ends = {asyncio.create_task(handle.wait(), name=f"agent of {host}"): host for host, handle in handles.items()}
        try:
            while not running.done():
                done, _ = await asyncio.wait([running, *ends], return_when=asyncio.FIRST_COMPLETED)
                if running in done:
                    break
                for task in done:
                    host = ends.pop(task)  # type: ignore[arg-type]
                    with engine_faults(self._topology.engine.kind, f"follow the agent of {host}"):
                        code = task.result()
                    left = f"agent/{host}" not in coordinator.view.members
                    if not (left and coordinator.running.is_set()):
                        coordinator.host_ended(host, f"its agent ended with code {code}")
            return running.result()
        finally:
            for task in ends:
                task.cancel()
            if ends:
                await asyncio.wait(ends)

    # Signals ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._interrupt, signal.SIGUSR1: self._preemption.ask}
        if wanted_on_sigterm(self._topology.engine.kind):
            handlers[signal.SIGTERM] = self._preemption.ask
        if self._topology.engine.kind != "local":
            # The terminal is gone, or the connection that it was; the machines work on all the same.
            handlers[signal.SIGHUP] = lambda: leave_terminal(Path(os.devnull))
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        """The first time the run stops with a checkpoint, where it can, the second time at once."""
        self._interrupts += 1
        self._record.quiet = True
        if self._assembly is not None and self._interrupts == 1:
            self._preemption.ask("an interrupt", person=True)
        elif self._life is not None:
            self._life.cancel()

    # The end ------------------------------------------------------------------------------------------------------------------

    def _ending(self, outcome: Outcome) -> Ending:
        ending = ending_of(outcome, stopped=self._record.stopped_at is not None, interrupted=bool(self._interrupts))
        return Ending("stopped", 0) if self._stopped and ending.status == "halted" else ending


def write_pid(directory: RunDirectory) -> None:
    """Leave what ``zmqtrain status`` and ``stop`` look for: this process, by number and start time (numbers are used again)."""
    import psutil

    directory.write("pid", f"{os.getpid()} {psutil.Process().create_time()}\n")
