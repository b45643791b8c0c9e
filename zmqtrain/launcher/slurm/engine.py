"""The Slurm engine: an agent on each node of the job that this process runs in, started by ``srun``.

A step's standard streams carry the preflight check of the node, the copied folder, the start with its secrets, the agent's own
output, and the end. Everything else uses the run's own network.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from zmqtrain.errors import HostsError, SshError, UsageError
from zmqtrain.launcher.engine import EngineRun, Handle
from zmqtrain.launcher.slurm.allocation import Allocation
from zmqtrain.launcher.slurm.client import StepClient, StepTarget
from zmqtrain.launcher.ssh.pack import pack, program_files, require_inside
from zmqtrain.launcher.ssh.preflight import Preflight
from zmqtrain.launcher.ssh.session import Login
from zmqtrain.launcher.ssh.target import launching_python
from zmqtrain.membership.environment import BIND, HOST
from zmqtrain.topology.schema import Host, Topology

#: Seconds that stopping may take on the other side in addition to the grace time.
STOPPING_S = 15.0


class SlurmEngine:
    """Implements `zmqtrain.launcher.engine.RemoteEngine`."""

    def __init__(self) -> None:
        self._run: EngineRun | None = None
        self._preflight: Preflight | None = None

    async def open(self, run: EngineRun) -> None:
        """Start a step on each node, and check the nodes like the ssh engine.

        Raises `HostsError`, or `HostLostError` if nodes are only unreachable, and `UsageError` outside of a job.
        """
        engine = run.topology.engine
        allocation = await asyncio.to_thread(require_allocation)
        nodes = allocation.assigned(run.topology.hosts)
        if any(name != node.name for name, node in nodes.items()):
            run.say("the hosts are the nodes in this order: " + ", ".join(f"{name} is {node.name}" for name, node in nodes.items()))
        files = program_files(run.topology.job, run.script, run.folder)
        if engine.sync:
            require_inside(files, run.folder)
        packed = await asyncio.to_thread(pack, run.folder, engine.sync_limit) if engine.sync else None
        python = launching_python()
        self._run = run
        self._preflight = Preflight(
            run, StepClient(), run.directory.name, lambda host: StepTarget.on(nodes[host.name].name, host, python)
        )
        await self._preflight.log_in()
        await self._preflight.compare(files, copied=packed is not None)
        if packed is not None:
            await self._preflight.copy(packed)
        await self._preflight.try_ways()

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        """Start the agent, with the host's own Python."""
        assert self._preflight is not None
        assert self._run is not None
        session = self._preflight.sessions[host.name]
        await session.ask(
            "start",
            command=[session.target.python, *command[1:]],
            environ={**environ, HOST: host.address, BIND: self._preflight.binds[host.name]},
            folder=self._preflight.folders[host.name],
        )
        return StepHandle(session, self._run)

    async def stop(self, handle: Handle, grace: float) -> None:
        """End the agent, and its step with it."""
        assert isinstance(handle, StepHandle)
        await handle.stop(grace)

    async def close(self) -> None:
        """End the steps of all nodes, and wait until they have ended."""
        if self._preflight is not None:
            await asyncio.gather(*(session.close() for session in self._preflight.sessions.values()))


class StepHandle:
    """Implements `zmqtrain.launcher.engine.Handle`. One caller at a time: `wait` is cancelled before `stop`."""

    def __init__(self, session: Login, run: EngineRun) -> None:
        self._session, self._say = session, run.say
        self._code: int | None = None
        session.on_log(lambda text, _offset: run.log(session.target.name, text))

    async def wait(self) -> int:
        """Wait for the agent's exit code. The agent ends with its step."""
        if self._code is None:
            try:
                self._code = await self._session.follow(0)
            except (SshError, HostsError) as error:
                self._say(str(error))
                self._code = -int(signal.SIGKILL)
        return self._code

    async def stop(self, grace_s: float) -> None:
        """End the agent, and remove what was copied for it; both also happen at the end of the step."""
        with suppress(SshError, HostsError, TimeoutError):
            async with asyncio.timeout(grace_s + STOPPING_S):
                await self._session.ask("stop", grace_s=grace_s, offset=0)
                await self._session.ask("remove")
        await self._session.close()


def require_allocation() -> Allocation:
    """The job that this process runs in. Raises `UsageError` if it runs in none."""
    found = Allocation.here()
    if found is None:
        raise UsageError(
            '[engine] kind = "slurm" launches from inside a Slurm job, but this is not one: '
            "run it in `salloc` or a batch script, or submit one with --submit"
        )
    return found


def in_allocation(topology: Topology, allocation: Allocation) -> Topology:
    """The topology on the nodes of an allocation: on all of them, or on one for each host of the file. Raises `UsageError`, and
    `TopologyError` if the file's rules are broken there."""
    given = topology.hosts if "hosts" in topology.model_fields_set else None
    hosts = allocation.hosts(given)
    if given is None:  # a node has what a job of this file requests
        devices = topology.hosts[0].devices
        hosts = tuple(host.model_copy(update={"devices": devices}) for host in hosts)
    return topology.with_hosts(hosts)
