"""Which runs can carry on without workers that are lost. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import Path

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology

#: The settings that ask for a run which carries on, for messages.
ASKING = "[job] elastic and restarts, and [exchange] replicas"


def why_not_elastic(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    """Why the run cannot carry on without a lost worker, and the fields on which that depends; ``None`` if it can."""
    exchange, compute = topology.exchange, topology.compute
    if compute.rows > 1:
        return _why_not_on_a_grid(topology)
    if topology.divided:
        return (
            'with statistics = "whole", batch norm needs all workers of a group in the middle of a forward; an elastic run needs '
            'statistics = "local"',
            (("parallel", "statistics"),),
        )
    if exchange.kind == "allreduce":
        return _why_not_with_sums(topology)
    if exchange.kind == "model_server":
        return _why_not_with_servers(topology)
    return _why_not_models_of_groups(topology) if compute.group_size > 1 else None


def why_it_is_not(topology: Topology) -> tuple[str, tuple[Path, ...]]:
    """Why a run that is not elastic is none, and the fields on which that depends beside ``elastic``."""
    return why_not_elastic(topology) or ("it is elastic only with elastic = true", ())


def elastic_by_default(topology: Topology) -> bool:
    """Whether the run is elastic if its file does not say. Not with all-reduce: workers of one host would not share memory. Nor
    with groups of several workers: one of them evaluates for all."""
    several = topology.compute.group_size > 1
    return topology.exchange.kind != "allreduce" and not several and why_not_elastic(topology) is None


def _why_not_with_sums(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    if topology.exchange.compression != "none":
        return (
            "a lost worker takes along what compression has not sent of its gradients; an elastic run with all-reduce needs "
            'compression = "none"',
            (("exchange", "compression"),),
        )
    if topology.compute.parts != "even":
        return (
            "the parts of a batch do not change when a worker is lost; an elastic run with all-reduce needs even parts",
            (("compute", "parts"),),
        )
    if topology.data.shuffle == "ring":
        return (
            'the batches of a ring may differ in size; an elastic run with all-reduce needs shuffle = "global" or "none"',
            (("data", "shuffle"),),
        )
    return None


def _why_not_on_a_grid(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    """Where the model is divided over several rows: the parts of a lost worker must be somewhere else, too."""
    exchange, compute, job = topology.exchange, topology.compute, topology.job
    if exchange.kind == "model_server" or (exchange.kind in ("averaging", "gossip") and compute.groups > 1):
        return _why_not_whole_groups(topology)
    if exchange.kind == "allreduce" and compute.groups > 1:
        groups, rows, columns = compute.groups, compute.rows, compute.groups * compute.columns
        return (
            f"an elastic run on grids of several rows has one group; with all-reduce, {groups} groups on {compute.grid} are as one "
            f'on a wider grid: groups = 1, group_size = {groups * compute.group_size}, grid = "{rows}x{columns}", batch_size = '
            f"{groups * compute.batch_size} (batch norm then sees all of it)",
            (("compute", "groups"), ("compute", "grid")),
        )
    if exchange.kind != "allreduce" or compute.columns == 1:
        return (
            f"the grid {compute.grid} divides the model among workers of which none can be missing; an elastic run needs a grid of "
            f'one row, such as 1x{compute.group_size}; or kind = "allreduce", one group and a grid of several columns, such as '
            f'{compute.rows}x2; or kind = "model_server"; or several groups and kind = "averaging" or "gossip"',
            (("compute", "grid"), ("exchange", "kind")),
        )
    obstacles: list[tuple[bool, str, Path]] = [
        (exchange.compression != "none", "compression: a lost worker takes along what was not sent", ("exchange", "compression")),
        (exchange.every_steps(1) > 1, "every: what was added up belongs to workers", ("exchange", "every")),
        (compute.parts != "even", "parts: they divide the samples among fixed workers", ("compute", "parts")),
        (topology.data.shuffle == "ring", 'shuffle = "ring": samples would be lost with the worker', ("data", "shuffle")),
        (bool(topology.parallel.layers or topology.parallel.plan), "layers on grids of their own", ("parallel", "layers")),
        (job.on_resize != "keep", "on_resize: the batch of a step stays", ("job", "on_resize")),
        (job.max_workers is not None, "max_workers: no others come than those with which it begins", ("job", "max_workers")),
        (compute.device == "modelled" and not topology.trains, "modelled devices, which have no model", ("compute", "device")),
    ]
    found = next(((what, path) for there, what, path in obstacles if there), None)
    if found is None:
        return None
    what, path = found
    return f"on a grid of several rows, an elastic run cannot have {what}", (path, ("compute", "grid"))


def _why_not_whole_groups(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    """With servers, averaging and gossip, where groups divide their models: a group goes, and comes, as a whole."""
    compute, served = topology.compute, topology.exchange.kind == "model_server"
    if served and (refused := _why_not_with_servers(topology)) is not None:
        return refused
    found = None if served else _obstacle_of_groups(topology)
    if found is None and (topology.parallel.layers or topology.parallel.plan):
        found = "layers on grids of their own", ("parallel", "layers")
    if found is None and compute.device == "modelled" and not topology.trains:
        found = "modelled devices, which have no model", ("compute", "device")
    if found is None:
        return None
    what, path = found
    among = f"{topology.exchange.kind} among" if not served else "model servers and"
    return f"with {among} groups on grids of several rows, an elastic run cannot have {what}", (path, ("compute", "grid"))


def _why_not_models_of_groups(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    """With averaging and gossip, where each group has a model of its own."""
    if (found := _obstacle_of_groups(topology)) is None:
        return None
    what, path = found
    among = f"{topology.exchange.kind} among groups of several workers"
    return f"with {among}, an elastic run cannot have {what}", (path, ("compute", "group_size"))


def _obstacle_of_groups(topology: Topology) -> tuple[str, Path] | None:
    """What groups of several workers that have models of their own cannot have, and its field."""
    exchange, compute, data = topology.exchange, topology.compute, topology.data
    obstacles: list[tuple[bool, str, Path]] = [
        (exchange.averaging.deltas != "float32", "deltas: what rounding has lost belongs to workers", ("exchange", "averaging")),
        (data.ring == "tensors", 'ring = "tensors": each worker has a part of the samples of its group', ("data", "ring")),
        (compute.parts != "even", "parts: they divide the samples among fixed workers", ("compute", "parts")),
        (compute.precision == "float16", "float16: the workers of a group share its scale", ("compute", "precision")),
    ]
    return next(((what, path) for there, what, path in obstacles if there), None)


def _why_not_with_servers(topology: Topology) -> tuple[str, tuple[Path, ...]] | None:
    exchange, compute = topology.exchange, topology.compute
    sync = exchange.policy == "sync"
    several, of_several = compute.group_size > 1, "with groups of several workers"
    obstacles: list[tuple[bool, str, Path]] = [
        (
            exchange.merged_fc and compute.accumulate > 1,
            "accumulate with merged_fc: the FC server takes a step of a group back only as a whole",
            ("compute", "accumulate"),
        ),
        (
            exchange.merged_fc and compute.pipeline > 1,
            "pipeline: one worker of those that share a slot says whose turn it is",
            ("compute", "pipeline"),
        ),
        (exchange.snapshot, "snapshot: its servers apply the steps of fixed groups in one order", ("exchange", "snapshot")),
        (topology.data.shuffle == "ring", 'shuffle = "ring": samples would be lost with the worker', ("data", "shuffle")),
        (compute.parts != "even", "parts: they divide the samples among fixed workers", ("compute", "parts")),
        (sync and bool(topology.optimizer.clip_norm), "clip_norm in synchronous training", ("optimizer", "clip_norm")),
        (sync and compute.precision == "float16", "float16 in synchronous training", ("compute", "precision")),
        (several and compute.precision == "float16", f"float16 {of_several}, which share its scale", ("compute", "precision")),
        (
            several and exchange.compression != "none",
            f"compression {of_several}: what a step has not sent would count although the step is given up",
            ("exchange", "compression"),
        ),
        (
            several and topology.job.until is not None,
            f"until {of_several}, who must learn together that the metric has reached its aim",
            ("job", "until"),
        ),
    ]
    found = next(((what, path) for there, what, path in obstacles if there), None)
    if found is None:
        return None
    what, path = found
    return f"with model servers, an elastic run cannot have {what}", (path,)
