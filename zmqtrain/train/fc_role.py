"""An FC server's process: its life from the view of the run.

It runs the task's own code, as workers do: the model's layers behind the split, the loss, the optimizer and the metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.errors import UsageError
from zmqtrain.exchange.checkpoint_part import Part, fetch_part
from zmqtrain.membership.context import RoleContext
from zmqtrain.server.fc_queue import FcQueue
from zmqtrain.server.fc_server import FcServer, FcSettings, Head
from zmqtrain.server.role import CoordinatorCheckpoints
from zmqtrain.server.staleness import Policy
from zmqtrain.train.checkpoint import MODEL

if TYPE_CHECKING:
    from zmqtrain.train.device.base import Device
    from zmqtrain.train.fc_head import TorchHead
    from zmqtrain.train.task import Task


async def run_fc(context: RoleContext, *, task: Task | None = None) -> None:
    """Compute the fully connected layers for all groups until all workers have finished. Opens nothing, and leaves nothing running.

    ``task`` replaces the one that ``[job] task`` names. Raises what went wrong: `TaskError`, `UsageError`, `CheckpointError`,
    `PeerLostError`, ...
    """
    role = context.role
    if role.device == "modelled" and context.make_device is None:
        from zmqtrain.train.modelled_head import ModelledHead

        await _serve(context, ModelledHead.of(context), 0)
        return
    from zmqtrain.train.device.make import make_device

    if context.make_device is not None:
        device = context.make_device(role)
    else:
        device = make_device(role.device, local_rank=role.local_rank, threads=role.threads)
    try:
        timeout_s = context.ladder.barrier_s
        part = await fetch_part(context.endpoint, _part_name(context), timeout_s=timeout_s)
        weights = None
        if part is None and context.topology.job.weights is not None:
            weights = await fetch_part(context.endpoint, MODEL, timeout_s=timeout_s)
        head = await device.run(lambda: _build(context, device, task, part, weights))
        await _serve(context, head, 0 if part is None else part.step)
    finally:
        await device.close(context.ladder.grace_s)


async def _serve(context: RoleContext, head: Head, first_step: int) -> None:
    topology, placement, ladder = context.topology, context.placement, context.ladder
    policy = Policy(topology.exchange.policy, topology.exchange.bound or 0)
    settings = FcSettings(
        groups=tuple(placement.group_members(group) for group in range(placement.groups)),
        checkpoint_every=topology.job.checkpoint_every,
        request_s=ladder.request_s,
        stop_on_nan=topology.job.on_nan == "stop",
    )
    queue = FcQueue(placement.groups, placement.group_size, policy, first_step)
    checkpoints = CoordinatorCheckpoints(context.endpoint, _part_name(context), ladder.barrier_s)
    await FcServer(context.endpoint, settings, queue, head, checkpoints, context.recorder).run()


def _part_name(context: RoleContext) -> str:
    return f"fc-{context.role.index}"


def _build(context: RoleContext, device: Device, task: Task | None, part: Part | None, weights: Part | None) -> TorchHead:
    """In the compute thread. ``part``: of a run that is resumed. ``weights``: the model's, where a new one begins."""
    from zmqtrain.train.fc_head import HeadSettings, TorchHead
    from zmqtrain.train.merged import BUILDING, build_phase
    from zmqtrain.train.random_state import seed_everything
    from zmqtrain.train.saving import tensors_of
    from zmqtrain.train.task import load_task

    topology = context.topology
    job, compute = topology.job, topology.compute
    if task is None:
        if job.task is None:
            raise UsageError(
                "merged_fc needs [job] task (module:function or file.py:function): the FC server builds the model from it, which a "
                "training loop of one's own cannot give it. Name a task, or leave merged_fc out"
            )
        task = load_task(job.task, job.args, context.data_path, folders=(*job.python_path, Path.cwd()))
    started = device.clock()
    with BUILDING:
        seed_everything(job.seed)
        built = build_phase(task, "fc", topology, device)
        seed_everything(job.seed, context.placement.world_size + context.role.index)
    device.watch(built.model, built.optimizer)
    settings = HeadSettings(
        groups=context.placement.groups,
        together=topology.exchange.policy == "sync",
        precision=compute.precision,
        stop_on_nan=job.on_nan == "stop",
    )
    head = TorchHead(task, built.model, built.optimizer, device, settings)
    if part is not None:
        head.restore(tensors_of(part), part.sidecar)
    elif weights is not None:
        head.begin_with({f"state/{name}": tensor for name, tensor in tensors_of(weights).items()})
    context.recorder.event("built", seconds=device.clock() - started)
    return head
