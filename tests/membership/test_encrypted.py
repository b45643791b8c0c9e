"""The membership over encrypted connections: the coordinator vouches for everybody's key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zmqtrain.errors import ProtocolError, RunTokenError, UsageError
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.client import Membership
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.membership.view import View
from zmqtrain.net.address import key_in, with_key, without_key
from zmqtrain.net.curve import Identity, KeyPair
from zmqtrain.net.node import Node
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.tensor import TensorPayload

TOKEN = "0123456789abcdef"
TIMEOUTS = replace(Timeouts.of(6.0), heartbeat_s=0.1, lost_s=0.5, flush_s=0.3)


def placement_of(workers: int, servers: int = 0) -> Placement:
    exchange = f"kind = 'model_server'\nshards = {servers}\n" if servers else "kind = 'gossip'\n"
    return place(parse_topology(f"[job]\noversubscribe = true\n[compute]\ngroups = {workers}\n[exchange]\n{exchange}"))


class Run:
    """A coordinator, and processes that are told no more than their environment."""

    def __init__(self, endpoint: Node, placement: Placement, *, elastic: bool = False) -> None:
        self.endpoint, self.placement = endpoint, placement
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.nodes = [endpoint]
        self.coordinator = Coordinator(
            endpoint,
            placement,
            TIMEOUTS,
            agents=False,
            elastic=elastic,
            on_event=lambda kind, values: self.events.append((kind, values)),
        )

    async def open(self, peer: str, *, token: str = TOKEN, address: str | None = None) -> Node:
        environment = RoleEnvironment(peer, address or self.endpoint.address, token, timeout_s=6.0)
        known = RoleEnvironment.from_environ(environment.to_environ())
        assert known is not None
        settings = replace(known.settings(), lost_s=TIMEOUTS.lost_s, heartbeat_s=TIMEOUTS.heartbeat_s, flush_s=TIMEOUTS.flush_s)
        self.nodes.append(await open_zeromq(peer, settings=settings))
        return self.nodes[-1]

    async def join(self, peer: str) -> Membership:
        node = await self.open(peer)
        return await Membership.join(node, coordinator_address=self.endpoint.address, timeouts=TIMEOUTS)


@asynccontextmanager
async def started(placement: Placement, *, elastic: bool = False) -> AsyncIterator[tuple[Run, asyncio.Task[Outcome]]]:
    endpoint = await open_zeromq("coordinator", settings=net_settings(TIMEOUTS, TOKEN, identity=Identity.coordinator(TOKEN)))
    run = Run(endpoint, placement, elastic=elastic)
    task = asyncio.create_task(run.coordinator.run())
    try:
        yield run, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(node.close() for node in run.nodes))


async def sees(member: Membership, condition: Callable[[View], bool]) -> None:
    """Wait until the member's view is so."""
    seen = asyncio.Event()
    member.on_view(lambda view: seen.set() if condition(view) else None)
    if not condition(member.view):
        async with asyncio.timeout(5.0):
            await seen.wait()


async def all_meet(members: list[Membership]) -> None:
    """Each sends something to each."""
    payload = TensorPayload.of(np.ones(50_000, np.float32))
    for member in members:
        for other in members:
            if other is not member:
                await member.endpoint.send(other.peer, ("hello",), payload)
    for member in members:
        for other in members:
            if other is not member:
                assert (await member.endpoint.receive(other.peer, ("hello",))).frames() == payload.frames()


@pytest.mark.parametrize("seed", range(5))
async def test_a_run_in_any_order_of_joins(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(seed)
    async with started(placement_of(3, servers=2)) as (run, task):

        async def late(peer: str) -> Membership:
            await asyncio.sleep(chance.random() * 0.3)
            return await run.join(peer)

        peers = [role.peer for role in run.placement.roles]
        members = await asyncio.gather(*map(late, chance.sample(peers, len(peers))))
        addresses = {member.peer: member.endpoint.address for member in members}
        for member in members:
            assert {peer: one.address for peer, one in member.view.members.items()} == addresses
        keys = [key_in(address) for address in [*addresses.values(), run.endpoint.address]]
        assert None not in keys
        assert len(set(keys)) == len(keys)
        await all_meet(list(members))
        for member in members:
            if member.peer.startswith("worker"):
                await member.leave()
        for member in members:
            if member.peer.startswith("server"):
                await member.finished.wait()
                await member.leave()
        assert (await task).status == "done"
        assert all(node.statistics()["garbage"] == 0 for node in run.nodes)
    told = repr(run.events) + caplog.text
    secrets = [TOKEN, KeyPair.of_token(TOKEN).secret.hex(), *(key.hex() for key in keys if key is not None)]
    assert not [one for one in secrets if one in told]
    assert not caplog.messages


async def test_a_worker_that_comes_back_has_other_keys() -> None:
    async with started(placement_of(3), elastic=True) as (run, _):
        first, second, third = await asyncio.gather(*(run.join(f"worker/{rank}") for rank in range(3)))
        await all_meet([first, second, third])
        await third.endpoint._transport.close()  # type: ignore[attr-defined]
        for member in (first, second):
            await sees(member, lambda view: "worker/2" in view.lost)
        old = third.endpoint.address
        again = await run.join("worker/2")
        await again.ready()
        for member in (first, second):
            await sees(member, lambda view: "worker/2" in view.members)
        assert key_in(again.endpoint.address) != key_in(old)
        await all_meet([first, second, again])
        stale = key_in(old)
        assert stale is not None
        for member in (first, second):
            settings = member.endpoint.settings  # type: ignore[attr-defined]
            assert settings.identity.name_of(stale) is None


async def test_those_who_do_not_belong_to_the_run() -> None:
    async with started(placement_of(2)) as (run, _):
        foreign = await run.open("worker/0", token="another")
        with pytest.raises(RunTokenError):
            await Membership.join(foreign, coordinator_address=run.endpoint.address, timeouts=TIMEOUTS)
        unknown = await run.open("worker/7")
        with pytest.raises(ProtocolError, match="not part of this run"):
            await Membership.join(unknown, coordinator_address=run.endpoint.address, timeouts=TIMEOUTS)
        liar = await run.open("worker/1")
        liar.add_peer("coordinator", run.endpoint.address)
        for address, why in (
            (without_key(liar.address), "does not encrypt"),
            (with_key(liar.address, b""), "wrong address"),
        ):
            with pytest.raises(ProtocolError, match=why):
                await liar.request("coordinator", "membership.join", 3, address, timeout=5.0)
        assert run.coordinator.view.members == {}
        members = await asyncio.gather(*(run.join(f"worker/{rank}") for rank in range(2)))
        await all_meet(list(members))


def test_an_environment_with_a_bad_key() -> None:
    with pytest.raises(UsageError, match=r"ZMQTRAIN_COORDINATOR: tcp://10.0.0.1:1,2 is followed by # and an invalid key"):
        RoleEnvironment("worker/0", "tcp://10.0.0.1:1,2#12", TOKEN).settings()
