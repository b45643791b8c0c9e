"""How much may compute on machines of which the file does not say it: one asks them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from zmqtrain.launcher.engine import EngineRun
from zmqtrain.launcher.ssh.clients import make_client
from zmqtrain.launcher.ssh.preflight import Preflight
from zmqtrain.launcher.ssh.target import Target, launching_python
from zmqtrain.processors import processors
from zmqtrain.topology.schema import Host, Topology


def lacks_room(topology: Topology) -> bool:
    """Whether hosts to log in to leave ``slots`` out."""
    return topology.engine.kind == "ssh" and any(host.slots == 0 for host in topology.hosts)


def with_room_here(topology: Topology) -> Topology:
    """The topology where such hosts have what this machine has, which stands for them."""
    here = processors()
    return topology.with_hosts([_with(host, here) for host in topology.hosts])


async def with_room(topology: Topology, say: Callable[[str], None]) -> Topology:
    """The topology where such hosts have a slot for each processor that may be used there. ``say`` takes lines for the person.

    Logs in to them, and out again. Raises `HostsError`, or `HostLostError` where hosts are merely not there.
    """
    asked = tuple(host for host in topology.hosts if host.slots == 0)
    run = EngineRun(
        topology=topology,
        hosts=asked,
        coordinators={},
        folder=Path.cwd(),
        directory=Path.cwd(),
        script=None,
        timeouts=topology.job.timeouts,
        say=say,
        log=lambda host, text: say(f"{host}: {text.rstrip()}"),
    )
    python = launching_python()
    preflight = Preflight(run, make_client(topology.engine.client), "room", lambda host: Target.of(host, python))
    try:
        await preflight.log_in()
        rooms = await preflight.rooms()
    finally:
        await asyncio.gather(*(session.close() for session in preflight.sessions.values()))
    for host in asked:
        gpus = rooms[host.name][1]
        if gpus and not host.devices and topology.compute.device in ("auto", "cuda"):
            say(f'warning: {host.name} has {gpus} GPU(s) that its devices do not name: write devices = ["cuda:0", ...]')
    return topology.with_hosts([_with(host, rooms.get(host.name, (0, 0))[0]) for host in topology.hosts])


def _with(host: Host, count: int) -> Host:
    return host if host.slots else host.model_copy(update={"slots": max(count, len(host.devices))})
