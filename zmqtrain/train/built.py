"""What a worker builds from its task: model, optimizer, data and replica, on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from zmqtrain.data.content import content_of
from zmqtrain.data.partition import Partition
from zmqtrain.data.source import Source
from zmqtrain.membership.alike import Facts
from zmqtrain.membership.context import RoleContext
from zmqtrain.parallel.gradient_norm import GradientNorm
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.turns import turn
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.train.adapted_schedule import Schedule
from zmqtrain.train.alike import attributes_of_data, facts_of_training
from zmqtrain.train.batches import partition_of
from zmqtrain.train.construct import divided_model
from zmqtrain.train.device.base import Device
from zmqtrain.train.metrics import require_metric
from zmqtrain.train.own_samples import (
    loss_warning,
    modes_warning,
)
from zmqtrain.train.parameter_hooks import require_linear_hooks
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.remote_layers import RemoteLayers
from zmqtrain.train.replica import ReplicaSettings, TorchReplica
from zmqtrain.train.shared import allocate_in
from zmqtrain.train.shares import draws_of, in_step
from zmqtrain.train.task import Task, build_model, build_optimizer, check_layers, task_of_job
from zmqtrain.train.verifying import Ordinary


@dataclass(frozen=True, slots=True)
class Built:
    """What a worker builds from its task."""

    task: Task
    replica: TorchReplica
    schedule: Schedule | None
    source: Source
    partition: Partition | None
    """None for a stream."""
    fabric: NetworkFabric | None
    ordinary: Ordinary | None
    """What the divided model is compared with; ``None``: it is not."""
    facts: Facts
    """What all workers must have alike."""
    attributes: Facts
    """What they should have alike."""


def build(
    context: RoleContext, device: Device, task: Task | None, fabric: NetworkFabric | None, remote: RemoteLayers | None
) -> Built:
    """Build what ``task`` says, or the topology's own task. Call it in the compute thread. Raises `TaskError` and `UsageError` for
    what cannot be trained."""
    topology, role = context.topology, context.role
    job, compute = topology.job, topology.compute
    if task is None:
        task = task_of_job(job, context.data_path, here=Path.cwd())
    require_metric(task, job)
    source = task.training()
    source.require(compute.batch_size, topology.data.shuffle)
    partition = None if source.stream else partition_of(source, context.placement.groups, topology)
    started = device.clock()
    model: nn.Module
    sizes: Mapping[str, int] | None = None
    shares: Mapping[str, float] | None = None
    ordinary: Ordinary | None = None
    whole: Facts = {}  # of the model of which this worker has a part
    with turn():
        seed_everything(job.seed)
        if remote is not None:
            own = remote.build(task, device)
            model, optimizer, schedule, sizes, whole = own.model, own.optimizer, own.schedule, own.sizes, own.facts
        else:
            if fabric is not None:
                divided, ordinary, whole = divided_model(task, topology, fabric, device.torch_device, context.recorder)
                model = divided
                sizes, shares = divided.sizes, divided.shares
            else:
                model = build_model(task).to(device.torch_device)
            if role.index == 0 and (warning := modes_warning(model)) is not None:
                context.recorder.event("warning", text=warning)
            optimizer, schedule = build_optimizer(task, model, topology)
        check_layers(model, topology)
        seed_everything(job.seed, role.index)
    evaluated = task.evaluating()
    samples = {"training data": _number(source), **({} if evaluated is None else {"evaluation data": _number(evaluated)})}
    contents: dict[str, list[str]] = {}
    attributes: Facts = {}
    if topology.data.ring != "tensors":  # otherwise each host reads its own part
        contents = {"training data": content_of(source.dataset, None if partition is None else partition.order)}
        attributes = attributes_of_data({"training data": source.dataset, "evaluation data": evaluated and evaluated.dataset})
        if evaluated is not None:
            contents["evaluation data"] = content_of(evaluated.dataset, evaluated.order_of(0))
    facts = {**facts_of_training(None if fabric is not None else model, optimizer, task.loss, samples, contents), **whole}
    how = ReplicaSettings(
        bucket_bytes=BucketLimit.of(topology),
        clip_norm=topology.optimizer.clip_norm,
        overlap=compute.overlap,
        gate_timeout_s=context.timeouts.barrier_s,
    )
    if compute.columns * compute.accumulate * (context.placement.groups if in_step(topology) else 1) > 1:
        require_linear_hooks(model)
    device.watch(model, optimizer, sizes, shares)
    if role.index == 0 and (warning := loss_warning(task.loss)) is not None:
        context.recorder.event("warning", text=warning)
    with thawed(optimizer):
        replica = TorchReplica(
            model,
            optimizer,
            device,
            how,
            recorder=context.recorder,
            allocate=allocate_in(context.arena),
            shards=model.shards_by_name() if isinstance(model, ParallelModel) else None,
            norm=GradientNorm(model.shards_by_name(), model.fabric) if isinstance(model, ParallelModel) else None,
        )
    replica.draws = draws_of(topology, role)
    if fabric is not None:
        replica.also_abort(fabric.abort)
    if remote is not None:
        replica.also_abort(remote.abort)
    context.recorder.event("built", seconds=device.clock() - started)
    return Built(task, replica, schedule, source, partition, fabric, ordinary, facts, attributes)


@contextmanager
def thawed(optimizer: Optimizer) -> Iterator[None]:
    """A context in which all of the optimizer's parameters require gradients: a schedule may have frozen some, for a while."""
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _number(source: Source) -> int | None:
    return None if source.stream else len(source.dataset)
