"""The agent: the one process of a host that starts its roles, vouches for them, and ends them.

It runs no training code and imports no torch, so nothing that a role does can keep its heartbeats from being sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from zmqtrain.arena import Arena, Region, shared_memory_missing
from zmqtrain.death import die_with_parent
from zmqtrain.errors import ConnectivityError
from zmqtrain.launcher.forkserver import Child, ForkServer
from zmqtrain.launcher.local import PARENT
from zmqtrain.launcher.output import OutputReader
from zmqtrain.launcher.signals import heed_no_preemption, wanted_on_sigterm
from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.description import RunDescription, fetch_description
from zmqtrain.membership.environment import RoleEnvironment, rank_variables
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.loop import run
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.run.preemption import PREEMPT
from zmqtrain.run.report import LOG
from zmqtrain.topology.placement import RolePlacement

#: A report is a traceback and a few words.
LARGEST_REPORT = 1 << 20


async def run_agent(environment: RoleEnvironment) -> int:
    """An agent's life, from joining until its host's part of the run is over. Returns the process's exit code."""
    ladder = environment.ladder
    async with AsyncExitStack() as stack:
        endpoint = await open_zeromq(environment.peer, settings=environment.settings())
        stack.push_async_callback(endpoint.close)
        endpoint.add_peer(COORDINATOR, environment.coordinator)
        # torch is imported while the agent joins.
        forks = await stack.enter_async_context(ForkServer())
        link = await AgentLink.join(endpoint, coordinator_address=environment.coordinator, ladder=ladder)
        description = await fetch_description(endpoint, timeout=ladder.request_s)
        return await Agent(environment, link, description, forks).run()


