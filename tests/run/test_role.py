"""Roles end when nobody needs them any more."""

from __future__ import annotations

import asyncio

import pytest

from tests.train.world import ListRecorder, Recipe, topology_of
from zmqtrain.membership.client import Membership
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run.role import run_role
from zmqtrain.topology.placement import place
from zmqtrain.topology.timeouts import Ladder


@pytest.mark.parametrize("merged", [False, True])
async def test_servers_end_with_workers_that_never_asked_for_anything(merged: bool) -> None:
    """As a script's do that joins and replicates no model."""
    phases = {"merged_fc": True, "split": "4"} if merged else {}
    topology = topology_of(job={"timeout": 2.0}, exchange={"kind": "model_server", **phases})
    network, placement, ladder = MemoryNetwork(), place(topology), Ladder.of(2.0)
    endpoint = network.endpoint("coordinator")
    coordinator = Coordinator(endpoint, placement, ladder, agents=False)

    async def live(peer: str) -> None:
        own = network.endpoint(peer)
        membership = await Membership.join(own, coordinator_address=endpoint.address, ladder=ladder)
        if not peer.startswith("worker"):
            context = RoleContext(own, membership, placement.role(peer), placement, topology, ladder, ListRecorder())
            await run_role(context, task=Recipe()(peer))
        await membership.leave()
        await own.close()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(coordinator.run())
        await asyncio.gather(*(live(role.peer) for role in placement.roles))
    assert running.result().status == "done"
    await endpoint.close()
