"""Groups over the in-memory network, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from zmqtrain.collectives.group import Group
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.settings import NetSettings


@asynccontextmanager
async def endpoints(count: int, settings: NetSettings | None = None) -> AsyncIterator[list[Endpoint]]:
    """Connected endpoints of ``worker/0`` to ``worker/N-1``."""
    network = MemoryNetwork()
    nodes: list[Endpoint] = [network.endpoint(f"worker/{rank}", settings) for rank in range(count)]
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.add_peer(other.peer, other.address)
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def group_of(nodes: Sequence[Endpoint], name: str = "group", **options: float) -> list[Group]:
    """The members' views of a group of these endpoints, by rank. Options: those of `Group`."""
    members = tuple(node.peer for node in nodes)
    return [Group(node, members, rank, name, **options) for rank, node in enumerate(nodes)]  # type: ignore[arg-type]


async def everywhere(groups: Sequence[Group], call: Callable[[Group], Awaitable[None]]) -> None:
    """Let all members call a collective at once."""
    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            tasks.create_task(_await(call(group)))


async def _await(awaitable: Awaitable[None]) -> None:
    await awaitable
