"""The agent: the one process of a host that starts its roles, reports that they are alive and how they end, and ends them.

It is the same code in every world. Worlds differ in `Processes`: processes that a fork server forks
(`zmqtrain.launcher.forked`), or coroutines of a simulated machine (`zmqtrain.simulate.host`)::

    link = await AgentLink.join(endpoint, coordinator_address=environment.coordinator, timeouts=environment.timeouts)
    agent = Agent(link, description, environment, processes)
    ...                         # a signal may call agent.stop() or agent.preempt() from here on
    await agent.run()           # until this host's part of the run is over

An agent runs no training code and imports no torch, so no role can prevent its heartbeats from being sent.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zmqtrain.errors import ConnectivityError, ZmqTrainError
from zmqtrain.membership.actions import TOLD_TO_END
from zmqtrain.membership.agent_link import LEAVES
from zmqtrain.run.preemption import PREEMPT
from zmqtrain.run.report import LOG
from zmqtrain.waiting import abandoned, task_group
from zmqtrain.words import counted

if TYPE_CHECKING:
    from zmqtrain.membership.agent_link import AgentLink
    from zmqtrain.membership.description import RunDescription
    from zmqtrain.membership.environment import RoleEnvironment
    from zmqtrain.net.endpoint import PeerId
    from zmqtrain.topology.placement import RolePlacement

#: Seconds between messages with the roles' output, so that a role that prints much costs only a few messages per second.
PRINT_S = 0.05
#: Pieces of one role's output are joined up to this many characters.
LONGEST_TEXT = 32_000
#: The most characters of all roles that wait for a launcher that is away; more is dropped, and counted.
MOST_HELD = 4_000_000


class RoleProcess(Protocol):
    """One process of a role that has been started. Its agent calls `close` when it has ended."""

    @property
    def pid(self) -> int | None:
        """Its process number on its host, if it has one."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Completes with its exit code (negative for a signal) when it has ended. Several tasks may await it: use
        ``asyncio.shield``."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal (SIGTERM asks it to end, SIGKILL ends it). Does nothing if it has ended."""

    async def flush(self, timeout_s: float) -> None:
        """Return when all its output up to its end has been passed on, or after ``timeout_s`` seconds: a process that it started
        itself may keep its output open."""

    def report(self) -> Mapping[str, Any] | None:
        """The error report that it wrote, if any, once it has ended."""

    def close(self) -> None:
        """Pass on the rest of its output, and release its resources. Does not end the process. Idempotent."""


class Processes(Protocol):
    """The operations that an agent needs of its host: start processes, and find out how they end."""

    async def start(self, role: RolePlacement, environment: RoleEnvironment, printed: Callable[[str], None]) -> RoleProcess:
        """Start a process for this role.

        ``environment`` tells it how to find the run. ``printed`` gets its output in whole lines, on the loop's thread.
        Raises `HostLostError` if this host cannot start any more processes.
        """


