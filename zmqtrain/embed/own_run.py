"""A run whose roles you start yourself: as coroutines of your own event loop, as processes of your own scheduler, or both::

    async with open_run(topology) as run, asyncio.TaskGroup() as tasks:    # a coordinator, listening
        tasks.create_task(run.role("server/0"))                            # coroutines in this very loop
        tasks.create_task(run.role("worker/0", task=task))
        ...                       # and a process for worker/1 with run.environment("worker/1") added to its environment, in which
                                  # `await run_role(task=task)` is called

``run.placement.roles`` says which roles there are. A run begins when all of them have joined, within the ladder's ``join`` time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.embed.enter import enter, enter_run
from zmqtrain.errors import ConnectivityError, TaskError, UsageError, ZmqTrainError
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.common_stop import stop_together
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.coordinator import Coordinator, ReportCallback
from zmqtrain.membership.description import RunDescription, serve_description
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.net.curve import Identity
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Ladder
from zmqtrain.train.checkpoint_collector import CheckpointCollector

if TYPE_CHECKING:
    from zmqtrain.train.task import Task


class OwnRun:
    """A run with its coordinator in this event loop. Made by `open_run`."""

    def __init__(
        self, topology: Topology, placement: Placement, coordinator: Endpoint, token: str, network: MemoryNetwork | None
    ) -> None:
        self.topology, self.placement = topology, placement
        self._coordinator = coordinator
        self.ladder = Ladder.of(topology.job.timeout_s)
        self._address, self._token, self._network = coordinator.address, token, network

    def environment(self, peer: PeerId) -> dict[str, str]:
        """Environment variables that make a process this role; in it, call `run_role`. They hold the run's secret token."""
        return self._environment(peer).to_environ()

    def _environment(self, peer: PeerId) -> RoleEnvironment:
        assert self._network is None, "a run in memory is in one process"
        host = next(host for host in self.topology.hosts if host.name == self.placement.role(peer).host)
        job = self.topology.job
        environment = RoleEnvironment(peer, self._address, self._token, host.address, job.timeout_s, ports=job.port_range)
        return replace(environment, bind=host.bind or "")

    async def stop(self) -> int | None:
        """Let all workers go on to the same step, and the run end there as when it is done. Returns the step; ``None`` where it is
        about to end by itself. Raises `ConnectivityError` where they cannot, with the reason."""
        workers = [worker.peer for worker in self.placement.workers]
        return await stop_together(self._coordinator, workers, timeout_s=self.ladder.barrier_s)

    async def role(self, peer: PeerId, *, task: Task | None = None) -> None:
        """Be this role until the run is through. ``task``: for workers, instead of loading what ``[job] task`` names.

        Raises what the role fails with, after telling the others.
        """
        async with self.context(peer) as context:
            await _live(context, task)

    @asynccontextmanager
    async def context(self, peer: PeerId) -> AsyncIterator[RoleContext]:
        """Join as this role, which is of your own making. `role` does this for those that zmqtrain has."""
        if self._network is None:
            async with enter_run(self._environment(peer)) as (context, _):
                yield context
            return
        endpoint = self._network.endpoint(peer, net_settings(self.ladder, self._token))
        try:
            async with enter(endpoint, self._address, self.ladder) as (context, _):
                yield context
        finally:
            await endpoint.close()


@asynccontextmanager
async def open_run(
    topology: Topology,
    *,
    data_path: str | None = None,
    host: str = "127.0.0.1",
    network: MemoryNetwork | None = None,
    checkpoints: Path | None = None,
    resume: Path | None = None,
    model: bool = True,
    on_report: ReportCallback | None = None,
) -> AsyncIterator[OwnRun]:
    """A coordinator for the topology's roles, in the running event loop. At the end of the block it waits until all have left.

    Args:
        topology: from `load_topology`; its engine is not used.
        data_path: where tasks find their data.
        host: address at which the coordinator listens, and that roles of other machines connect to.
        network: run in memory, all roles in this process, instead of over ZeroMQ.
        checkpoints: folder for checkpoints, by default ``runs/NAME/checkpoints``.
        resume: a checkpoint to go on from.
        model: leave the run's model, ``model.safetensors`` with ``model.json``, in the folder that has the checkpoints' one.
        on_report: called with a role's name and its events (losses, evaluations, ...), several times a second.

    Raises, at the end of the block, the failure of a role that runs elsewhere.
    """
    placement, ladder, token = place(topology), Ladder.of(topology.job.timeout_s), secrets.token_hex(16)
    identity = Identity.coordinator(token) if network is None and topology.encrypted() else None
    job = topology.job
    endpoint = await _open(network, net_settings(ladder, token, host=host, port=job.port, ports=job.port_range, identity=identity))
    serving: list[asyncio.Task[object]] = []
    try:
        described = RunDescription(
            topology, placement, os.getcwd(), data_path or topology.data.path, None if resume is None else str(resume)
        )
        serve_description(endpoint, described)
        folder = checkpoints or Path("runs", topology.job.name, "checkpoints")
        left = folder.parent if model else None
        collector = CheckpointCollector.of(endpoint, folder, topology, placement, resume=resume, model=left)
        coordinator = Coordinator(endpoint, placement, ladder, agents=False, elastic=topology.elastic, on_report=on_report)
        serving = [
            asyncio.create_task(coordinator.run(), name="coordinator"),
            asyncio.create_task(collector.run(), name="collect checkpoints"),
        ]
        yield OwnRun(topology, placement, endpoint, token, network)
        await serving[0]
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await endpoint.close()
    outcome = coordinator.outcome
    if outcome is not None and outcome.status == "failed" and outcome.cause is not None:
        raise outcome.cause.error


@asynccontextmanager
async def enter_world() -> AsyncIterator[RoleContext]:
    """Enter the run that the environment names, or else a world of one worker, in memory."""
    environment = RoleEnvironment.from_environ()
    if environment is not None:
        async with enter_run(environment) as (context, _):
            yield context
        return
    topology = Topology.from_dict({"job": {"name": "alone"}, "compute": {"group_size": 1}})
    data_path = os.environ.get("ZMQTRAIN_DATA")
    alone = open_run(topology, data_path=data_path, network=MemoryNetwork(), model=False)  # its script holds the model anyway
    async with alone as run, run.context("worker/0") as context:
        yield context


async def run_role(*, task: Task | None = None) -> None:
    """Be the role that this process's environment names (`OwnRun.environment`), until the run is through.

    ``task``: for workers, instead of loading what ``[job] task`` names. Raises `UsageError` without such an environment.
    """
    environment = RoleEnvironment.from_environ()
    if environment is None:
        raise UsageError("this process was not started for a run: add OwnRun.environment(peer) to its environment")
    async with enter_run(environment) as (context, _):
        await _live(context, task)


async def _live(context: RoleContext, task: Task | None) -> None:
    """Be the role that the context describes. A failure is told to the others, and raised."""
    try:
        from zmqtrain.run.role import run_role

        await run_role(context, task=task)
    except Exception as error:
        with suppress(ConnectivityError):  # a coordinator that is gone needs not be told
            known = error if isinstance(error, ZmqTrainError) else TaskError(str(error))
            report = {"message": str(error), "type": type(error).__name__, "verdict": known.verdict}
            await context.membership.fail({**report, "exit_code": known.exit_code, "consequence": known.consequence})
        raise


async def _open(network: MemoryNetwork | None, settings: NetSettings) -> Endpoint:
    return await open_zeromq(COORDINATOR, settings=settings) if network is None else network.endpoint(COORDINATOR, settings)
