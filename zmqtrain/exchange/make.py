"""The exchange that the topology file asks for."""

from __future__ import annotations

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.averaging import AveragingExchange, AveragingGroups
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.membership.context import RoleContext


def make_exchange(context: RoleContext) -> Exchange:
    """This worker's exchange, by ``[exchange] kind``. Call ``start`` next."""
    topology, placement, role = context.topology, context.placement, context.role
    kind, overlap = topology.exchange.kind, topology.compute.overlap
    if kind == "model_server":
        settings = ModelServerSettings.of(topology, placement, role, context.ladder)
        return ModelServerExchange(context.endpoint, settings, recorder=context.recorder)

    def group(name: str, members: tuple[str, ...]) -> Group:
        # The others may evaluate or write a checkpoint while we wait for them.
        return Group(context.endpoint, members, members.index(role.peer), name, timeout_s=context.ladder.barrier_s)

    world = group("workers", tuple(worker.peer for worker in placement.workers))
    if kind == "allreduce":
        return AllReduceExchange(world, placement.groups, recorder=context.recorder, overlap=overlap)
    own = group(f"group/{role.group}", placement.group_members(role.group))
    column = group(
        f"column/{role.position}", tuple(placement.group_members(number)[role.position] for number in range(placement.groups))
    )
    groups = AveragingGroups(world, own, column)
    return AveragingExchange(groups, topology.exchange.every, recorder=context.recorder, overlap=overlap)
