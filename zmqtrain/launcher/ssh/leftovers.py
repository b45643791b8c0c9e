"""Inspect and stop what is left of a run on its hosts when its launcher is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zmqtrain.errors import HostsError, SshError
from zmqtrain.launcher.ssh.clients import make_client
from zmqtrain.launcher.ssh.places import LeftPlaces
from zmqtrain.launcher.ssh.preflight import MOST_LOGINS
from zmqtrain.launcher.ssh.session import Login
from zmqtrain.launcher.ssh.target import Target
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.schema import Topology

T = TypeVar("T")


async def inspect_hosts(directory: Path) -> dict[str, Mapping[str, Any] | SshError]:
    """The state of the run's agent on each host, as in `Login.state`, or the error if it cannot be found out."""

    async def look(session: Login) -> Mapping[str, Any]:
        return session.state

    return await _on_each(directory, look)


async def stop_hosts(directory: Path) -> dict[str, int | SshError | None]:
    """End a run's agents on its hosts, and remove its folders there. Returns each agent's exit code (``None``: there was no
    agent), or the error; another call tries those hosts again."""
    places = LeftPlaces.read(directory)

    async def stop(session: Login) -> int | None:
        # At once: without a launcher, roles cannot send their results anywhere.
        answer = await session.ask("stop", grace_s=0, offset=0)
        await session.ask("remove")
        code = answer["stopped"]
        return None if code is None else int(code)

    done = await _on_each(directory, stop)
    for name, result in done.items():
        if places is not None and not isinstance(result, SshError):
            places.forget(name)
    return done


async def _on_each(directory: Path, do: Callable[[Login], Awaitable[T]]) -> dict[str, T | SshError]:
    places = LeftPlaces.read(directory)
    if places is None:
        return {}
    topology = _topology(directory)
    client = make_client(topology.engine.client)
    connect_s = topology.job.timeouts.connect_s
    gate = asyncio.Semaphore(MOST_LOGINS)

    async def one(name: str) -> T | SshError:
        target = Target.of(next(host for host in topology.hosts if host.name == name), places.python)
        try:
            async with gate:
                session = await Login.open(client, target, places.run, connect_s=connect_s)
            try:
                return await do(session)
            finally:
                await session.close()
        except SshError as error:
            return error
        except HostsError as error:
            return SshError(name, str(error).removeprefix(f"{name}: "))

    results = await asyncio.gather(*(one(name) for name in places.hosts))
    return dict(zip(list(places.hosts), results, strict=True))


def _topology(directory: Path) -> Topology:
    return load_topology(directory / "topology.toml")