class Agent:
    """Starts and watches the roles of one host."""

    def __init__(self, environment: RoleEnvironment, link: AgentLink, description: RunDescription, forks: ForkServer) -> None:
        self._environment, self._link, self._description, self._forks = environment, link, description, forks
        self._ladder = environment.ladder
        self._children: dict[PeerId, Child] = {}
        self._stopping = asyncio.Event()
        self._preempted = asyncio.Event()
        self._patience_s = self._ladder.grace_s / 2  # how long roles may take to end by themselves
        self._stopped: set[PeerId] = set()  # roles whose end was our doing
        self._region: Region | None = None
        self._lines: list[dict[str, Any]] = []
        self._more_lines = asyncio.Event()

    async def run(self) -> int:
        """Start all roles, and return when all have ended."""
        loop = asyncio.get_running_loop()
        preempts = {signal.SIGUSR1, signal.SIGTERM} if wanted_on_sigterm() else {signal.SIGUSR1}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, (self._preempted if number in preempts else self._stopping).set)
        self._link.on_halt(self._halt)
        self._link.on_lost(self._end_lost)
        host = self._environment.peer.partition("/")[2]
        roles = self._description.placement.of_host(host)
        if self._description.topology.compute.shared_memory and shared_memory_missing() is None:
            # It stays as long as a process that has it open; roles that end are replaced in their slots.
            self._region = Arena.create(len(roles))
        code = 0
        try:
            async with asyncio.TaskGroup() as group:
                watching = [
                    group.create_task(self._heartbeats(), name="heartbeats"),
                    group.create_task(self._end_roles(), name="end roles"),
                    group.create_task(self._ask_to_stop(), name="ask to stop"),
                    group.create_task(self._forward(), name="forward output"),
                ]
                async with asyncio.TaskGroup() as living:
                    for role in roles:
                        living.create_task(self._live(role), name=role.peer)
                await self._send_lines()
                await self._link.leave()
                for task in watching:
                    task.cancel()
        except* ConnectivityError as errors:
            # The run goes on without this host, or is over: either way nobody waits for its roles any more.
            print(f"{self._environment.peer}: {errors.exceptions[0]}", file=sys.stderr, flush=True)
            code = ConnectivityError.exit_code
        return code

    def _halt(self, reason: Mapping[str, Any]) -> None:
        """The run is to stop. Roles that keep a checkpoint of the last good step get the time that this may take."""
        if reason.get("kind") == "nan":
            self._patience_s = self._ladder.request_s
        self._stopping.set()

    def _end_lost(self, peer: PeerId) -> None:
        """The run goes on without a role that may stand still for ever. It may as well have failed, and be about to say why: its
        connections end before its process does."""
        child = self._children.get(peer)
        if child is not None and not child.exited.done():
            asyncio.get_running_loop().call_later(self._ladder.grace_s, _kill, child)

    async def _live(self, role: RolePlacement) -> None:
        """One role, from its start to the report of its end; more than once where workers are started again."""
        topology = self._description.topology
        left = topology.job.restarts if topology.elastic and role.kind == "worker" else 0
        while not await self._live_once(role) and left and not self._stopping.is_set():
            left -= 1
            text = f"{role.peer} was lost and is started again ({left} more times at most)\n"
            self._printed(role.peer, text)

    async def _live_once(self, role: RolePlacement) -> bool:
        """Returns whether it ended by itself: well, or by a fault of its own. Otherwise another may do better."""
        report_read, report_write = os.pipe()
        output_read, output_write = os.pipe()
        output = OutputReader(output_read, lambda text: self._printed(role.peer, text))
        try:
            try:
                self._link.started(role.peer)
                child = await self._forks.start(self._environ(role), output_write, report_write)
            finally:
                os.close(output_write)
                os.close(report_write)
            self._children[role.peer] = child
            if self._stopping.is_set():
                child.signal(signal.SIGTERM)
                self._stopped.add(role.peer)
            code = await child.exited
            report = _read_report(report_read)
            try:
                async with asyncio.timeout(self._ladder.flush_s):
                    await output.ended.wait()  # a process that the role started may hold the pipe open
            except TimeoutError:
                pass
        finally:
            output.close()
            os.close(report_read)
        if report is not None:  # into the log, not onto the terminal: the launcher shows the first failure of all
            self._lines.append({"kind": LOG, "peer": role.peer, "text": str(report.get("traceback", "")), "quiet": True})
        await self._send_lines()
        await self._link.exited(role.peer, code, report, stopped=role.peer in self._stopped, pid=child.pid)
        return role.peer in self._stopped or 0 <= code < ConnectivityError.exit_code

    def _environ(self, role: RolePlacement) -> dict[str, str]:
        description, environment = self._description, self._environment
        master = description.placement.workers[0].host
        address = next(host.address for host in description.topology.hosts if host.name == master)
        # MASTER_PORT is for torch.distributed in a script of the user's own; nothing of ours listens there.
        port = 20_000 + int.from_bytes(environment.token.encode()[:2]) % 10_000
        variables = {
            **replace(environment, peer=role.peer, **self._memory_of(role)).to_environ(),
            **rank_variables(role, description.placement, address, port),
            "OMP_NUM_THREADS": str(role.threads),
            "ZMQTRAIN_PYTHON_PATH": os.pathsep.join(description.topology.job.python_path),
        }
        if description.data_path is not None:
            variables["ZMQTRAIN_DATA"] = description.data_path
        if description.script:
            variables["ZMQTRAIN_SCRIPT"] = json.dumps(description.script)
        return variables

    def _memory_of(self, role: RolePlacement) -> dict[str, Any]:
        """A role's place in the host's shared memory: its number among the host's roles."""
        if self._region is None:
            return {}
        return {"arena": self._region.path, "slot": self._description.placement.of_host(role.host).index(role)}

    async def _heartbeats(self) -> None:
        """The link's own loop; when it gives up, all roles end with this agent."""
        await self._link.run()

    async def _ask_to_stop(self) -> None:
        """This host is about to be taken away: the launcher sees to it that all stop with a checkpoint, while there is time."""
        await self._preempted.wait()
        await self._link.membership.endpoint.request(COORDINATOR, PREEMPT, timeout=self._ladder.request_s)

    async def _end_roles(self) -> None:
        """Once the run is to stop: roles were told by the coordinator; those that do not end by themselves are ended."""
        await self._stopping.wait()
        for number, patience_s in ((signal.SIGTERM, self._patience_s), (signal.SIGKILL, self._ladder.grace_s / 2)):
            try:
                async with asyncio.timeout(patience_s):
                    await asyncio.gather(*(asyncio.shield(child.exited) for child in self._children.values()))
                return
            except TimeoutError:
                for peer, child in self._children.items():
                    if not child.exited.done():
                        self._stopped.add(peer)
                        child.signal(number)

    def _printed(self, peer: PeerId, text: str) -> None:
        self._lines.append({"kind": LOG, "peer": peer, "text": text})
        self._more_lines.set()

    async def _forward(self) -> None:
        while True:
            await self._more_lines.wait()
            await self._send_lines()
            await asyncio.sleep(0.05)  # so that a role that prints much costs a few messages a second

    async def _send_lines(self) -> None:
        self._more_lines.clear()
        lines, self._lines = self._lines, []
        if lines:
            await self._link.membership.report(_joined(lines))


def _kill(child: Child) -> None:
    if not child.exited.done():
        child.signal(signal.SIGKILL)


def _joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring texts of one role as one."""
    result: list[dict[str, Any]] = []
    for line in lines:
        if (
            result
            and result[-1]["peer"] == line["peer"]
            and result[-1].get("quiet") == line.get("quiet")
            and len(result[-1]["text"]) < 32_000
        ):
            result[-1] = {**line, "text": result[-1]["text"] + line["text"]}
        else:
            result.append(line)
    return result


def _read_report(file: int) -> Mapping[str, Any] | None:
    """The report that the ended process has written, if any. What is no report is none."""
    os.set_blocking(file, False)
    data = b""
    try:
        while len(data) < LARGEST_REPORT and (more := os.read(file, 65536)):
            data += more
    except BlockingIOError:
        pass
    try:
        report = json.loads(data)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def main() -> int:
    """``zmqtrain agent``: everything comes from the environment."""
    environment = RoleEnvironment.from_environ()
    if environment is None:
        print("zmqtrain agent is started by an engine, which sets ZMQTRAIN_PEER, _COORDINATOR and _TOKEN", file=sys.stderr)
        return 2
    heed_no_preemption()  # until it has joined, and can tell of it
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        die_with_parent(int(parent))
    try:
        return run(run_agent(environment))
    except ConnectivityError as error:
        print(f"{environment.peer}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
