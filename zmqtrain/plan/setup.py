"""Reads from a topology file what a plan needs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zmqtrain.collectives.choose import ALPHA_S, BETA_S
from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.loader import Finish
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.plan.cluster import measured_link
from zmqtrain.plan.costs import Paper, Pricing
from zmqtrain.plan.layers import LayerShape, Stage, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.profiled import profile_layers, with_times
from zmqtrain.plan.shipped import before_pooling, shipped_table
from zmqtrain.plan.trace import SAMPLES, trace_layers
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.topology.links import MEMORY_BYTE_S, links_of
from zmqtrain.topology.placement import place_before
from zmqtrain.topology.schema import Topology
from zmqtrain.train.batches import sample_batch
from zmqtrain.train.data_path import data_path_of
from zmqtrain.train.device.profile import Profile
from zmqtrain.train.divided import loss_on_grid, numbers_of_loss
from zmqtrain.train.task import Task, build_model, task_of_job, user_code


@dataclass(frozen=True, slots=True)
class Source:
    """The layers to plan for, and their source."""

    layers: tuple[LayerShape, ...]
    what: str

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The units for which a plan makes choices."""
        return stages(self.layers)


def source_of(topology: Topology, data: str | None = None) -> Source:
    """The layers of ``[plan] layers``, or else of the task's model, or else of the profile. ``data``: the value of ``--data``.

    Raises `UsageError` if there is none of them or they do not fit together, `TaskError` if the task's code fails.
    """
    settings, compute = topology.plan, topology.compute
    profile = None if compute.profile is None else Profile.load(compute.profile)
    part = part_of(topology)
    if settings.layers is not None:
        table = shipped_table(settings.layers)
        layers = table.layers(biases=settings.biases)
        if settings.activations == "before_pooling":
            layers = before_pooling(layers)
        return Source(layers, f"the table {table.name}")
    if topology.job.task is not None:
        layers = _traced(topology, data)
        what = f"the model of {topology.job.task}"
        if profile is None:
            return Source(layers, what)
        return Source(with_times(layers, profile, part), f"{what}, with the times of profile {compute.profile}")
    if profile is not None:
        return Source(profile_layers(profile, part), f"profile {compute.profile}")
    raise UsageError(
        'there is no model to plan for: set [job] task, [plan] layers = "alexnet", or [compute] device = "modelled" with a profile'
    )


