"""Which parameters travel together: a pure plan, the same on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.topology.bucket_limit import BucketLimit


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What the plan needs to know about a parameter."""

    name: str
    numel: int
    itemsize: int
    dtype: str
    group: int  # the optimizer's parameter group
    rows: str = ""  # the grid over whose rows it is divided; empty if it is not
    largest: int = 0  # elements of the largest row's part, if the rows' parts differ

    @property
    def planned(self) -> int:
        """The number of elements that the plan counts, which is the same on all rows."""
        return max(self.numel, self.largest)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: ``names[i]`` lies at elements ``offsets[i]`` to ``offsets[i + 1]``."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        return self.offsets[-1]


def plan_buckets(parameters: Sequence[ParameterInfo], bucket_bytes: int | BucketLimit) -> tuple[BucketPlan, ...]:
    """Divide parameters, given in the order of their registration, into buckets in backward order.

    Backward reaches roughly the last registered parameters first, so bucket 0 holds those. A bucket has one dtype and one optimizer
    parameter group, and at most ``bucket_bytes`` unless a single parameter is larger. Buckets are in the order in which their
    gradients become complete. Parameters without elements are left out; each name must occur once. Parameters that are divided over
    the rows of a grid are never in one bucket with whole ones.
    """
    if isinstance(bucket_bytes, BucketLimit):
        bucket_bytes = bucket_bytes.bytes_of(sum(parameter.planned * parameter.itemsize for parameter in parameters))
    assert bucket_bytes > 0, bucket_bytes
    assert len({parameter.name for parameter in parameters}) == len(parameters), "a shared parameter must be listed once"
    # Weights and biases often alternate between two optimizer groups: one open bucket for each keeps buckets large.
    open_buckets: dict[tuple[str, int, str], list[ParameterInfo]] = {}
    closed: list[list[ParameterInfo]] = []
    for parameter in reversed(parameters):
        if parameter.numel == 0:
            continue
        key = (parameter.dtype, parameter.group, parameter.rows)
        current = open_buckets.setdefault(key, [])
        if current and sum(p.planned * p.itemsize for p in current) + parameter.planned * parameter.itemsize > bucket_bytes:
            closed.append(current)
            current = open_buckets[key] = []
        current.append(parameter)
    closed.extend(bucket for bucket in open_buckets.values() if bucket)
    position = {parameter.name: index for index, parameter in enumerate(parameters)}
    closed.sort(key=lambda bucket: -position[bucket[-1].name])
    return tuple(_plan(bucket) for bucket in closed)


def _plan(bucket: Sequence[ParameterInfo]) -> BucketPlan:
    offsets = [0]
    for parameter in bucket:
        offsets.append(offsets[-1] + parameter.numel)
    return BucketPlan(tuple(p.name for p in bucket), tuple(offsets), bucket[0].dtype, bucket[0].group)