class Agent:
    """Starts and watches the roles of one host."""

    def __init__(self, link: AgentLink, description: RunDescription, environment: RoleEnvironment, processes: Processes) -> None:
        """``link``: this host's membership, which has joined. ``environment``: the agent's own; each role gets the same with its
        own name."""
        self._link, self._description, self._environment, self._processes = link, description, environment, processes
        self._timeouts = environment.timeouts
        self._patience_s = self._timeouts.grace_s / 2  # how long roles may take to end by themselves
        self._running: dict[PeerId, RoleProcess] = {}  # the latest process of each role
        self._lives: dict[PeerId, asyncio.Task[None]] = {}  # the task that watches each role
        self._watching: asyncio.TaskGroup | None = None  # the task group of `_lives`, as long as there are tasks
        self._told_to_end = asyncio.Event()
        self._needless = asyncio.Event()
        self._stopping = asyncio.Event()
        self._preempted = asyncio.Event()
        self._stopped: set[PeerId] = set()  # roles that this agent has ended
        self._away: set[PeerId] = set()  # roles that are being restarted
        self._lines: list[dict[str, Any]] = []
        self._held = 0  # characters that wait to be sent, or to be answered
        self._dropped: dict[PeerId, int] = {}  # characters of each role that were dropped since the last line that says so
        self._more_lines = asyncio.Event()

    async def run(self) -> None:
        """Start all roles of this host, and return when all have ended, the coordinator knows, and the host has left the run.

        Raises `ConnectivityError` if the coordinator is gone or has given up this host. Its roles are not needed then: end those
        that are left.
        """
        self._link.alone_s = self._description.alone_s
        self._link.on_halt(self._halt)
        self._link.on_lost(self._end_lost)
        self._link.on_withdraw(self._leave_as_asked)
        async with task_group() as group:
            background = [
                group.create_task(self._link.run(), name="heartbeats"),
                group.create_task(self._link.membership.keep_in_touch(), name="keep in touch"),
                group.create_task(self._end_roles(), name="end roles"),
                group.create_task(self._end_with_the_run(), name="end with the run"),
                group.create_task(self._ask_to_stop(), name="ask to stop"),
                group.create_task(self._withdraw(), name="withdraw this host"),
                group.create_task(self._forward(), name="forward output"),
            ]
            await self._live_all()
            await self._send_lines()
            await self._link.leave()
            for task in background:
                task.cancel()

    def stop(self) -> None:
        """End all roles in an orderly way. Called when this process was told to end: an elastic run goes on without this host, once
        others have what its model servers had; any other is halted, with this as the reason."""
        self._told_to_end.set()

    def _leave_as_asked(self) -> None:
        """The coordinator asks this host to leave: the run needs none of its roles."""
        self._needless.set()
        self._told_to_end.set()

    def preempt(self) -> None:
        """This host is about to be taken away: ask the coordinator to stop all workers with a checkpoint while there is time."""
        self._preempted.set()

    def hit(self, peer: PeerId, number: signal.Signals) -> None:
        """Send a signal to the process of a role, as anybody on its host may. Nothing happens if there is none."""
        process = self._running.get(peer)
        if process is not None:
            process.signal(number)

    def restart(self, role: RolePlacement, after_s: float) -> None:
        """End the process of a role without notice, and start another one ``after_s`` seconds later. Nothing happens if there is
        none, or if this host is ending."""
        process = self._running.get(role.peer)
        if process is None or process.exited.done() or role.peer in self._away or self._stopping.is_set():
            return
        assert self._watching is not None, "a role is there"
        self._away.add(role.peer)
        process.signal(signal.SIGKILL)
        life = self._live_after(self._lives[role.peer], role, after_s)
        self._lives[role.peer] = self._watching.create_task(life, name=f"watch {role.peer} again")

    def start_again(self, role: RolePlacement) -> bool:
        """Start a role again whose process has ended, even beyond ``[job] restarts``. Returns whether that was possible: not if the
        process is still running, or if this host is ending."""
        process = self._running.get(role.peer)
        if process is None or not process.exited.done() or self._stopping.is_set():
            return False
        if self._watching is None or all(life.done() for life in self._lives.values()):  # this host has done its part
            return False
        life = self._live_after(self._lives[role.peer], role)
        self._lives[role.peer] = self._watching.create_task(life, name=f"watch {role.peer} again")
        return True

    # The life of a role -------------------------------------------------------------------------------------------------------

    async def _live_all(self) -> None:
        host = self._environment.peer.partition("/")[2]
        try:
            async with asyncio.TaskGroup() as self._watching:
                for role in self._description.placement.of_host(host):
                    self._lives[role.peer] = self._watching.create_task(self._live(role), name=f"watch {role.peer}")
        finally:
            self._watching = None

    async def _live_after(self, before: asyncio.Task[None], role: RolePlacement, after_s: float = 0.0) -> None:
        await asyncio.wait([before])  # the end of the previous process must be reported first
        if after_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await self._stopping.wait()
                return
        self._away.discard(role.peer)
        await self._live(role)

    async def _live(self, role: RolePlacement) -> None:
        """Run one role, from its start to the report of its end; repeatedly if workers are restarted."""
        topology = self._description.topology
        comes_back = role.kind == "worker" or (role.kind in ("server", "fc") and topology.replicated)
        left = topology.job.restarts if topology.elastic and comes_back else 0
        while not await self._live_once(role, again=left > 0) and left and not self._stopping.is_set():
            left -= 1
            more = f"after that at most {counted(left, 'time')}" if left else "for the last time"
            self._printed(role.peer, f"{role.peer} was lost and is started again ({more})\n")

    async def _live_once(self, role: RolePlacement, *, again: bool) -> bool:
        """Returns whether it ended by itself: successfully, or by an error of its own. Otherwise a new process may succeed;
        ``again``: and is started."""
        peer = role.peer
        self._link.started(peer)
        process = await self._processes.start(role, replace(self._environment, peer=peer), partial(self._printed, peer))
        try:
            self._running[peer] = process
            if self._stopping.is_set():
                self._end(peer, signal.SIGTERM)
            code = await asyncio.shield(process.exited)
            await process.flush(self._timeouts.flush_s)
            report = process.report()
        finally:
            process.close()
        if report is not None:  # only into the log: the launcher shows the first failure of all roles on the terminal
            self._lines.append({"kind": LOG, "peer": peer, "text": str(report.get("traceback", "")), "quiet": True})
        await self._send_lines()
        stopped = peer in self._stopped
        ended = stopped or 0 <= code < ConnectivityError.exit_code
        again = again and not ended and not self._stopping.is_set()
        await self._link.exited(peer, code, report, stopped=stopped, pid=process.pid, again=again)
        return ended

    # The end of roles ---------------------------------------------------------------------------------------------------------

    def _halt(self, reason: Mapping[str, Any]) -> None:
        """The run must stop. Roles that write a checkpoint of the last good step get the time for it."""
        if reason.get("kind") == "nan":
            self._patience_s = self._timeouts.request_s
        self._stopping.set()

    async def _withdraw(self) -> None:
        """Once this process was told to end."""
        await self._told_to_end.wait()
        host = self._environment.peer.partition("/")[2]
        placement = self._description.placement
        only_workers = all(role.kind == "worker" for role in placement.of_host(host))
        others = only_workers and any(role.host != host for role in placement.workers)
        stays = ""
        if self._description.topology.moves_shards and not only_workers:
            stays = await self._hand_over()
        if self._needless.is_set() or (self._description.topology.elastic and others):
            self._patience_s = 0.0  # nobody else tells the roles
        elif not self._stopping.is_set():
            reason = {
                "kind": "host withdrawn",
                "message": f"the agent of {host} was told to end (SIGTERM){stays and '; '}{stays}",
                "exit_code": TOLD_TO_END,
            }
            with suppress(ZmqTrainError, TimeoutError):  # the roles end all the same
                async with asyncio.timeout(self._patience_s):
                    await self._link.membership.halt(reason)
        self._stopping.set()
        self._link.membership.hurry()

    async def _hand_over(self) -> str:
        """Have what model servers of this host have moved to others, if the run can be without it: the coordinator then asks this
        host to leave. Returns why it cannot; after the grace time at the latest, since the machine may be switched off then."""
        if self._needless.is_set() or self._stopping.is_set() or self._link.membership.away:
            return ""
        ends = [asyncio.ensure_future(event.wait()) for event in (self._needless, self._stopping)]
        try:
            async with asyncio.timeout(self._timeouts.grace_s):
                await self._link.membership.ask(LEAVES)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return f"what its model servers have had not moved {self._timeouts.grace_s:g} s later"
        except ZmqTrainError as error:
            return str(error)
        finally:
            await abandoned(ends)
        return ""

    def _end_lost(self, peer: PeerId) -> None:
        """The run continues without a role that may hang for ever. It may also have failed and be about to report it: its
        connections end before its process does."""
        process = self._running.get(peer)
        if process is not None and not process.exited.done():
            asyncio.get_running_loop().call_later(self._timeouts.grace_s, process.signal, signal.SIGKILL)

    async def _end_with_the_run(self) -> None:
        """The run is over once all roles have ended. A process that runs here even so came too late for it, and would look for
        the run until its time-out."""
        await self._link.finished.wait()
        self._stopping.set()

    async def _end_roles(self) -> None:
        """When the run must stop: the coordinator has told the roles; those that do not end by themselves are ended."""
        await self._stopping.wait()
        for number, patience_s in ((signal.SIGTERM, self._patience_s), (signal.SIGKILL, self._timeouts.grace_s / 2)):
            lives = [life for life in self._lives.values() if not life.done()]
            if not lives:
                return
            await asyncio.wait(lives, timeout=patience_s)
            for peer, process in self._running.items():
                if not process.exited.done():
                    self._end(peer, number)

    def _end(self, peer: PeerId, number: signal.Signals) -> None:
        self._stopped.add(peer)
        self._running[peer].signal(number)

    # Reports about roles ------------------------------------------------------------------------------------------------------

    async def _ask_to_stop(self) -> None:
        await self._preempted.wait()
        await self._link.membership.ask(PREEMPT)

    def _printed(self, peer: PeerId, text: str) -> None:
        if self._held + len(text) > MOST_HELD:
            self._dropped[peer] = self._dropped.get(peer, 0) + len(text)
            return
        self._held += len(text)
        self._lines.append({"kind": LOG, "peer": peer, "text": text})
        self._more_lines.set()

    async def _forward(self) -> None:
        while True:
            await self._more_lines.wait()
            await self._send_lines()
            await asyncio.sleep(PRINT_S)

    async def _send_lines(self) -> None:
        self._more_lines.clear()
        lines, self._lines = self._lines, []
        for peer, count in self._dropped.items():
            text = f"[{count} characters that it printed while the launcher was away were dropped]\n"
            lines.append({"kind": LOG, "peer": peer, "text": text})
        self._dropped.clear()
        if lines:
            await self._link.membership.report(_joined(lines))
            self._held = sum(len(line["text"]) for line in self._lines)


def _joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring pieces of output of one role."""
    result: list[dict[str, Any]] = []
    for line in lines:
        if (
            result
            and result[-1]["peer"] == line["peer"]
            and result[-1].get("quiet") == line.get("quiet")
            and len(result[-1]["text"]) < LONGEST_TEXT
        ):
            result[-1] = {**line, "text": result[-1]["text"] + line["text"]}
        else:
            result.append(line)
    return result
