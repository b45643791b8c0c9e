"""The membership over ZeroMQ, with a member in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.client import Membership
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.environment import net_settings
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_endpoint
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.timeouts import Timeouts

ROOT = Path(__file__).parents[2]
#: A host's agent, and a link, count as lost after 0.6 s of silence; the rest has more time, since processes start slowly.
TIMEOUTS = replace(Timeouts.of(1.2), connect_s=20.0, request_s=20.0, join_s=20.0, barrier_s=20.0)

BUSY = """
import asyncio, ctypes, sys
from tests.membership.test_processes import TIMEOUTS, settings
from zmqtrain.membership.client import Membership
from zmqtrain.net.zeromq import open_endpoint

async def main():
    async with open_endpoint("worker/1", settings=settings()) as endpoint:
        membership = await Membership.join(endpoint, coordinator_address=sys.argv[1], timeouts=TIMEOUTS)
        ctypes.PyDLL(None).usleep(1_800_000)   # as long as this lasts no other Python of this process runs: the GIL is held
        await membership.barrier("awake")
        await membership.leave()

asyncio.run(main())
"""


def settings() -> NetSettings:
    return net_settings(TIMEOUTS, "secret")


async def test_a_process_that_holds_the_gil_for_long_is_no_loss() -> None:
    placement = place(parse_topology("[job]\noversubscribe = true\n[compute]\ngroup_size = 2\n"))
    async with (
        open_endpoint("coordinator", settings=settings()) as centre,
        open_endpoint("agent/localhost", settings=settings()) as agent,
        open_endpoint("worker/0", settings=settings()) as worker,
    ):
        coordinator = Coordinator(centre, placement, TIMEOUTS)
        async with asyncio.TaskGroup() as group:
            run = group.create_task(coordinator.run())
            link = await AgentLink.join(agent, coordinator_address=centre.address, timeouts=TIMEOUTS)
            link.started("worker/0")
            link.started("worker/1")
            group.create_task(link.run())
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY, centre.address, cwd=ROOT)
            membership = await Membership.join(worker, coordinator_address=centre.address, timeouts=TIMEOUTS)
            lost: list[str] = []
            worker.on_lost(lambda peer, _reason: lost.append(peer))
            await membership.barrier("awake")
            assert lost == []
            assert coordinator.view.lost == {}
            await membership.leave()
            await link.exited("worker/0", 0)
            await link.exited("worker/1", await process.wait())
            assert (await run).status == "done"
            await link.leave()
