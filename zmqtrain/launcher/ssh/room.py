"""Asks machines for their number of processors, if the file does not give it."""

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
from zmqtrain.words import counted


def lacks_room(topology: Topology) -> bool:
    """Whether the file leaves out ``slots`` for a host that is reached by ssh."""
    return topology.engine.kind == "ssh" and any(host.slots == 0 for host in topology.hosts)


def with_room_here(topology: Topology) -> Topology:
    """The topology in which such hosts have the slots of this machine, as a substitute."""
    here = processors()
    return topology.with_hosts([_with(host, here) for host in topology.hosts])


async def with_room(topology: Topology, say: Callable[[str], None]) -> Topology:
    """The topology in which such hosts have a slot for each processor that may be used there. ``say`` prints lines for the user.

    Logs in to them and out again. Raises `HostsError`, or `HostLostError` if hosts are only unreachable.
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
            say(f'warning: {host.name} has {counted(gpus, "GPU")} that its devices leave out: write devices = ["cuda:0", ...]')
    return topology.with_hosts([_with(host, rooms.get(host.name, (0, 0))[0]) for host in topology.hosts])


def _with(host: Host, count: int) -> Host:
    return host if host.slots else host.model_copy(update={"slots": max(count, len(host.devices))})
