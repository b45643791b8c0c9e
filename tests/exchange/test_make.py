"""The topology's kind chooses the exchange, and every worker gets its place in it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.collectives.world import endpoints
from tests.exchange.world import Data, NumpyReplica, train_worker
from zmqtrain.exchange.allreduce import AllReduceExchange
from zmqtrain.exchange.averaging.exchange import AveragingExchange
from zmqtrain.exchange.gossip.exchange import GossipExchange
from zmqtrain.exchange.make import make_exchange, make_members
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.timeouts import Timeouts

TOPOLOGY = """
[job]
task = "task.py:task"
oversubscribe = true

[compute]
groups = 2
group_size = 3

[exchange]
kind = "{kind}"
every = {every}
"""


def contexts(nodes: list[Endpoint], kind: str, every: int = 1) -> list[RoleContext]:
    topology = parse_topology(TOPOLOGY.format(kind=kind, every=every))
    placement = place(topology)
    membership: Any = None  # exchanges do not use it
    return [
        RoleContext(node, membership, role, placement, topology, Timeouts.of(60))
        for node, role in zip(nodes, placement.workers, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("allreduce", AllReduceExchange),
        ("averaging", AveragingExchange),
        ("model_server", ModelServerExchange),
        ("gossip", GossipExchange),
    ],
)
async def test_the_kind_chooses(kind: str, expected: type) -> None:
    async with endpoints(6) as nodes:
        assert all(isinstance(make_exchange(context, make_members(context)), expected) for context in contexts(nodes, kind))


@pytest.mark.parametrize(("kind", "every"), [("allreduce", 1), ("averaging", 2)])
async def test_workers_of_one_topology_train_together(kind: str, every: int) -> None:
    data = Data(40, 60, 2)
    async with endpoints(6) as nodes:
        histories = await asyncio.gather(
            *(
                train_worker(
                    make_exchange(context, make_members(context)),
                    NumpyReplica((30, 10), context.role.index),
                    data,
                    rank=context.role.index,
                    groups=2,
                    group_size=3,
                    steps=range(2),
                )
                for context in contexts(nodes, kind, every)
            )
        )
    assert len({history[-1].tobytes() for history in histories}) == 1
