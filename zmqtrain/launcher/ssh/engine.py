"""The ssh engine: an agent on each machine, started over ssh, which continues if the connection breaks.

The ssh connection carries the preflight check of a host, the copied folder, the start, the agent's own log, and the end. Everything
else uses the run's own network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from zmqtrain.errors import HostsError, SshError
from zmqtrain.launcher.engine import EngineRun, Handle
from zmqtrain.launcher.ssh.clients import make_client
from zmqtrain.launcher.ssh.handle import SshHandle
from zmqtrain.launcher.ssh.pack import pack, program_files, require_inside
from zmqtrain.launcher.ssh.places import LeftPlaces
from zmqtrain.launcher.ssh.preflight import Preflight
from zmqtrain.launcher.ssh.session import Client, Login
from zmqtrain.launcher.ssh.target import Target, launching_python
from zmqtrain.membership.environment import BIND, HOST
from zmqtrain.observe.run_directory import log_name
from zmqtrain.topology.schema import Host
from zmqtrain.wire.payload import Value
from zmqtrain.world import random_bits

#: Seconds that a host may take to remove a folder when the launch has failed.
REMOVE_S = 5.0


class SshEngine:
    """Implements `zmqtrain.launcher.engine.RemoteEngine`."""

    def __init__(self) -> None:
        self._opened: tuple[EngineRun, Client, LeftPlaces, Preflight] | None = None

    async def open(self, run: EngineRun) -> None:
        """Log in to all hosts, check them, and copy the folder.

        Raises `HostsError`, or `HostLostError` if hosts are only unreachable, and `UsageError` for a folder that is too large.
        """
        engine = run.topology.engine
        client = make_client(engine.client)
        files = program_files(run.topology.job, run.script, run.folder)
        if engine.sync:
            require_inside(files, run.folder)
        packed = await asyncio.to_thread(pack, run.folder, engine.sync_limit) if engine.sync else None
        python = launching_python()
        name = f"{run.directory.resolve().name}-{random_bits(32):08x}"
        places = LeftPlaces(run.directory, name, python, [host.name for host in run.hosts])
        preflight = Preflight(run, client, name, lambda host: Target.of(host, python))
        self._opened = run, client, places, preflight
        await preflight.log_in()
        await preflight.compare(files, copied=packed is not None)
        places.write()  # from here on there may be something to remove
        if packed is not None:
            await preflight.copy(packed)
        await preflight.try_ways()

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        """Start the agent, with the host's own Python."""
        assert self._opened is not None
        run, client, places, preflight = self._opened
        session = preflight.sessions[host.name]
        await session.ask(
            "start",
            command=[session.target.python, *command[1:]],
            environ={**environ, HOST: host.address, BIND: preflight.binds[host.name]},
            folder=preflight.folders[host.name],
        )
        alone_s = run.topology.job.alone
        return SshHandle(session, client, places.run, run.timeouts, say=run.say, log=run.log, alone_s=alone_s)

    def trace(self, handle: Handle) -> Value:
        """The run directory says on which hosts it has something (`LeftPlaces`)."""
        return None

    async def adopt(self, run: EngineRun, traces: Mapping[str, Value], sizes: Mapping[str, int]) -> Mapping[str, Handle]:
        """Log in to all hosts. Raises `HostLostError` if some cannot be reached."""
        places = LeftPlaces.read(run.directory)
        if places is None:
            return {}
        client, python = make_client(run.topology.engine.client), places.python
        handles: dict[str, Handle] = {}
        preflight = Preflight(run, client, places.run, lambda host: Target.of(host, python))
        self._opened = run, client, places, preflight
        await preflight.log_in()
        for name, session in preflight.sessions.items():
            if session.state["agent"] == "running":
                # Its log has nothing but what it printed itself.
                offset = sizes.get(f"logs/{log_name(f'agent/{name}')}.log", 0)
                alone_s = run.topology.job.alone
                handles[name] = SshHandle(
                    session, client, places.run, run.timeouts, say=run.say, log=run.log, offset=offset, alone_s=alone_s
                )
        return handles

    async def stop(self, handle: Handle, grace: float) -> None:
        """End the agent, and remove the run's folder on its host. If the host cannot be reached, a line says so."""
        assert isinstance(handle, SshHandle)
        assert self._opened is not None
        if await handle.stop(grace):
            self._opened[2].forget(handle.host)

    async def close(self) -> None:
        """Log out of all hosts, and remove what `open` copied before it failed."""
        if self._opened is not None:
            _, _, places, preflight = self._opened
            async with asyncio.TaskGroup() as group:
                for name, session in preflight.sessions.items():
                    group.create_task(_leave(session, places, name), name=f"leave {name}")


async def _leave(session: Login, places: LeftPlaces, name: str) -> None:
    try:
        if name in places.hosts:
            with suppress(HostsError, SshError, TimeoutError):  # then `zmqtrain stop` does it later
                async with asyncio.timeout(REMOVE_S):
                    await session.ask("remove")
                    places.forget(name)
    finally:
        await session.close()
