"""A run whose roles you start yourself: as coroutines of your own event loop, as processes of your own scheduler, or both::

    async with open_run(topology) as run, asyncio.TaskGroup() as tasks:    # a coordinator, listening
        tasks.create_task(run.role("server/0"))                            # coroutines in this very loop
        tasks.create_task(run.role("worker/0", task=task))
        ...                       # and a process for worker/1 with run.environment("worker/1") added to its environment, in which
                                  # `await run_role(task=task)` is called

``run.placement.roles`` lists the roles. A run begins when all of them have joined, which they must within the ``join`` time-out.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zmqtrain.errors import TaskError, UsageError
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.coordinator import EventCallback, ReportCallback
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR, RoleEnvironment, net_settings
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.run.assembly import Assembly, Listeners, coordinator_settings
from zmqtrain.run.enter import enter, enter_run, live_without_agent
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.words import typed

if TYPE_CHECKING:
    from zmqtrain.train.task import Task


#: The roles, with their runs' coordinators, as which this process has entered a run by `enter_world`.
_entered: set[tuple[str, str]] = set()


class OwnRun:
    """A run with its coordinator in this event loop. Made by `open_run`."""

    def __init__(self, assembly: Assembly, address: str, token: str, network: MemoryNetwork | None) -> None:
        self.topology, self.placement = assembly.description.topology, assembly.description.placement
        self.timeouts = assembly.timeouts
        self._assembly = assembly
        self._address, self._token, self._network = address, token, network
        self._here: set[PeerId] = set()  # roles that run in this process
        self.ended = False
        """Whether the block of `open_run` has been left, so that nobody can join any more."""

    def environment(self, peer: PeerId) -> dict[str, str]:
        """Environment variables for a process that runs this role by awaiting `run_role`. They contain the run's secret token.

        Raises `UsageError` if the run has no such role, has ended, or is in memory, with all roles in one process."""
        self._require(peer)
        return self._environment(peer).to_environ()

    def _environment(self, peer: PeerId) -> RoleEnvironment:
        if self._network is not None:
            raise UsageError("a run in memory has all roles in this process: use OwnRun.role, or call open_run without network")
        host = next(host for host in self.topology.hosts if host.name == self.placement.role(peer).host)
        members = self.placement.members
        environment = RoleEnvironment.of_job(self.topology.job, peer, self._address, self._token, members=members)
        return replace(environment, host=host.address, bind=host.bind or "")

    def _require(self, peer: PeerId) -> None:
        peers = [role.peer for role in self.placement.roles]
        if peer not in peers:
            raise UsageError(f"the run has no role {peer!r}: it has {', '.join(peers)}")
        if self.ended:
            raise UsageError(f"{peer} cannot join any more: the run has ended, as its open_run block has")

    async def stop(self) -> int | None:
        """Let all workers continue to a common step, and end the run there as if it was done. Returns the step; ``None`` if the
        run is about to end by itself. Raises `ConnectivityError`, with the reason, if they cannot."""
        return await self._assembly.stop()

    async def role(self, peer: PeerId, *, task: Task | None = None) -> None:
        """Run this role until the run has ended.

        Args:
            peer: one of ``placement.roles``, like ``worker/0``; each must be run once, here or in another process.
            task: for workers (and FC servers), instead of loading what ``[job] task`` names.

        Raises the error by which the role fails, after telling the others: `TaskError`, `PeerLostError`, ...; and `UsageError` if
        the run has no such role or has ended.
        """
        _require_task(task)
        async with self.context(peer) as context:
            await live_without_agent(context, task)

    @asynccontextmanager
    async def context(self, peer: PeerId) -> AsyncIterator[RoleContext]:
        """Join as this role, whose code is your own. `role` does this for zmqtrain's own roles."""
        self._require(peer)
        if peer in self._here:
            raise UsageError(f"{peer} runs in this process already: each role must be run once")
        self._here.add(peer)
        try:
            async with self._joined(peer) as context:
                yield context
        finally:
            self._here.remove(peer)

    @asynccontextmanager
    async def _joined(self, peer: PeerId) -> AsyncIterator[RoleContext]:
        if self._network is None:
            async with enter_run(self._environment(peer)) as (context, _):
                yield context
            return
        endpoint = self._network.endpoint(peer, net_settings(self.timeouts, self._token))
        try:
            async with enter(endpoint, self._address, self.timeouts) as (context, _):
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
    checkpoints: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    model: bool = True,
    on_report: ReportCallback | None = None,
    on_event: EventCallback | None = None,
) -> AsyncIterator[OwnRun]:
    """Open a run with a coordinator for the topology's roles in the running event loop. At the end of the block it waits until all
    have left.

    Args:
        topology: from `load_topology`; its engine is not used.
        data_path: where tasks find their data.
        host: address at which the coordinator listens, and that roles of other machines connect to.
        network: run in memory, all roles in this process, instead of over ZeroMQ.
        checkpoints: folder for checkpoints, by default ``runs/NAME/checkpoints``.
        resume: a checkpoint to continue from.
        model: save the run's model, ``model.safetensors`` with ``model.json``, in the parent of the checkpoints' folder.
        on_report: called with a role's name and its events (losses, evaluations, ...), several times a second.
        on_event: called with a kind and values for events of the run itself: members that join, leave or are lost (``join``,
            ``leave``, ``lost``, ``failed``, ...; ``values["reason"]`` says why), and the results of checkpoints
            (``checkpoint complete``, ``checkpoint failed``, ...).

    Yields an `OwnRun`, which starts roles. At the end of the block it raises the failure of a role that runs elsewhere.
    """
    if not isinstance(topology, Topology):
        raise UsageError(
            f"open_run needs a Topology, but got {typed(topology)}: load_topology(path) makes one of a file, and "
            "Topology.from_dict(values) of a mapping"
        )
    if topology.observe.to:
        raise UsageError("[observe] to: open_run passes no figures on: remove the setting, and take them with on_report")
    placement, token = place(topology), secrets.token_hex(16)
    encrypted = network is None and topology.encrypted()
    endpoint = await _open(network, coordinator_settings(topology, token, encrypted=encrypted, host=host))
    running: asyncio.Task[Outcome] | None = None
    try:
        described = RunDescription(
            topology, placement, os.getcwd(), data_path or topology.data.path, None if resume is None else os.fspath(resume)
        )
        folder = Path("runs", topology.job.name, "checkpoints") if checkpoints is None else Path(checkpoints)
        assembly = Assembly(
            endpoint,
            described,
            checkpoints=folder,
            model=folder.parent if model else None,
            agents=False,
            listeners=Listeners(on_event, on_report, on_checkpoint=on_event),
        )
        running = asyncio.create_task(assembly.run(), name="coordinator")
        run = OwnRun(assembly, endpoint.address, token, network)
        try:
            yield run
            outcome = await running
        finally:
            run.ended = True
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)  # its error was raised above, or is a consequence of one that was
        await endpoint.close()
    if outcome.status == "failed" and outcome.cause is not None:
        raise outcome.cause.error


