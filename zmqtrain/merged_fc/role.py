"""The process of an FC server, or of one of several: its part in the run.

It runs the task's own code, as workers do: the model's layers after the split, the loss, the optimizer and the metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.errors import UsageError
from zmqtrain.exchange.checkpoint_part import Part, fetch_part
from zmqtrain.membership.context import RoleContext
from zmqtrain.merged_fc.chain import FcChain
from zmqtrain.merged_fc.executor import Executor
from zmqtrain.merged_fc.leader import LeadingExecutor, follow
from zmqtrain.merged_fc.queue import FcQueue
from zmqtrain.merged_fc.server import FcServer, FcSettings
from zmqtrain.server.role import CoordinatorCheckpoints
from zmqtrain.server.staleness import Policy
from zmqtrain.train.checkpoint.folder import MODEL
from zmqtrain.waiting import once_set

if TYPE_CHECKING:
    from zmqtrain.merged_fc.torch_executor import TorchExecutor
    from zmqtrain.parallel.network import NetworkFabric
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.task import Task

#: The part of checkpoints that belongs to the FC servers, written by the first of them.
PART = "fc-0"


async def run_fc(context: RoleContext, *, task: Task | None = None) -> None:
    """Compute the fully connected layers for all groups until all workers have finished. Opens nothing, and leaves nothing running.

    ``task`` replaces the one that ``[job] task`` names. Raises `TaskError`, `UsageError`, `CheckpointError`, `PeerLostError` and
    the other errors of the run.
    """
    role = context.role
    if context.modelled:
        from zmqtrain.merged_fc.modelled import ModelledExecutor

        await _serve(context, ModelledExecutor.of(context), 0)
        return
    from zmqtrain.train.alike import require_same_training
    from zmqtrain.train.device.make import device_of

    device = device_of(context, local_rank=role.local_rank)
    fabric = _make_fabric(context, device)
    try:
        timeout_s = context.timeouts.barrier_s
        part = await fetch_part(context.endpoint, PART, timeout_s=timeout_s)
        weights = None
        if part is None and context.topology.job.weights is not None:
            weights = await fetch_part(context.endpoint, MODEL, timeout_s=timeout_s)
        executor = await device.run(lambda: _build(context, device, task, part, weights, fabric))
        await require_same_training(context, "task", executor.facts)
        await _serve(context, executor, 0 if part is None else part.step)
    finally:
        if fabric is not None:
            await fabric.close()
        await device.close(context.timeouts.grace_s)


def _make_fabric(context: RoleContext, device: Device) -> NetworkFabric | None:
    """An FC server's connections to the others, made on the loop's thread; ``None`` if it is the only one."""
    if context.placement.fc_servers < 2:
        return None
    from zmqtrain.parallel.network import NetworkFabric

    return NetworkFabric(
        context.endpoint,
        tuple(role.peer for role in context.placement.fc_roles),
        "fc",
        condition=device.condition(),
        clock=device.clock,
        timeout_s=context.timeouts.barrier_s,
        recorder=context.recorder,
    )


async def _serve(context: RoleContext, executor: Executor, first_step: int) -> None:
    topology, placement, timeouts, endpoint = context.topology, context.placement, context.timeouts, context.endpoint
    first, *others = (role.peer for role in placement.fc_roles)
    if context.role.peer != first and not topology.fc_copied:
        await follow(endpoint, first, executor)
        return
    policy = Policy(topology.exchange.policy, topology.exchange.bound or 0)
    settings = FcSettings(
        groups=tuple(placement.group_members(group) for group in range(placement.groups)),
        request_s=timeouts.request_s,
        stop_on_nan=topology.job.on_nan == "stop",
        elastic=topology.elastic,
    )
    queue = FcQueue(placement.groups, placement.group_size, policy, first_step)
    checkpoints = CoordinatorCheckpoints(endpoint, PART, timeouts.barrier_s)
    leading = LeadingExecutor(executor, endpoint, others)
    divides = bool(others) and not topology.fc_copied
    server = FcServer(endpoint, settings, queue, leading if divides else executor, checkpoints, context.recorder)
    if topology.fc_copied:
        peers = [role.peer for role in placement.fc_roles if role.peer != context.role.peer]
        FcChain(server, context.membership, placement.servers, peers, first=context.role.peer == first)
    if server.seats is not None:
        context.membership.on_view(server.seats.heed)
        server.seats.heed(context.membership.view)  # to build the layers has taken a while
        context.membership.on_halt(server.seats.halt)
        async with once_set(context.membership.finished, server.seats.finish_all):
            await server.run()
    else:
        await server.run()
    if divides:
        await leading.finish()


def _build(
    context: RoleContext,
    device: Device,
    task: Task | None,
    part: Part | None,
    weights: Part | None,
    fabric: NetworkFabric | None,
) -> TorchExecutor:
    """Build the executor, in the compute thread. ``part``: of a run that is resumed. ``weights``: the model with which a new run
    begins."""
    from zmqtrain.merged_fc.layers import FcLayers
    from zmqtrain.merged_fc.phases import build_phase
    from zmqtrain.merged_fc.torch_executor import ExecutorSettings, TorchExecutor
    from zmqtrain.parallel.turns import turn
    from zmqtrain.train.checkpoint.recut import tensors_of
    from zmqtrain.train.random_state import seed_everything
    from zmqtrain.train.task import task_of_job

    topology = context.topology
    job, compute = topology.job, topology.compute
    if task is None:
        if job.task is None:
            raise UsageError(
                "merged_fc needs [job] task (module:function or file.py:function), from which the FC server builds the model; a "
                "training loop of your own cannot provide it. Name a task, or set merged_fc = false"
            )
        task = task_of_job(job, context.data_path, here=Path.cwd())
    started = device.clock()
    with turn():
        seed_everything(job.seed)
        phase, optimizer, _, facts = build_phase(task, "fc", topology, device)
        groups = context.placement.groups
        if fabric is None:
            layers = FcLayers.whole(phase, groups)
        else:
            layers = FcLayers.divided(
                phase, optimizer, groups, fabric=fabric, loss=task.loss, seed=job.seed, recorder=context.recorder
            )
        seed_everything(job.seed, context.placement.world_size)  # the same on all FC servers: they compute the same, or parts of it
    device.watch(layers.module, optimizer, phase.sizes)
    settings = ExecutorSettings(
        groups=groups,
        together=topology.exchange.policy == "sync",
        precision=compute.precision,
        stop_on_nan=job.on_nan == "stop",
    )
    executor = TorchExecutor(task, layers, optimizer, device, settings, facts)
    if part is not None:
        executor.restore(tensors_of(part), part.sidecar)
    elif weights is not None:
        executor.begin_with({f"state/{name}": tensor for name, tensor in tensors_of(weights).items()})
    context.recorder.event("built", seconds=device.clock() - started)
    return executor
