"""Roles end when nobody needs them any more."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.train.world import Recipe, topology_of
from zmqtrain.errors import PeerLostError
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run.assembly import Assembly
from zmqtrain.run.enter import enter
from zmqtrain.run.role import _while_needed, run_role
from zmqtrain.topology.placement import place


@pytest.mark.parametrize("merged", [False, True])
async def test_servers_end_with_workers_that_never_asked_for_anything(merged: bool) -> None:
    """As a script's do that joins and replicates no model. There are no requests in progress to wait for."""
    phases = {"merged_fc": True, "split": "4"} if merged else {}
    topology = topology_of(exchange={"kind": "model_server", **phases})
    began = asyncio.get_running_loop().time()
    network, placement = MemoryNetwork(), place(topology)
    endpoint = network.endpoint(COORDINATOR)
    assembly = Assembly(endpoint, RunDescription(topology, placement, ""), checkpoints=None, agents=False)

    async def live(peer: str) -> None:
        own = network.endpoint(peer)
        async with enter(own, endpoint.address, assembly.timeouts) as (context, _):
            if not peer.startswith("worker"):
                await run_role(context, task=Recipe()(peer))
        await own.close()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(assembly.run())
        await asyncio.gather(*(live(role.peer) for role in placement.roles))
    assert running.result().status == "done"
    assert asyncio.get_running_loop().time() - began < assembly.timeouts.flush_s
    await endpoint.close()


async def test_a_server_that_fails_while_its_role_is_ended_leaves_no_error_behind() -> None:
    """The event loop would print it as one that nobody has looked at."""
    left_behind: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left_behind.append(context))
    serving = asyncio.Event()

    async def serve() -> None:
        serving.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise PeerLostError("worker/0", "it has closed its endpoint") from None

    role = asyncio.create_task(_while_needed(serve(), asyncio.Event(), lambda: 1.0))
    await serving.wait()
    role.cancel()
    with pytest.raises(asyncio.CancelledError):
        await role
    del role
    gc.collect()
    assert not left_behind
