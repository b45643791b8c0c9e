"""Which of a step's samples are a worker's: even parts, parts by given weights, or parts that change as the run goes on.

Workers that wait for each other in every step divide its samples among them. That is a group; where groups are in step (all-reduce,
synchronous model servers) it is all workers of all groups. A worker's gradient counts by its samples, over the samples that a group
has in the mean, so whatever the parts are, the sum is the gradient of the mean loss over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.data.partition import even_bounds
from zmqtrain.data.parts import bounds_of, parts_of
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.placement import Placement, RolePlacement
from zmqtrain.topology.schema import Topology


@dataclass(frozen=True, slots=True)
class Scope:
    """The workers that divide the samples of a step among them."""

    members: tuple[PeerId, ...]
    start: int
    """Where their samples begin among those of all groups."""
    samples: int
    """How many they have in a step."""

    @classmethod
    def of(cls, topology: Topology, placement: Placement, role: RolePlacement, batch_size: int | None = None) -> Scope:
        """The worker's. ``batch_size``: of a group, instead of the file's."""
        batch = batch_size or topology.compute.batch_size
        if in_step(topology):
            return cls(tuple(worker.peer for worker in placement.workers), 0, batch * placement.groups)
        return cls(placement.group_members(role.group), batch * role.group, batch)


class Shares:
    """A worker's samples, by step. `bounds` may be called in any thread."""

    def __init__(self, scope: Scope, parts: Sequence[int], place: int) -> None:
        """``parts``: samples of each place, which is a worker of the scope or a column of its grid. ``place``: this worker's."""
        self.scope, self._place = scope, place
        self._since: tuple[tuple[int, tuple[int, ...]], ...] = ((0, tuple(parts)),)

    @classmethod
    def of(cls, topology: Topology, placement: Placement, role: RolePlacement, batch_size: int | None = None) -> Shares:
        """As ``[compute] parts`` says; measured parts begin even."""
        compute = topology.compute
        batch, columns = batch_size or compute.batch_size, compute.columns
        even = [stop - start for start, stop in (even_bounds(batch, columns, column) for column in range(columns))]
        if compute.parts == "even":
            group = Scope(placement.group_members(role.group), batch * role.group, batch)
            return cls(group, even, role.position % columns)  # those that divide the model have the same samples
        scope = Scope.of(topology, placement, role, batch_size)
        place = scope.members.index(role.peer)
        if compute.parts == "measured":
            return cls(scope, even * (len(scope.members) // len(even)), place)
        weights = list(compute.parts)
        if len(weights) == len(scope.members):
            return cls(scope, parts_of(scope.samples, weights), place)
        if len(weights) == compute.group_size:  # all groups alike
            group = Scope(placement.group_members(role.group), batch * role.group, batch)
            return cls(group, parts_of(batch, weights), role.position)
        own = weights[role.group * compute.group_size :][: compute.group_size]  # of all workers, and groups are not in step
        return cls(scope, parts_of(batch, own), place)

    def at(self, step: int) -> tuple[int, ...]:
        """The parts of all."""
        return next(parts for since, parts in reversed(self._since) if since <= step)

    def samples(self, step: int) -> int:
        """This worker's part."""
        return self.at(step)[self._place]

    def bounds(self, step: int) -> tuple[int, int]:
        """Start and stop of this worker's samples among those of all groups in the step."""
        start, stop = bounds_of(self.at(step), self._place)
        return self.scope.start + start, self.scope.start + stop

    def change(self, step: int, parts: Sequence[int]) -> None:
        """Other parts from ``step`` on, which is later than all changes before. All of the scope call it alike."""
        assert sum(parts) == sum(self.at(step)), "the parts of a step are all its samples"
        self._since = (*self._since[-2:], (step, tuple(parts)))  # batches of steps before may still be fetched


def in_step(topology: Topology) -> bool:
    """Whether the groups' gradients are averaged in every step, so that each sample of it must count alike in all groups."""
    exchange = topology.exchange
    return exchange.kind == "allreduce" or (exchange.kind == "model_server" and exchange.policy == "sync")
