"""What is sent through an endpoint for a while does not mix with what was before, or comes after."""

from __future__ import annotations

import asyncio

import pytest

from tests.net.payloads import content, tensor
from zmqtrain.errors import ConnectivityError, PeerTimeoutError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.node import Node
from zmqtrain.net.scoped import ScopedEndpoint
from zmqtrain.wire.payload import Value


def pair() -> tuple[Node, Node]:
    network = MemoryNetwork()
    a, b = network.endpoint("a"), network.endpoint("b")
    a.add_peer("b", b.address)
    b.add_peer("a", a.address)
    return a, b


async def test_messages_of_one_tag_in_two_scopes() -> None:
    a, b = pair()
    for number, scope in enumerate(("first", "second")):
        await ScopedEndpoint(a, scope).send("b", ("x",), tensor(number))
    await a.send("b", ("x",), tensor(2))
    assert content(await ScopedEndpoint(b, "second").receive("a", ("x",))) == 1
    assert content(await b.receive("a", ("x",))) == 2
    assert content(await ScopedEndpoint(b, "first").receive("a", ("x",))) == 0
    await b.send("a", ("y",), tensor(7))
    assert content(await ScopedEndpoint(a, "first", beyond=("b",)).receive("b", ("y",))) == 7
    await asyncio.gather(a.close(), b.close())


async def test_requests_reach_the_same_scope_only_and_none_that_has_ended() -> None:
    a, b = pair()
    mine, theirs, others = ScopedEndpoint(a, "first"), ScopedEndpoint(b, "first"), ScopedEndpoint(b, "second")

    async def first(caller: PeerId, value: Value) -> Value:
        return [caller, value]

    waiting = asyncio.create_task(theirs.handler("method"))
    await asyncio.sleep(0)
    theirs.serve("method", first)
    assert await waiting is first
    assert (await mine.request("b", "method", 3, timeout=5)).meta == ["a", 3]
    with pytest.raises(PeerTimeoutError):
        await ScopedEndpoint(a, "second").request("b", "method", 3, timeout=0.01)
    for_ever = asyncio.create_task(others.handler("method"))
    await asyncio.sleep(0)
    theirs.end()
    others.end()
    with pytest.raises(ConnectivityError, match="has left first"):
        await mine.request("b", "method", 3, timeout=5)
    with pytest.raises(ConnectivityError, match="has ended"):
        await for_ever
    with pytest.raises(ConnectivityError, match="has ended"):
        await theirs.handler("method")
    await asyncio.gather(a.close(), b.close())


async def test_after_its_end_nothing_of_it_is_kept_and_losses_are_told_to_nobody() -> None:
    a, b = pair()
    scoped, losses = ScopedEndpoint(b, "first"), list[str]()
    scoped.on_lost(lambda peer, _reason: losses.append(peer))
    await ScopedEndpoint(a, "first").send("b", ("x", 1), tensor(1, 30_000))
    await a.send("b", ("y",), tensor(3))
    await b.receive("a", ("y",))
    assert b.statistics()["stored_messages"] == 1
    scoped.end()
    draining = asyncio.create_task(scoped.drain())
    await ScopedEndpoint(a, "first").send("b", ("x", 2), tensor(2, 30_000))
    for number in range(2):
        await a.send("b", ("y",), tensor(number))
        await b.receive("a", ("y",))
    assert b.statistics()["stored_messages"] == 0
    await a.close()
    await b.close()
    await draining
    assert losses == []
