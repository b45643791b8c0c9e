"""The exchange that the topology file asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.averaging.exchange import AveragingExchange, AveragingGroups
from zmqtrain.exchange.averaging.fragments import Fragments
from zmqtrain.exchange.averaging.methods import Average, Elastic, Method, Outer
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.elastic import ElasticMembers
from zmqtrain.exchange.gossip.exchange import GossipExchange, GossipSettings
from zmqtrain.exchange.members import FixedMembers, Members
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.row_sums import RowSums
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.exchange.shared_copies import like_in
from zmqtrain.exchange.sums import HostSums, NetworkSums, Sums
from zmqtrain.host.member import ArenaMember, MakeMember
from zmqtrain.host.team import Team
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.schema import Topology


def make_members(context: RoleContext) -> Members:
    """The workers that take part in the training."""
    workers = tuple(worker.peer for worker in context.placement.workers)
    if context.topology.elastic and context.membership is not None:
        return ElasticMembers(context.endpoint, context.membership, workers, context.timeouts, recorder=context.recorder)
    return FixedMembers(context.endpoint, workers, timeout_s=context.timeouts.barrier_s)


def make_exchange(context: RoleContext, members: Members, *, whole_updates: bool = False) -> Exchange:
    """This worker's exchange, by ``[exchange] kind``. Call ``start`` next.

    ``whole_updates``: the local optimizer runs at the end of a step, on all parameters (where its ``step`` is somebody else's to
    call), rather than bucket by bucket where it can.
    """
    topology, placement, role = context.topology, context.placement, context.role
    scaled = topology.compute.precision == "float16" and not whole_updates
    whole_updates = whole_updates or scaled  # whether a scaled gradient is finite is known when all of it is there
    kind, overlap = topology.exchange.kind, topology.compute.overlap
    every = topology.exchange.every_steps(placement.groups)
    if kind == "model_server":
        settings = ModelServerSettings.of(topology, placement, role, context.timeouts)
        if not scaled:
            settings = replace(settings, judges=False)
        return ModelServerExchange(context.endpoint, settings, recorder=context.recorder)

    def group(name: str, members: tuple[str, ...]) -> Group:
        # The others may evaluate or write a checkpoint while we wait for them.
        return Group(context.endpoint, members, members.index(role.peer), name, timeout_s=context.timeouts.barrier_s)

    # Whoever changes gradients after they were summed needs them to himself.
    untouched = not whole_updates and not topology.optimizer.clip_norm
    world = group("workers", tuple(worker.peer for worker in placement.workers))
    if kind == "allreduce":
        # Within a group the gradients sum up to the group's mean; over g groups, to g times the mean of all.
        scale = 1.0 / (placement.groups * every)
        return AllReduceExchange(
            make_sums(context, world, 0, scale=scale, in_place=untouched),
            every=every,
            by_bucket=overlap and not whole_updates and not topology.optimizer.clip_norm,
            recorder=context.recorder,
            overlap=overlap,
        )
    own = group(f"group/{role.group}", placement.group_members(role.group))
    gradients = kind == "gossip" and topology.exchange.gossip.exchange == "gradients"
    sums = make_sums(context, own, role.group + 1, in_place=untouched and not gradients)
    column = tuple(placement.group_members(number)[role.position] for number in range(placement.groups))
    if kind == "gossip":
        gossip = topology.exchange.gossip
        gossip_settings = GossipSettings(
            seed=topology.job.seed,
            shape=gossip.topology,
            rotation=gossip.rotation,
            balanced=gossip.balanced,
            exchange=gossip.exchange,
            by_bucket=gossip.granularity == "bucket" and not whole_updates,
            overlap=overlap,
            timeout_s=context.timeouts.barrier_s,
        )
        return GossipExchange(
            context.endpoint,
            members,
            sums,
            frozenset(column),
            gossip_settings,
            like=like_in(context.arena),
            recorder=context.recorder,
        )
    groups = AveragingGroups(world, own, group(f"column/{role.position}", column))
    averaging = topology.exchange.averaging
    method: Method = Average()
    if averaging.method == "elastic":
        method = Elastic(placement.groups, averaging.alpha)
    elif averaging.method == "outer":
        method = Outer(averaging.outer_lr, averaging.outer_momentum)
    return AveragingExchange(
        groups,
        Fragments(every, averaging.fragments, averaging.overlap_steps),
        method,
        deltas=averaging.deltas,
        mix=averaging.mix,
        sums=sums,
        recorder=context.recorder,
        overlap=overlap,
    )


def make_sums(context: RoleContext, group: Group, number: int, *, scale: float = 1.0, in_place: bool) -> Sums:
    """Sums over a group: in memory, as far as its members share any. ``number`` of the group, among all of the run."""

    def make(members: Group, family: int) -> HostSums | NetworkSums:
        return _sums_of(context, members, number, 0 if members is group else family + 1, scale=scale, in_place=in_place)

    return RowSums(group, make) if context.topology.divided else make(group, 0)


def _sums_of(
    context: RoleContext, group: Group, number: int, family: int, *, scale: float, in_place: bool
) -> HostSums | NetworkSums:
    """``family`` of a divided model's buckets that ``group`` sums: 0 for what all workers have."""
    placement, role, make_member = context.placement, context.role, _member_of(context)
    hosts: dict[str, list[PeerId]] = {}
    for peer in group.members:
        hosts.setdefault(placement.role(peer).host, []).append(peer)
    if make_member is None or max(map(len, hosts.values())) == 1:
        return NetworkSums(group, scale)
    here, slices = hosts[role.host], min(map(len, hosts.values()))
    everybody = [other.peer for other in placement.of_host(role.host)]
    teams = sorted({placement.role(peer).group + 1 for peer in everybody if placement.role(peer).kind == "worker"})
    rank = here.index(role.peer)
    # A worker is in one team of each number: of all groups' workers (0), of its group's, and of those that share a part with it.
    whole = teams.index(number) + 1 if number else 0
    slots = [everybody.index(peer) for peer in here]
    member = make_member(slots, rank, here, len(teams) + family if family else whole)
    column = None
    if len(hosts) > 1 and rank < slices:
        members = tuple(workers[rank] for workers in hosts.values())
        name = f"{group.name}/slice/{rank}"
        column = Group(context.endpoint, members, members.index(role.peer), name, timeout_s=context.timeouts.barrier_s)
    return HostSums(group, member, column, slices=slices, scale=scale, in_place=in_place)


def _member_of(context: RoleContext) -> MakeMember | None:
    """Makes this worker's places in the memory of its host; None where its gradients lie elsewhere."""
    arena = context.arena
    if context.make_member is not None:
        return context.make_member
    if arena is None or not _in_memory(context.role.device, context.topology):
        return None

    def make(slots: Sequence[int], rank: int, names: Sequence[PeerId], number: int) -> ArenaMember:
        return ArenaMember(Team(arena, slots, rank, names=names, number=number, timeout_s=context.timeouts.barrier_s))

    return make


def _in_memory(device: str, topology: Topology) -> bool:
    """Whether a worker's gradients lie in the host's memory."""
    return device != "modelled" or topology.simulation.payload in (None, "real")
