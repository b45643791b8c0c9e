"""Roles end when nobody needs them any more."""

from __future__ import annotations

import asyncio

import pytest

from tests.train.world import Recipe, topology_of
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.description import RunDescription
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run.assembly import Assembly
from zmqtrain.run.enter import enter
from zmqtrain.run.role import run_role
from zmqtrain.topology.placement import place


@pytest.mark.parametrize("merged", [False, True])
async def test_servers_end_with_workers_that_never_asked_for_anything(merged: bool) -> None:
    """As a script's do that joins and replicates no model."""
    phases = {"merged_fc": True, "split": "4"} if merged else {}
    topology = topology_of(job={"timeout": 2.0}, exchange={"kind": "model_server", **phases})
    network, placement = MemoryNetwork(), place(topology)
    endpoint = network.endpoint(COORDINATOR)
    assembly = Assembly(endpoint, RunDescription(topology, placement, ""), checkpoints=None, agents=False)

    async def live(peer: str) -> None:
        own = network.endpoint(peer)
        async with enter(own, endpoint.address, assembly.timeouts) as (context, _):
            if not peer.startswith("worker"):
                await run_role(context, task=Recipe()(peer))
        await own.close()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(assembly.run())
        await asyncio.gather(*(live(role.peer) for role in placement.roles))
    assert running.result().status == "done"
    await endpoint.close()
