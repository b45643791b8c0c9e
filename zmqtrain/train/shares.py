"""Which samples of a step belong to a worker: even parts, parts by given weights, or parts that change during the run.

Workers that wait for each other in every step divide its samples among them. These are the workers of a group; if groups are in
step (all-reduce, synchronous model servers), they are all workers of all groups. A worker's gradient is weighted by its number of
samples, relative to the average number of a group, so the sum is the gradient of the mean loss over the whole batch for any parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.data.partition import even_bounds
from zmqtrain.data.parts import bounds_of, parts_of
from zmqtrain.data.stream import StreamPlace
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.placement import Placement, RolePlacement
from zmqtrain.topology.schema import Topology


@dataclass(frozen=True, slots=True)
class Scope:
    """The workers that divide the samples of a step among them."""

    members: tuple[PeerId, ...]
    start: int
    """The index of their first sample among those of all groups."""
    samples: int
    """Their number of samples in a step."""

    @classmethod
    def of(cls, topology: Topology, placement: Placement, role: RolePlacement, batch_size: int | None = None) -> Scope:
        """The scope of a worker. ``batch_size``: of a group, in place of the file's."""
        batch = batch_size or topology.compute.batch_size
        if in_step(topology):
            return cls(tuple(worker.peer for worker in placement.everyone), 0, batch * placement.groups)
        return cls(placement.group_members(role.group), batch * role.group, batch)


def draws_of(topology: Topology, role: RolePlacement) -> tuple[int, ...]:
    """The seed of what a worker's local optimizer draws: the same on all workers that have the same parameters."""
    return (topology.job.seed, 0 if in_step(topology) else role.group + 1)


class Shares:
    """A worker's samples, by step. `bounds` may be called in any thread."""

    def __init__(self, scope: Scope, parts: Sequence[int], place: int) -> None:
        """``parts``: the samples of each place, which is a worker of the scope or a column of its grid. ``place``: this
        worker's."""
        self.scope, self._place = scope, place
        self._since: tuple[tuple[int, tuple[int, ...]], ...] = ((0, tuple(parts)),)

    @classmethod
    def of(cls, topology: Topology, placement: Placement, role: RolePlacement, batch_size: int | None = None) -> Shares:
        """The shares that ``[compute] parts`` asks for. Shares that are to be measured are equal at first."""
        compute = topology.compute
        batch, columns = batch_size or compute.batch_size, compute.columns
        even = [stop - start for start, stop in (even_bounds(batch, columns, column) for column in range(columns))]
        if compute.parts == "even":
            group = Scope(placement.group_members(role.group), batch * role.group, batch)
            return cls(group, even, compute.column_of(role.position))  # a column's workers have the same samples
        scope = Scope.of(topology, placement, role, batch_size)
        place = scope.members.index(role.peer)
        if compute.parts == "measured":
            return cls(scope, even * (len(scope.members) // len(even)), place)
        weights = list(compute.parts)
        if len(weights) == len(scope.members):
            return cls(scope, parts_of(scope.samples, weights), place)
        if len(weights) == compute.group_size:  # the same for all groups
            group = Scope(placement.group_members(role.group), batch * role.group, batch)
            return cls(group, parts_of(batch, weights), role.position)
        own = weights[role.group * compute.group_size :][: compute.group_size]  # one for each worker, but groups are not in step
        return cls(scope, parts_of(batch, own), place)

    def at(self, step: int) -> tuple[int, ...]:
        """The parts of all places in ``step``."""
        return next(parts for since, parts in reversed(self._since) if since <= step)

    def samples(self, step: int) -> int:
        """The number of this worker's samples in ``step``."""
        return self.at(step)[self._place]

    def bounds(self, step: int) -> tuple[int, int]:
        """First and last (exclusive) of this worker's samples among those of all groups in the step."""
        start, stop = bounds_of(self.at(step), self._place)
        return self.scope.start + start, self.scope.start + stop

    def change(self, step: int, parts: Sequence[int]) -> None:
        """Use ``parts`` from ``step`` on, which must be later than all earlier changes. All workers of the scope make the same
        call."""
        assert sum(parts) == sum(self.at(step)), "the parts of a step must add up to all its samples"
        self._since = (*self._since[-2:], (step, tuple(parts)))  # batches of earlier steps may still be fetched


def stream_place(
    topology: Topology, placement: Placement, role: RolePlacement, shares: Shares, batch_size: int | None = None
) -> StreamPlace:
    """Which samples of a stream a worker has, as its shares are at first. ``batch_size``: of a group, in place of the file's."""
    compute = topology.compute
    start, stop = shares.bounds(0)
    return StreamPlace(
        role.group * compute.columns + compute.column_of(role.position),
        placement.groups * compute.columns,
        start,
        stop,
        placement.groups * (batch_size or compute.batch_size),
    )


def in_step(topology: Topology) -> bool:
    """Whether the groups' gradients are averaged in every step, so that each sample must have the same weight in all groups."""
    exchange = topology.exchange
    return exchange.kind == "allreduce" or (exchange.kind == "model_server" and exchange.policy == "sync")