def part_of(topology: Topology) -> int:
    """The number of samples of a worker's step, to which the layers' times apply."""
    return max(1, topology.compute.batch_size // topology.compute.group_size)


def problem_of(topology: Topology, layers: Sequence[Stage], *, processes: int | None = None, batch: int | None = None) -> Problem:
    """The problem of planning a compute group. ``processes``, ``batch``: in place of the file's."""
    settings, compute = topology.plan, topology.compute
    processes = processes or compute.group_size
    return Problem(
        tuple(layers),
        batch or compute.batch_size,
        processes,
        link_of(topology),
        pricing_of(topology, processes, sum(layer.weights for layer in layers)),
        settings.overlap_share,
        settings.flops,
        settings.memory,
        settings.optimizer_words,
        whole_model=compute.precision == "float16",
    )


def pricing_of(topology: Topology, processes: int, weights: int) -> Pricing:
    """The way to calculate costs that ``[plan] pricing`` names. If hosts have different numbers of a group's processes, the
    smallest counts. ``weights``: elements of the model's parameters."""
    settings = topology.plan
    if settings.pricing == "paper":
        return Paper(settings.word_bytes, settings.dx)
    together = min(Counter(hosts_of_group(topology, processes)).values())
    bucket_bytes = BucketLimit.of(topology).bytes_of(weights * settings.word_bytes)
    return Ours(settings.word_bytes, together if topology.compute.shared_memory else 1, bucket_bytes=bucket_bytes)


def hosts_of_group(topology: Topology, processes: int, main: Grid | None = None) -> tuple[str, ...]:
    """The host of each process of a group of ``processes``: as a run would place it, or on its own if the file's groups have
    another size. ``main``: the main grid, if not the file's."""
    if main is not None:
        topology = topology.model_copy(update={"compute": topology.compute.model_copy(update={"grid": str(main)})})
    compute = topology.compute
    if processes != compute.group_size:
        alone = {"groups": 1, "group_size": processes, "pipeline": 1, "parts": "even"}
        topology = topology.model_copy(update={"compute": compute.model_copy(update=alone)})
    return tuple(role.host for role in place_before(topology).workers[:processes])


def link_of(topology: Topology) -> Link:
    """alpha and beta of ``[network]``, for its slowest NIC. If it does not say, those of the slowest link that was measured between
    the file's hosts (`zmqtrain profile --links`); if none was measured, those of this runtime over a 10 Gbit/s link.

    Handing over a message takes time in addition to the network's. The paper's pricing does not count it; measured latencies
    include it.
    """
    model = links_of(topology)
    nics = [nic for host in topology.hosts if (nic := model.host(host.name).bandwidth) is not None]
    measured = measured_link(topology)
    byte_s = 8 / min(nics) if nics else BETA_S if measured is None else 8 / measured.bandwidth
    if topology.network.latency is None and measured is not None:
        return Link(measured.latency_s, byte_s, MEMORY_BYTE_S)
    delay_s = max((model.host(host.name).latency for host in topology.hosts), default=0.0)
    alpha_s = model.way.latency + 2 * delay_s
    if topology.plan.pricing == "ours" or topology.network.latency is None:
        alpha_s += ALPHA_S
    return Link(alpha_s, byte_s, MEMORY_BYTE_S)


def link_source(topology: Topology) -> str:
    """The source of the figures of `link_of`, in words."""
    nics = any(links_of(topology).host(host.name).bandwidth is not None for host in topology.hosts)
    known = (nics, topology.network.latency is not None)
    if all(known):
        return "[network]"
    rest = "a typical 10 Gbit/s network" if measured_link(topology) is None else f"links measured in {topology.compute.profile}"
    return f"[network] and {rest}" if any(known) else rest


def model_of(topology: Topology, data: str | None) -> tuple[nn.Module, tuple[Any, ...]]:
    """The task's model, and the inputs of a few samples. Raises `UsageError` if there is no task, `TaskError` if it fails."""
    task = _task_of(topology, data)
    model = _made(topology, task)
    return model, _batch(topology, task).arguments(model)


def _task_of(topology: Topology, data: str | None) -> Task:
    job, data = topology.job, data_path_of(data, topology)
    if job.task is None:
        raise UsageError("there is no model to run: set [job] task")
    return task_of_job(job, data)


def _made(topology: Topology, task: Task, *, without_content: bool = False) -> nn.Module:
    torch.manual_seed(topology.job.seed)
    return build_model(task, without_content=without_content)


def _batch(topology: Topology, task: Task) -> Batch:
    with user_code("reading samples of Task.train_data"):
        return sample_batch(task.training(), SAMPLES, Finish(partial(batch_of, forward=task.forward)), topology.job.seed)


def _traced(topology: Topology, data: str | None) -> tuple[LayerShape, ...]:
    """The layers of the task's model, which is made without content, so that it may be larger than this machine's memory; or in the
    ordinary way, if its code needs values."""
    task = _task_of(topology, data)
    batch = _batch(topology, task)
    layers = _layers(topology, task, batch)
    last = replace(layers[-1], loss_numbers=numbers_of_loss(loss_on_grid(task.loss, topology), batch.target))
    return (*layers[:-1], last) if len(last.outputs) == 1 else layers


def _layers(topology: Topology, task: Task, batch: Batch) -> tuple[LayerShape, ...]:
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights that are loaded into it, which does nothing
            empty = _made(topology, task, without_content=True)
        return trace_layers(empty, batch.arguments(empty), devices=("meta",))
    except (TaskError, UsageError):
        model = _made(topology, task)
    try:
        return trace_layers(model, batch.arguments(model))
    except UsageError as error:
        raise TaskError(f"the model of {topology.job.task} cannot be traced: {error}") from error
