"""The same machines, divided into another number of compute groups."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from zmqtrain.errors import UsageError
from zmqtrain.topology.schema import Topology


def regrouped(topology: Topology, groups: int, *, merged: bool | None = None) -> Topology:
    """The job with ``groups`` groups of all its workers, which use model servers without waiting for each other.

    A group's batch stays as it is, so more groups with fewer workers take longer for it. ``merged``: whether to use a merged FC
    server;
    ``None``: as the file says. Weights for the workers of groups of another size are replaced by even parts. Raises `UsageError` if
    the workers cannot be divided in this way, or the result breaks a rule.
    """
    workers = topology.compute.workers
    if groups < 1 or workers % groups:
        raise UsageError(f"{workers} workers cannot be divided into {groups} equal groups")
    values = topology.to_dict()
    compute: dict[str, Any] = {**values["compute"], "groups": groups, "group_size": workers // groups, "auto_groups": False}
    compute.pop("grid", None)
    if topology.parallel.statistics != "whole" or workers == groups:  # nothing is divided any more
        values["parallel"] = {key: value for key, value in values["parallel"].items() if key not in ("whole", "strict")}
    if isinstance(topology.compute.parts, tuple) and len(topology.compute.parts) not in (workers, workers // groups):
        compute["parts"] = "even"
    values["compute"] = compute
    exchange = {**values["exchange"], "kind": "model_server"}
    if topology.exchange.kind != "model_server":
        exchange = {"kind": "model_server", "staleness": "async"}
    if merged is not None:
        exchange["merged_fc"] = merged
        if not merged:
            for name in ("split", "fc_servers"):
                exchange.pop(name, None)
    values["exchange"] = exchange
    try:
        return Topology.from_dict(values)
    except ValidationError as error:
        raise UsageError(f"{workers} workers as {groups} groups: {'; '.join(each['msg'] for each in error.errors())}") from error


def without_pipeline(topology: Topology) -> Topology:
    """The job with one group on each set of slots, in place of several that take turns there."""
    compute = topology.compute
    if compute.pipeline == 1:
        return topology
    alone = compute.model_copy(update={"groups": compute.groups // compute.pipeline, "pipeline": 1})
    return topology.model_copy(update={"compute": alone})
