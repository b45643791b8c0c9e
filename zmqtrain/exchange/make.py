"""The exchange that the topology file asks for."""

from __future__ import annotations

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
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.membership.context import RoleContext


def make_members(context: RoleContext) -> Members:
    """The workers that take part in the training."""
    workers = tuple(worker.peer for worker in context.placement.workers)
    if context.topology.elastic and context.membership is not None:
        return ElasticMembers(context.endpoint, context.membership, workers, context.ladder, recorder=context.recorder)
    return FixedMembers(context.endpoint, workers, timeout_s=context.ladder.barrier_s)


def make_exchange(context: RoleContext, members: Members, *, whole_updates: bool = False) -> Exchange:
    """This worker's exchange, by ``[exchange] kind``. Call ``start`` next.

    ``whole_updates``: the local optimizer runs at the end of a step, on all parameters (where its ``step`` is somebody else's to
    call), rather than bucket by bucket where it can.
    """
    topology, placement, role = context.topology, context.placement, context.role
    kind, overlap = topology.exchange.kind, topology.compute.overlap
    every = topology.exchange.every_steps(placement.groups)
    if kind == "model_server":
        settings = ModelServerSettings.of(topology, placement, role, context.ladder)
        return ModelServerExchange(context.endpoint, settings, recorder=context.recorder)

    def group(name: str, members: tuple[str, ...]) -> Group:
        # The others may evaluate or write a checkpoint while we wait for them.
        return Group(context.endpoint, members, members.index(role.peer), name, timeout_s=context.ladder.barrier_s)

    world = group("workers", tuple(worker.peer for worker in placement.workers))
    if kind == "allreduce":
        return AllReduceExchange(
            world,
            placement.groups,
            every=every,
            by_bucket=overlap and not whole_updates and not topology.optimizer.clip_norm,
            recorder=context.recorder,
            overlap=overlap,
        )
    own = group(f"group/{role.group}", placement.group_members(role.group))
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
            timeout_s=context.ladder.barrier_s,
        )
        return GossipExchange(context.endpoint, members, own, frozenset(column), gossip_settings, recorder=context.recorder)
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
        recorder=context.recorder,
        overlap=overlap,
    )
