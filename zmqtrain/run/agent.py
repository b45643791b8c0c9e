"""The agent: the one process of a host that starts its roles, vouches for them, tells how they end, and ends them.

It is the same code in every world. What a world has below it is `Processes`: processes that a fork server forks
(`zmqtrain.launcher.forked`), or coroutines of a simulated machine (`zmqtrain.simulate.host`)::

    link = await AgentLink.join(endpoint, coordinator_address=environment.coordinator, timeouts=environment.timeouts)
    agent = Agent(link, description, environment, processes)
    ...                         # a signal may call agent.stop() or agent.preempt() from here on
    await agent.run()           # until this host's part of the run is over

An agent runs no training code and imports no torch, so nothing that a role does can keep its heartbeats from being sent.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zmqtrain.errors import ConnectivityError
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.run.preemption import PREEMPT
from zmqtrain.run.report import LOG
from zmqtrain.waiting import task_group

if TYPE_CHECKING:
    from zmqtrain.membership.agent_link import AgentLink
    from zmqtrain.membership.description import RunDescription
    from zmqtrain.membership.environment import RoleEnvironment
    from zmqtrain.net.endpoint import PeerId
    from zmqtrain.topology.placement import RolePlacement

#: Seconds between messages with what roles print: a role that prints much costs a few messages a second.
PRINT_S = 0.05
#: Texts of one role are joined up to this many characters.
LONGEST_TEXT = 32_000


class RoleProcess(Protocol):
    """One process of a role, which has been started. Whoever started it calls `close` when it has ended."""

    @property
    def pid(self) -> int | None:
        """Its number on its host, where it has one."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Its exit code, once it has ended; negative for a signal. Several may wait for it: shield it."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal (SIGTERM asks it to end, SIGKILL ends it). Nothing happens where it has ended."""

    async def flush(self, timeout_s: float) -> None:
        """Return when all that it has printed until its end has been handed on, at the latest after ``timeout_s``: a process that
        it started itself may hold its output open."""

    def report(self) -> Mapping[str, Any] | None:
        """The error report that it has left, if any, once it has ended."""

    def close(self) -> None:
        """Hand on the rest of what it has printed, and let go of it. The process itself is not ended. Idempotent."""


class Processes(Protocol):
    """What an agent needs of its host."""

    async def start(self, role: RolePlacement, environment: RoleEnvironment, printed: Callable[[str], None]) -> RoleProcess:
        """Start a process that becomes this role.

        ``environment`` is how it finds the run. ``printed`` is given what it prints, in whole lines, on the loop's thread.
        Raises `HostLostError` where this host can start no more processes.
        """


class Agent:
    """Starts and watches the roles of one host."""

    def __init__(self, link: AgentLink, description: RunDescription, environment: RoleEnvironment, processes: Processes) -> None:
        """``link``: this host's membership, joined already. ``environment``: the agent's own; each role has the same but for its
        name."""
        self._link, self._description, self._environment, self._processes = link, description, environment, processes
        self._timeouts = environment.timeouts
        self._patience_s = self._timeouts.grace_s / 2  # how long roles may take to end by themselves
        self._running: dict[PeerId, RoleProcess] = {}  # the newest process of each role
        self._lives: dict[PeerId, asyncio.Task[None]] = {}  # what watches each role
        self._watching: asyncio.TaskGroup | None = None  # has the tasks of `_lives`, as long as there are any
        self._stopping = asyncio.Event()
        self._preempted = asyncio.Event()
        self._stopped: set[PeerId] = set()  # roles whose end was our doing
        self._lines: list[dict[str, Any]] = []
        self._more_lines = asyncio.Event()

    async def run(self) -> None:
        """Start all roles of this host, and return when all have ended, the coordinator knows, and the host has left the run.

        Raises `ConnectivityError` where the coordinator is gone or has given this host up. Nobody waits for its roles then: end
        those that are left.
        """
        self._link.on_halt(self._halt)
        self._link.on_lost(self._end_lost)
        async with task_group() as group:
            background = [
                group.create_task(self._link.run(), name="heartbeats"),
                group.create_task(self._end_roles(), name="end roles"),
                group.create_task(self._ask_to_stop(), name="ask to stop"),
                group.create_task(self._forward(), name="forward output"),
            ]
            await self._live_all()
            await self._send_lines()
            await self._link.leave()
            for task in background:
                task.cancel()

    def stop(self) -> None:
        """End all roles in good order, as when the run is halted: whoever runs this agent was told to end."""
        self._stopping.set()

    def preempt(self) -> None:
        """This host is about to be taken away: ask the coordinator that all stop with a checkpoint, while there is time."""
        self._preempted.set()

    def start_again(self, role: RolePlacement) -> bool:
        """Start a role once more whose process has ended, beyond what ``[job] restarts`` allows. Returns whether that was possible:
        not where the process is still there, or this host is ending."""
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

    async def _live_after(self, before: asyncio.Task[None], role: RolePlacement) -> None:
        await asyncio.wait([before])  # the end of the process before must be told first
        await self._live(role)

    async def _live(self, role: RolePlacement) -> None:
        """One role, from its start to the report of its end; more than once where workers are started again."""
        topology = self._description.topology
        left = topology.job.restarts if topology.elastic and role.kind == "worker" else 0
        while not await self._live_once(role) and left and not self._stopping.is_set():
            left -= 1
            self._printed(role.peer, f"{role.peer} was lost and is started again ({left} more times at most)\n")

    async def _live_once(self, role: RolePlacement) -> bool:
        """Returns whether it ended by itself: well, or by a fault of its own. Otherwise another may do better."""
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
        if report is not None:  # into the log, not onto the terminal: the launcher shows the first failure of all
            self._lines.append({"kind": LOG, "peer": peer, "text": str(report.get("traceback", "")), "quiet": True})
        await self._send_lines()
        stopped = peer in self._stopped
        await self._link.exited(peer, code, report, stopped=stopped, pid=process.pid)
        return stopped or 0 <= code < ConnectivityError.exit_code

    # The end of roles ---------------------------------------------------------------------------------------------------------

    def _halt(self, reason: Mapping[str, Any]) -> None:
        """The run is to stop. Roles that keep a checkpoint of the last good step get the time that this may take."""
        if reason.get("kind") == "nan":
            self._patience_s = self._timeouts.request_s
        self._stopping.set()

    def _end_lost(self, peer: PeerId) -> None:
        """The run goes on without a role that may stand still for ever. It may as well have failed, and be about to say why: its
        connections end before its process does."""
        process = self._running.get(peer)
        if process is not None and not process.exited.done():
            asyncio.get_running_loop().call_later(self._timeouts.grace_s, process.signal, signal.SIGKILL)

    async def _end_roles(self) -> None:
        """Once the run is to stop: roles were told by the coordinator; those that do not end by themselves are ended."""
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

    # What is told of them -----------------------------------------------------------------------------------------------------

    async def _ask_to_stop(self) -> None:
        await self._preempted.wait()
        await self._link.membership.endpoint.request(COORDINATOR, PREEMPT, timeout=self._timeouts.request_s)

    def _printed(self, peer: PeerId, text: str) -> None:
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
        if lines:
            await self._link.membership.report(_joined(lines))


def _joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring texts of one role as one."""
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