@asynccontextmanager
async def enter_world() -> AsyncIterator[RoleContext]:
    """Enter the run that the environment names, or else a world of one worker in memory."""
    environment = RoleEnvironment.from_environ()
    if environment is not None:
        role = (environment.peer, environment.coordinator)
        if role in _entered:
            raise UsageError(
                f"this process has been {environment.peer} of the run already: a worker of a launched run has one session. Train "
                "all that there is to train in it, or launch the script again for what comes afterwards"
            )
        _entered.add(role)
        async with enter_run(environment) as (context, _):
            yield context
        return
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks != "1":
        raise UsageError(
            f"torchrun has started {ranks} processes, each of which would train by itself: start a script with a session by "
            '`zmqtrain launch FILE script.py`; or let torch.distributed connect the processes, by init_process_group("zmq")'
        )
    topology = Topology.from_dict({"job": {"name": "alone"}, "compute": {"group_size": 1}})
    data_path = os.environ.get("ZMQTRAIN_DATA")
    alone = open_run(topology, data_path=data_path, network=MemoryNetwork(), model=False)  # the script has the model anyway
    async with alone as run, run.context("worker/0") as context:
        yield context


async def run_role(*, task: Task | None = None) -> None:
    """Run the role that this process's environment names (`OwnRun.environment`), until the run has ended.

    Args:
        task: for workers (and FC servers), instead of loading what ``[job] task`` names.

    Raises `UsageError` without such an environment, and the error by which the role fails, after telling the others.
    """
    environment = RoleEnvironment.from_environ()
    _require_task(task)
    if environment is None:
        raise UsageError("this process was not started for a run: add OwnRun.environment(peer) to its environment")
    async with enter_run(environment) as (context, _):
        await live_without_agent(context, task)


def _require_task(task: Any) -> None:
    """Raises `TaskError`."""
    if task is None:
        return
    from zmqtrain.train.task import Task  # imports torch, which whoever has made a task has done

    if not isinstance(task, Task):
        hint = ": call it, as in task=task()" if callable(task) else ""
        raise TaskError(f"task must be a zmqtrain.Task, but is {typed(task)}{hint}")


async def _open(network: MemoryNetwork | None, settings: NetSettings) -> Endpoint:
    return await open_zeromq(COORDINATOR, settings=settings) if network is None else network.endpoint(COORDINATOR, settings)
