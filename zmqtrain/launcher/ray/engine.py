"""The Ray engine: a placement group provides the hosts, and an actor on each starts its agent. The launcher is the driver."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from zmqtrain.errors import HostLostError, HostsError, UsageError
from zmqtrain.launcher.addresses import addresses_towards
from zmqtrain.launcher.engine import EngineRun, Gathered, Gathering, Handle
from zmqtrain.launcher.ray.actor import AgentActor
from zmqtrain.launcher.ssh.inspection import faults_of_versions, own_versions, table
from zmqtrain.topology.schema import Host, Topology

#: Seconds that stopping an actor may take in addition to the grace time.
STOPPING_S = 10.0
#: Seconds that a node may take to start an actor's process, once it has free resources.
ACTOR_S = 60.0
#: Ray gives what it runs a niceness of 15, which the agent and its roles would inherit: a node's other work would come first.
ORDINARY_PRIORITY = {"env_vars": {"RAY_worker_niceness": "0"}}


class ActorHandle:
    """Implements `zmqtrain.launcher.engine.Handle`."""

    def __init__(self, host: str, actor: Any) -> None:
        self.host, self.actor = host, actor

    async def wait(self) -> int:
        """Wait for the agent's exit code; as if it was killed, if its actor or its node is lost."""
        from ray.exceptions import RayActorError

        try:
            return int(await self.actor.wait.remote())
        except RayActorError:
            return -signal.SIGKILL


class RayEngine:
    """Implements `zmqtrain.launcher.engine.GatheringEngine`."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        self._connected = False
        self._folder = "."

    async def gather(self, gathering: Gathering) -> Gathered:
        """Get a placement group, and an actor in each of its bundles.

        Raises `HostLostError` if the cluster has no free resources within ``[engine] wait``, `HostsError` if versions differ, and
        `UsageError` if Ray is not installed or its cluster cannot be reached.
        """
        if find_spec("ray") is None:
            raise UsageError('[engine] kind = "ray" needs Ray: pip install zmqtrain[ray]')
        topology = gathering.topology
        hosts = topology.hosts
        await self._connect(topology.engine.ray.address)
        await self._reserve(topology, hosts)
        found = await self._within(ACTOR_S, [actor.look.remote() for actor in self._actors.values()], "start their actors")
        ours = own_versions()
        faults = [fault for host, seen in zip(hosts, found, strict=True) for fault in _faults(host, ours, seen["versions"])]
        if faults:
            raise HostsError(table(faults, len(hosts)))
        placed = tuple(host.model_copy(update={"address": seen["address"]}) for host, seen in zip(hosts, found, strict=True))
        towards = await addresses_towards(placed, topology.engine.address)
        return Gathered(topology.with_hosts(placed), towards, port=topology.job.port)

    async def open(self, run: EngineRun) -> None:
        """Nothing to do: all hosts were checked when they were gathered."""
        self._folder = str(run.folder.resolve())

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        """Tell the host's actor to start the agent."""
        actor = self._actors[host.name]
        await actor.start.remote(host.python, list(command), {**host.environment, **environ}, host.folder or self._folder)
        return ActorHandle(host.name, actor)

    async def stop(self, handle: Handle, grace: float) -> None:
        """Have the actor end its agent. An actor that is lost has no agent any more."""
        from ray.exceptions import RayActorError

        assert isinstance(handle, ActorHandle)
        with suppress(RayActorError, TimeoutError):
            async with asyncio.timeout(grace + STOPPING_S):
                await handle.actor.stop.remote(grace)

    async def close(self) -> None:
        """Give the nodes back, and leave the cluster."""
        if not self._connected:
            return
        import ray
        from ray.util import remove_placement_group

        actors, self._actors = list(self._actors.values()), {}
        for actor in actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        self._connected = False
        await asyncio.to_thread(ray.shutdown)

    async def _connect(self, address: str | None) -> None:
        import ray

        options = {"logging_level": logging.ERROR, "log_to_driver": False}
        try:
            # In a thread, since it takes seconds, and so that it does not change this process's signal handlers.
            await asyncio.to_thread(ray.init, address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"[engine.ray] address: no Ray cluster can be reached: {error}") from error
        self._connected = True

    async def _reserve(self, topology: Topology, hosts: Sequence[Host]) -> None:
        import ray
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wait_s = topology.engine.wait
        bundles = [bundle_of(host) for host in hosts]
        strategy = "STRICT_SPREAD" if topology.engine.ray.spread == "strict" else "SPREAD"
        self._group = placement_group(bundles, strategy=strategy)
        try:
            async with asyncio.timeout(wait_s):
                await self._group.ready()
        except TimeoutError as error:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            there = "; ".join(f"{each.get('CPU', 0):g} CPUs, {each.get('GPU', 0):g} GPUs" for each in nodes[:8])
            raise HostLostError(
                f"Ray had no free resources for {len(bundles)} hosts within {wait_s:g} s: {bundles[0]} each, as "
                f"{strategy}. It has {len(nodes)} nodes: {there}. "
                'Ask for less ([[hosts]], [engine.ray]), set spread = "soft", or wait longer '
                "([engine] wait)"
            ) from error
        remote = ray.remote(AgentActor)
        for number, (host, bundle) in enumerate(zip(hosts, bundles, strict=True)):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            self._actors[host.name] = remote.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=place,
                runtime_env=ORDINARY_PRIORITY,
            ).remote()

    async def _within(self, limit_s: float, waits: Sequence[Awaitable[Any]], what: str) -> list[Any]:
        """All results. Raises `HostLostError` if nodes do not answer in time, or are lost."""
        from ray.exceptions import RayActorError

        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.gather(*waits)
        except (TimeoutError, RayActorError) as error:
            raise HostLostError(f"nodes of the Ray cluster did not {what}: {str(error) or f'not within {limit_s:g} s'}") from error


def bundle_of(host: Host) -> dict[str, float]:
    """The resources that one host takes."""
    gpus = sum(device.startswith("cuda") for device in host.devices)
    return {"CPU": max(1, host.slots), **({"GPU": gpus} if gpus else {})}


def _faults(host: Host, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Any]:
    packages = {name: version for name, version in theirs.items() if name != "python"}
    return list(faults_of_versions(host.name, ours, {"python": theirs["python"], "packages": packages}))
