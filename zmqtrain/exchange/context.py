"""What exchanges are made from: the worker's place among the others, and sums over any set of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.compressed_sums import CompressedSums
from zmqtrain.exchange.elastic import ElasticMembers
from zmqtrain.exchange.elastic_sums import ElasticSums, GroupSums
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.row_sums import RowSums
from zmqtrain.exchange.sums import HostSums, NetworkSums, Sums
from zmqtrain.host.member import ArenaMember, MakeMember
from zmqtrain.host.team import Team
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.schema import Topology


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """The context of one worker. The class method ``of`` of an exchange takes it, and makes the groups and sums that it needs, each
    once."""

    worker: RoleContext
    members: Members
    """The workers that take part in the training."""
    whole_updates: bool
    """The local optimizer runs at the end of a step on all parameters, not bucket by bucket."""
    scaled: bool
    """Gradients are those of a scaled loss, and may not be finite."""

    @property
    def untouched(self) -> bool:
        """Whether gradients stay as they were summed. A later change to them requires memory of their own."""
        return not self.whole_updates and not self.worker.topology.optimizer.clip_norm

    @property
    def every(self) -> int:
        """Steps from one exchange between groups to the next."""
        return self.worker.topology.exchange.every_steps(self.worker.placement.groups)

    @property
    def column(self) -> tuple[PeerId, ...]:
        """The workers at this worker's position, one from each group."""
        placement, position = self.worker.placement, self.worker.role.position
        return tuple(placement.group_members(number)[position] for number in range(placement.groups))

    def group(self, name: str, members: tuple[PeerId, ...]) -> Group:
        """A group for collectives of ``members``, which include this worker. ``name`` must differ from those of other groups."""
        # The others may evaluate or write a checkpoint while this worker waits for them.
        worker = self.worker
        return Group(worker.endpoint, members, members.index(worker.role.peer), name, timeout_s=worker.timeouts.barrier_s)

    def all_workers(self) -> Group:
        """All workers of the run, by rank."""
        return self.group("workers", tuple(worker.peer for worker in self.worker.placement.everyone))

    def own_group(self) -> Group:
        """The workers of this worker's compute group, by position."""
        number = self.worker.role.group
        return self.group(f"group/{number}{self.worker.generation}", self.worker.placement.group_members(number))

    def sums_of_all(self, *, scale: float) -> Sums:
        """Sums over all workers, times ``scale``; in an elastic run divided by what is in them."""
        if (
            isinstance(self.members, ElasticMembers) and self.worker.topology.exchange.kind == "allreduce"
        ):  # nothing of them is in memory that a lost worker shared
            worker = self.worker
            return ElasticSums(
                worker.endpoint,
                self.members,
                self.all_workers(),
                every=self.every,
                batch=worker.topology.compute.batch_size,
                timeouts=worker.timeouts,
                recorder=worker.recorder,
            )
        exchange = self.worker.topology.exchange
        if exchange.kind == "allreduce" and exchange.compression != "none":
            ratio, rank = exchange.compression_ratio, exchange.compression_rank
            return CompressedSums(self.all_workers(), scale, exchange.compression, ratio=ratio, rank=rank)
        return self._sums(self.all_workers(), 0, scale=scale, in_place=self.untouched)

    def sums_of_group(self, group: Group, *, in_place: bool) -> Sums:
        """Sums over `own_group`. ``in_place``: nothing changes them afterwards."""
        if isinstance(self.members, ElasticMembers) and self.members.splits:
            worker = self.worker
            return GroupSums(worker.endpoint, self.members, group, timeouts=worker.timeouts, recorder=worker.recorder)
        return self._sums(group, self.worker.role.group + 1, scale=1.0, in_place=in_place)

    def _sums(self, group: Group, number: int, *, scale: float, in_place: bool) -> Sums:
        """Sums in shared memory, as far as the members share any. ``number``: the group's number in the run."""

        def make(members: Group, family: int) -> HostSums | NetworkSums:
            number_of_family = 0 if members is group else family + 1
            return _sums_of(self.worker, members, number, number_of_family, scale=scale, in_place=in_place)

        return RowSums(group, make) if self.worker.topology.divided else make(group, 0)


def _sums_of(
    context: RoleContext, group: Group, number: int, family: int, *, scale: float, in_place: bool
) -> HostSums | NetworkSums:
    """``family``: the number of a set of buckets of a divided model that ``group`` sums; 0 for the buckets that all workers
    have."""
    placement, role, make_member = context.placement, context.role, _member_of(context)
    hosts: dict[str, list[PeerId]] = {}
    for peer in group.members:
        hosts.setdefault(placement.role(peer).host, []).append(peer)
    if make_member is None or max(map(len, hosts.values())) == 1:
        return NetworkSums(group, scale)
    here, slices = hosts[role.host], min(map(len, hosts.values()))
    peers = [other.peer for other in placement.of_host(role.host)]
    teams = sorted({placement.role(peer).group + 1 for peer in peers if placement.role(peer).kind == "worker"})
    rank = here.index(role.peer)
    # A worker is in one team of each number: that of all workers (0), that of its group, and those that share a part with it.
    whole = teams.index(number) + 1 if number else 0
    slots = [peers.index(peer) for peer in here]
    member = make_member(slots, rank, here, len(teams) + family if family else whole)
    column = None
    if len(hosts) > 1 and rank < slices:
        members = tuple(workers[rank] for workers in hosts.values())
        name = f"{group.name}/slice/{rank}"
        column = Group(context.endpoint, members, members.index(role.peer), name, timeout_s=context.timeouts.barrier_s)
    return HostSums(group, member, column, slices=slices, scale=scale, in_place=in_place)


def _member_of(context: RoleContext) -> MakeMember | None:
    """Makes this worker's places in its host's memory; ``None`` if its gradients are not there."""
    arena = context.arena
    if context.topology.whole_groups:  # a lost worker may have left something unfinished there, for those that come in its place
        return None
    if context.make_member is not None:
        return context.make_member
    if arena is None or not _in_memory(context.role.device, context.topology):
        return None

    def make(slots: Sequence[int], rank: int, names: Sequence[PeerId], number: int) -> ArenaMember:
        return ArenaMember(Team(arena, slots, rank, names=names, number=number, timeout_s=context.timeouts.barrier_s))

    return make


def _in_memory(device: str, topology: Topology) -> bool:
    """Whether a worker's gradients are in the host's memory."""
    return device != "modelled" or topology.simulation.payload in (None, "real")
