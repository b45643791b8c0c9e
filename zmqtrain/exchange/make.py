"""Makes the exchange that the topology file asks for; each kind's class method ``of`` does the work."""

from __future__ import annotations

from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.averaging.exchange import AveragingExchange
from zmqtrain.exchange.base import Exchange
from zmqtrain.exchange.context import ExchangeContext
from zmqtrain.exchange.elastic import ElasticMembers
from zmqtrain.exchange.gossip.exchange import GossipExchange
from zmqtrain.exchange.members import FixedMembers, Members
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.membership.context import RoleContext
from zmqtrain.topology.schema import Topology


def make_members(context: RoleContext, *, script: bool = False) -> Members:
    """The workers that take part in the training. ``script``: in a loop of the user's own, which does not train what others have
    left."""
    workers = tuple(worker.peer for worker in context.placement.everyone)
    elastic = context.topology.elastic and not (script and leaves_work(context.topology))
    if elastic and context.membership is not None:
        exchange, placement = context.topology.exchange, context.placement
        groups = placement.groups
        keeps = context.topology.job.on_resize == "keep"
        whole, several = context.topology.whole_groups, placement.group_size > 1
        served, own_models = exchange.kind == "model_server", exchange.kind in ("averaging", "gossip")
        teams, apart = several and served, several and own_models and not whole
        all_groups = [placement.group_members(group) for group in range(groups)]
        return ElasticMembers(
            context.endpoint,
            context.membership,
            workers,
            context.timeouts,
            recorder=context.recorder,
            divided=groups * context.topology.compute.batch_size if exchange.kind == "allreduce" else None,
            usual=None if keeps else context.topology.compute.workers,
            every=exchange.every_steps(groups),
            spares=len(placement.spare_workers),
            groups=all_groups if teams else (),
            apart=all_groups if apart else (),
            whole=all_groups if whole else (),
            repeats=apart or (teams and exchange.policy == "sync" and not whole),
            takes_turns=not script and takes_turns(context.topology),
            prepares=served,
        )
    return FixedMembers(context.endpoint, workers, timeout_s=context.timeouts.barrier_s)


def leaves_work(topology: Topology) -> bool:
    """Whether, in an elastic run, others train what a lost worker has left: a script's own loop does not."""
    kind = topology.exchange.kind
    return kind == "model_server" or (kind in ("averaging", "gossip") and topology.compute.group_size > 1)


def takes_turns(topology: Topology) -> bool:
    """Whether groups that have models of their own train what a lost one has left. Samples of the ring are lost with the group that
    has them; and a gradient that two have exchanged is part of no model yet."""
    kind, own_model = topology.exchange.kind, topology.exchange.gossip.exchange == "weights"
    models = kind == "averaging" or (kind == "gossip" and own_model)
    return topology.elastic and models and topology.data.shuffle != "ring"


def make_exchange(context: RoleContext, members: Members, *, whole_updates: bool = False, script: bool = False) -> Exchange:
    """This worker's exchange, by ``[exchange] kind``. Call ``start`` next.

    ``whole_updates``: the local optimizer runs at the end of a step on all parameters (because a ``script`` calls its ``step``, or
    it is not known to update each parameter by itself), not bucket by bucket where that is possible.
    """
    scaled = context.topology.compute.precision == "float16" and not script
    # Whether a scaled gradient is finite is known only when all of it has arrived.
    # What one worker has updated, all must be able to update: if workers may be lost in between, only as a whole.
    whole_updates = whole_updates or script or scaled or context.era is not None
    own = ExchangeContext(context, members, whole_updates=whole_updates, scaled=scaled)
    match context.topology.exchange.kind:
        case "allreduce":
            return AllReduceExchange.of(own)
        case "model_server":
            return ModelServerExchange.of(own)
        case "gossip":
            return GossipExchange.of(own)
        case "averaging":
            return AveragingExchange.of(own)
