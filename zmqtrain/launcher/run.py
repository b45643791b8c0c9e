"""The launcher: one run from the topology to its summary."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from zmqtrain.errors import PortInUseError, RunDirectoryError, UsageError, ZmqTrainError
from zmqtrain.launcher.addresses import endpoint_at
from zmqtrain.launcher.asked import LOOK, Asked
from zmqtrain.launcher.continued import Leadership, NothingLeftError, port_taken
from zmqtrain.launcher.detached import leave_terminal
from zmqtrain.launcher.emulate import EmulatedHosts, Emulation
from zmqtrain.launcher.engine import AGENT, UNKNOWN_EXIT, Engine, Gathered, Gathering
from zmqtrain.launcher.faults import Injection
from zmqtrain.launcher.fleet import Fleet, engine_for, gathered_hosts
from zmqtrain.launcher.signals import wanted_on_sigterm
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR, RoleEnvironment
from zmqtrain.net.address import without_key
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.observe.live import LiveView
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.processors import gpus
from zmqtrain.run.again import Again, Restarts
from zmqtrain.run.assembly import Assembly, Listeners
from zmqtrain.run.ending import Ending, ending_by, ending_of
from zmqtrain.run.faults import faults_of
from zmqtrain.run.preemption import INTERRUPTED, Preemption
from zmqtrain.run.record import RunRecord
from zmqtrain.run.report import headline
from zmqtrain.run.resumed import changed_since
from zmqtrain.topology.cautions import Caution, cautions
from zmqtrain.topology.loopback import is_loopback
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Host
from zmqtrain.train.checkpoint.folder import find_checkpoints, step_of
from zmqtrain.waiting import abandoned
from zmqtrain.world import wall_s

if TYPE_CHECKING:
    from zmqtrain.launcher.prepared import Prepared

#: Sinks that take longer to begin are named: a tracking server that does not answer is tried for minutes.
_SINKS_QUIET_S = 5.0


class _RefusedError(Exception):
    """Sinks have refused the run: nothing has begun, and nothing is to be left behind."""

    def __init__(self, why: UsageError) -> None:
        super().__init__(str(why))
        self.why = why


class Launch:
    """One run. Make it, then ``exit_code = await launch.run()``."""

    def __init__(
        self,
        description: RunDescription,
        directory: RunDirectory,
        view: LiveView,
        *,
        emulation: Emulation | None = None,
        engine: Engine | None = None,
        sinks: FanOut | None = None,
        leadership: Leadership | None = None,
        refusable: bool = False,
        prepared: Prepared | None = None,
    ) -> None:
        """``emulation``: put all hosts on this machine, with a network like the file's. The event loop must have the same dilation.
        ``engine``: what starts the agents; by default the engine that the topology names. If it gathers the hosts first, those of
        the description are not final. ``sinks``: where figures go besides the run directory. ``leadership``: of a run whose
        processes outlive this launcher. If it continues another launcher's, nothing is started: what is there is taken over.
        ``refusable``: a run whose sinks refuse it is no run: its directory is discarded, and `run` raises the `UsageError`.
        ``prepared``: without ``engine``, processes that wait to be needed, where the hosts are this machine.
        """
        self._description, self._directory, self._view = description, directory, view
        self._topology, self._placement = description.topology, description.placement
        self._timeouts = self._topology.job.timeouts
        self._emulation, self._engine, self._prepared = emulation, engine, prepared
        self._sinks = FanOut() if sinks is None else sinks
        world: Literal["real", "emulated"] = "real" if emulation is None else "emulated"
        self._record = RunRecord(description, directory, view, world=world, sinks=self._sinks, lasting=leadership is not None)
        self._facts: dict[str, object] = {}  # for the summary
        self._token = secrets.token_hex(16)
        self._leadership, self._refusable = leadership, refusable
        self._interrupts = 0
        self._stopped = False  # by `halt`
        self._assembly: Assembly | None = None
        self._preemption = Preemption()
        self._life: asyncio.Task[Ending] | None = None
        self._asked = Asked(directory.path)
        self._faults = () if emulation is None else faults_of(self._topology)
        self._injection: Injection | None = None
        hosts_return = emulation is None and self._topology.engine.kind == "local"
        self._restarts = Restarts(self._topology, self._placement, hosts_return=hosts_return)

    def halt(self, reason: str) -> None:
        """Stop the run in an orderly way, not as a failure. Call it on the loop's thread while `run` is running."""
        self._stopped = True
        self._record.quiet = True
        if self._assembly is not None:
            self._assembly.halt(reason)

    async def run(self) -> int:
        """Start everything, wait until it has ended, and write the run directory. Returns the exit code.

        Raises `NothingLeftError` if it was to take over a run of which nothing is left, and `UsageError` if it is refused."""
        loop, leadership = asyncio.get_running_loop(), self._leadership
        began = loop.time()
        if leadership is not None:
            leadership.follow(self._directory)
            if leadership.continues:
                began -= wall_s() - float(leadership.launch["began"])
        self._view.begin(self._record.title())
        with self._signals(loop):
            self._life = asyncio.create_task(self._live(), name="run")
            try:
                ending = await self._life
            except asyncio.CancelledError:
                ending = Ending("interrupted", INTERRUPTED)
            except NothingLeftError:
                self._view.end()
                self._sinks.end("failed", {})
                if leadership is not None:
                    leadership.journal.close()
                raise
            except _RefusedError as refused:
                self._view.end()
                self._sinks.abandon()
                if leadership is not None:
                    leadership.journal.close()
                self._directory.discard()
                raise refused.why from None
            except (ZmqTrainError, ExceptionGroup) as error:
                ending = ending_by(error, "launcher")
        self._view.end()
        leadership = self._leadership  # of the last attempt
        if ending.error is not None and self._goes_on_without_us:
            self._sinks.end(ending.status, {})
            print(f"\n{headline(ending.error)}", file=sys.stderr, flush=True)
            if leadership is not None:
                leadership.journal.close()
            return ending.exit_code
        self._record.write_up(ending, loop.time() - began, self._facts)
        if leadership is not None:
            leadership.journal.remove()
            leadership.journal.close()
        (self._directory.path / "pid").unlink(missing_ok=True)
        return self._record.exit_code(ending)

    @property
    def _superseded(self) -> bool:
        """Whether another launcher leads the run."""
        return self._assembly is not None and self._assembly.coordinator.superseded

    @property
    def _goes_on_without_us(self) -> bool:
        """Whether the run goes on: with another launcher, or until one takes it over."""
        untouched = self._leadership is not None and self._leadership.continues and self._assembly is None
        return untouched or self._superseded

    async def _live(self) -> Ending:
        """All of the run, with its restarts."""
        try:
            await self._begin_sinks()
        except UsageError as error:
            if self._refusable:
                raise _RefusedError(error) from error
            raise
        loop = asyncio.get_running_loop()
        while True:
            try:
                ending = await self._attempt()
            except NothingLeftError:
                raise
            except (ZmqTrainError, ExceptionGroup) as error:
                ending = ending_by(error, "launcher")
            if self._interrupts or self._stopped or self._preemption.asked or self._goes_on_without_us:
                return ending
            began = self._assembly is not None and self._assembly.coordinator.running.is_set()
            again = self._restarts.after(ending, began=began, now=loop.time())
            if again is None:
                return ending
            self._begin_again(again, ending)
            await asyncio.sleep(again.pause_s)

    def _begin_again(self, again: Again, ending: Ending) -> None:
        """Prepare another attempt, from the newest checkpoint."""
        checkpoints = find_checkpoints(self._directory.checkpoints)
        resume = str(self._directory.path) if checkpoints else self._description.resume
        step = step_of(checkpoints[-1]) if checkpoints else None
        self._record.begins_again(again, ending, step)
        if again.topology is not self._topology:
            self._directory.write("topology.toml", again.topology.to_toml())
        self._topology, self._placement = again.topology, again.placement
        self._description = replace(self._description, topology=self._topology, placement=self._placement, resume=resume)
        if self._injection is not None:
            self._faults = self._injection.left(again.pause_s, [host.name for host in again.topology.hosts])
            self._injection = None
        self._token = secrets.token_hex(16)  # whoever comes from the attempt before is a stranger
        self._assembly = None
        if self._leadership is not None:
            began = float(self._leadership.launch["began"])
            self._leadership.journal.remove()
            self._leadership.journal.close()
            try:
                self._leadership = Leadership.begin(self._directory, self._description, began=began)
            except OSError as error:
                raise RunDirectoryError(self._directory.path, error.strerror or str(error)) from error
            self._leadership.follow(self._directory)

    async def _attempt(self) -> Ending:
        """The run, until it has ended or failed."""
        async with AsyncExitStack() as stack:
            gathering = Gathering(self._topology, self._directory.path, self._record.note, self._busy_hosts())
            leadership = self._leadership
            engine: Engine
            if leadership is not None and leadership.continues:
                engine = leadership.adopting(self._description)
            else:
                engine = self._engine or engine_for(self._topology, self._emulation, self._prepared)
            fleet = await stack.enter_async_context(gathered_hosts(engine, gathering, self._token))
            description = self._settle(fleet.gathered)
            encrypted = self._topology.encrypted(emulated=self._emulation is not None)
            self._facts = {**fleet.gathered.facts, "encrypted": encrypted}
            settings = fleet.settings(encrypted=encrypted)
            endpoint = await _open(leadership, fleet, settings)
            stack.push_async_callback(endpoint.close)
            record, folder = self._record, self._directory.path
            script = self._description.script[0] if self._description.script else None
            await fleet.open(endpoint, self._busy_hosts(), folder, say=record.note, log=record.agent_log, script=script)
            if leadership is not None and leadership.continues:
                self._take_up(leadership)
            self._assembly = Assembly(
                endpoint,
                description,
                checkpoints=self._directory.checkpoints,
                model=folder,
                listeners=Listeners(record.membership_event, record.report, record.checkpoint_event, record.note),
                preemption=self._preemption,
                journal=None if leadership is None else leadership.journal,
            )
            # Agents that are left are ended before the endpoint closes.
            stack.push_async_callback(self._stop_agents, fleet)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self._assembly.run(), name="coordinator")
                asked = group.create_task(
                    self._asked.serve(partial(self._serve, self._assembly, fleet, endpoint.address)), name="what is asked"
                )
                await fleet.start((sys.executable, *AGENT), "agent")
                if leadership is not None and not leadership.continues:
                    leadership.started(engine, fleet.handles)
                injecting = self._inject(group, engine, fleet)
                outcome = await self._watch(self._assembly.coordinator, running, fleet)
                for task in (asked, *injecting):
                    task.cancel()
            return self._ending(outcome)

    async def _begin_sinks(self) -> None:
        """Raises `UsageError` if one cannot begin: nothing has been started then."""
        wait_s, names = self._timeouts.join_s, ", ".join(self._topology.observe.to)
        text = f"waiting up to {wait_s:g} s until {names} can take figures ([observe] to)"
        said = asyncio.get_running_loop().call_later(_SINKS_QUIET_S, self._view.note, text)
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.gather(*map(asyncio.wrap_future, self._sinks.begin(self._record.facts())))
        except TimeoutError:
            raise UsageError(f"[observe] to: not all of {names} were ready within {wait_s:g} s ([job] timeout)") from None
        finally:
            said.cancel()

    def _settle(self, gathered: Gathered) -> RunDescription:
        """Now that the hosts are known, place the roles, if they are not placed yet. Returns the description for the roles."""
        if gathered.topology is not self._topology:
            self._topology, self._placement = gathered.topology, place(gathered.topology)
            self._description = replace(self._description, topology=self._topology, placement=self._placement)
            self._record.settle(self._description)
            self._directory.write("topology.toml", self._topology.to_toml())
        continues = self._leadership is not None and self._leadership.continues
        said = continues or self._record.restarts
        for caution in () if said else self._cautions():  # what the user may not have meant
            self._record.note(str(caution))
        resume = None if said else self._description.resume
        if resume is not None and (changed := changed_since(Path(resume), self._topology)):
            self._record.note(changed)
        if gathered.said:
            self._view.note(gathered.said)
        return self._description if gathered.told is None else replace(self._description, topology=gathered.told)

    def _cautions(self) -> tuple[Caution, ...]:
        return cautions(self._topology, self._placement, gpus(), emulated=self._emulation is not None)

    def _take_up(self, leadership: Leadership) -> None:
        """Take up what the launcher before has recorded."""
        self._record.take_up()
        self._restarts.used = self._record.restarts
        self._record.event(COORDINATOR, {"kind": "continued", "values": {"epoch": leadership.epoch}})
        patience_s = self._timeouts.lost_s + self._timeouts.silent_s
        self._record.note(
            f"this launcher has taken over (epoch {leadership.epoch}); a host that is silent for {patience_s:g} s is lost"
        )

    def _busy_hosts(self) -> tuple[Host, ...]:
        """The hosts that have roles."""
        return tuple(host for host in self._topology.hosts if self._placement.of_host(host.name))

    async def _stop_agents(self, fleet: Fleet) -> None:
        """End all agents that are left, at once; without a grace time if the user has asked twice to stop. They are another
        launcher's if one has taken over."""
        if self._superseded:
            return
        await fleet.stop(self._timeouts.grace_s if self._interrupts < 2 else 0.0)

    async def _watch(self, coordinator: Coordinator, running: asyncio.Task[Outcome], fleet: Fleet) -> Outcome:
        """Wait for the run's outcome. An agent that ends too early is a lost host: its roles have died with it."""
        ends = {asyncio.create_task(fleet.wait(host), name=f"agent of {host}"): host for host in fleet.handles}
        try:
            while not running.done():
                await asyncio.wait([running, *ends], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    break
                for task in [each for each in ends if each.done()]:
                    self._agent_ended(coordinator, ends.pop(task), task.result())
            return running.result()
        finally:
            await abandoned(ends)

    @staticmethod
    def _agent_ended(coordinator: Coordinator, host: str, code: int) -> None:
        """If it ends too early, the host is lost."""
        how = "its agent has ended" if code == UNKNOWN_EXIT else f"its agent ended with exit code {code}"
        left = f"agent/{host}" not in coordinator.view.members
        if not (left and coordinator.running.is_set()):
            coordinator.host_ended(host, how)

    def _inject(self, group: asyncio.TaskGroup, engine: Engine, fleet: Fleet) -> list[asyncio.Task[None]]:
        """Begin to carry out the faults of an emulated run. Returns the task, if there are any."""
        assembly = self._assembly
        if not self._faults or not isinstance(engine, EmulatedHosts):
            return []
        assert assembly is not None
        coordinator, say = assembly.coordinator, self._record.note
        ended = partial(self._agent_ended, coordinator)
        injection = self._injection = engine.injection(self._faults, self._placement, fleet, assembly, say, ended)
        return [group.create_task(injection.run(coordinator.running.wait), name="inject faults")]

    # Signals ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._interrupt, signal.SIGUSR1: self._preemption.ask}
        handlers[signal.SIGUSR2] = self._keep
        handlers[LOOK] = self._asked.look
        if wanted_on_sigterm(self._topology.engine.kind):
            handlers[signal.SIGTERM] = self._preemption.ask
        if self._topology.engine.kind != "local":
            # The terminal, or the login, is gone; the run continues.
            handlers[signal.SIGHUP] = lambda: leave_terminal(Path(os.devnull))
        elif signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not with nohup
            handlers[signal.SIGHUP] = self._hang_up
        before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
                if before[number] is not None:  # loops put back the default: a search would die between two runs
                    signal.signal(number, before[number])

    def _interrupt(self) -> None:
        """The first Ctrl-C stops the run with a checkpoint if possible, the second one at once."""
        self._interrupts += 1
        self._record.quiet = True
        if self._assembly is not None and self._interrupts == 1:
            self._preemption.ask("an interrupt", person=True)
        elif self._life is not None:
            self._life.cancel()

    def _hang_up(self) -> None:
        """The terminal is gone, as the shell and the kernel may both say: as one Ctrl-C."""
        if not self._interrupts:
            self._interrupt()

    def _keep(self) -> None:
        """Keep a checkpoint as soon as possible, and go on."""
        if self._description.script:
            self._record.note("a checkpoint was asked for, but a script keeps its own")
        elif self._assembly is None:
            self._record.note("a checkpoint was asked for, but the run has not started yet")
        else:
            self._record.note("a checkpoint was asked for: all workers keep one at a common step, and go on")
            self._assembly.collector.ask()

    async def _serve(self, assembly: Assembly, fleet: Fleet, address: str, request: Mapping[str, object]) -> str:
        """What another process of the user asks for. ``address``: the coordinator's."""
        match request:
            case {"what": "join"} if self._emulation is not None:
                raise UsageError("nobody can join an emulated run: its network has only the hosts of the file")
            case {"what": "join", "from": str(where)}:
                towards = list(fleet.gathered.towards.values())
                at = endpoint_at(towards[0], address) if towards else address
                if where != "here" and is_loopback(urlsplit(at).hostname or ""):
                    raise UsageError(f"no other machine can join the run: it listens at {without_key(at)}, for this machine alone")
                host, members = assembly.place_for_another(), self._description.placement.members
                place = RoleEnvironment.of_job(self._topology.job, f"agent/{host}", at, fleet.token, members=members)
                self._record.note(f"another machine may join as {host}")
                return json.dumps({"environment": place.to_environ(), "folder": self._description.folder})
            case {"what": "drain", "host": str(host)}:
                return await assembly.drain(host)
            case _:
                raise UsageError(f"this launcher knows no such request: {request}")

    # The end ------------------------------------------------------------------------------------------------------------------

    def _ending(self, outcome: Outcome) -> Ending:
        ending = ending_of(outcome, stopped=self._record.stopped_at is not None, interrupted=bool(self._interrupts))
        script = self._description.script
        if script and outcome.status == "done" and self._assembly is not None and not self._assembly.coordinator.running.is_set():
            self._record.note(
                f"warning: {script[0]} made no session (zmqtrain.session() or zmqtrain.join()), so each worker ran it by itself, "
                "and shared nothing through zmqtrain"
            )
        return Ending("stopped", 0) if self._stopped and ending.status == "halted" else ending


async def _open(leadership: Leadership | None, fleet: Fleet, settings: NetSettings) -> Node:
    """The coordinator's endpoint; of a run that was taken over, where its members look for it."""
    if leadership is None:
        return await open_zeromq(COORDINATOR, settings=settings)
    settings = leadership.settings(settings)
    try:
        endpoint = await open_zeromq(COORDINATOR, settings=settings)
    except PortInUseError as error:
        if leadership.continues:
            raise port_taken(error, without_key(leadership.launch["address"])) from error
        raise
    if not leadership.continues:
        leadership.listens(endpoint.address, fleet.token, settings)
    return endpoint


def write_pid(directory: RunDirectory) -> None:
    """Write the file by which ``zmqtrain status`` and ``stop`` find this process: its number and start time (numbers are
    reused)."""
    import psutil

    directory.write("pid", f"{os.getpid()} {psutil.Process().create_time()}\n")
