"""Two processes that lead one run, over TCP: the one with the higher epoch counts, and the other one learns of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from zmqtrain.errors import ConnectivityError, SupersededError
from zmqtrain.net.address import split_address
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.wire.payload import Value

#: Longest wait, on a busy machine.
PATIENCE_S = 60.0


async def leader(epoch: int, **settings: Any) -> tuple[Node, asyncio.Event]:
    node = await open_zeromq("coordinator", settings=NetSettings(token="t", epoch=epoch, **settings))
    superseded = asyncio.Event()
    node.on_superseded(superseded.set)

    async def which(_caller: PeerId) -> Value:
        return epoch

    node.serve("which", which)
    return node, superseded


async def member(name: str) -> tuple[Node, list[int]]:
    node, told = await open_zeromq(name, settings=NetSettings(token="t")), []

    async def obey(_caller: PeerId, number: Value) -> Value:
        told.append(number)
        return None

    node.serve("obey", obey)
    return node, told


async def test_the_first_ones_word_is_worthless_to_whoever_has_heard_of_the_second() -> None:
    (old, old_superseded), (new, new_superseded) = await leader(1), await leader(2)
    (near, near_told), (far, far_told) = await member("worker/0"), await member("worker/1")
    try:
        async with asyncio.timeout(PATIENCE_S):
            for node in (near, far):
                node.add_peer("coordinator", old.address)
                old.add_peer(node.peer, node.address)
                assert (await node.request("coordinator", "which", timeout=PATIENCE_S)).meta == 1
            await old.request("worker/0", "obey", 1, timeout=PATIENCE_S)
            # The second one reaches a member: the connection to the first ends, and the first is told why.
            new.add_peer("worker/0", near.address)
            await new.request("worker/0", "obey", 2, timeout=PATIENCE_S)
            await old_superseded.wait()
            with pytest.raises(SupersededError, match="a later launcher has taken over"):
                await old.request("worker/0", "obey", 3, timeout=PATIENCE_S)
            # A member that has heard nothing of it obeys the first until it does.
            await old.request("worker/1", "obey", 4, timeout=PATIENCE_S)
            new.add_peer("worker/1", far.address)
            await new.request("worker/1", "obey", 5, timeout=PATIENCE_S)
            with pytest.raises(SupersededError):
                await old.request("worker/1", "obey", 6, timeout=PATIENCE_S)
        assert (near_told, far_told) == ([1, 2], [4, 5])
        assert not new_superseded.is_set()
    finally:
        await asyncio.gather(*(node.close() for node in (old, new, near, far)))


async def test_a_leader_learns_from_a_member_that_a_later_one_exists() -> None:
    (old, superseded), (new, _) = await leader(1), await leader(2)
    node, told = await member("worker/0")
    try:
        async with asyncio.timeout(PATIENCE_S):
            node.add_peer("coordinator", new.address)
            assert (await node.request("coordinator", "which", timeout=PATIENCE_S)).meta == 2
            # It had been cut off, and comes back: it greets the member, which refuses it.
            old.add_peer("worker/0", node.address)
            with pytest.raises(SupersededError):
                await old.request("worker/0", "obey", 1, timeout=PATIENCE_S)
            await superseded.wait()
        assert told == []
    finally:
        await asyncio.gather(*(each.close() for each in (old, new, node)))


async def test_a_successor_is_found_at_the_address_that_the_member_was_given() -> None:
    """It announces another one, which leads nowhere from there, as the one before did."""
    old, _ = await leader(1, advertise="192.0.2.1")
    ports = [int(address.rpartition(":")[2]) for address in split_address(old.address)]
    given = f"tcp://127.0.0.1:{ports[0]},{ports[1]}"
    node, _ = await member("worker/0")
    found = [node]
    try:
        async with asyncio.timeout(PATIENCE_S):
            node.add_peer("coordinator", given)
            assert (await node.request("coordinator", "which", timeout=PATIENCE_S)).meta == 1
            await old._transport.close()
            new, _ = await leader(2, advertise="192.0.2.1", port=ports[0], bulk_port=ports[1])
            found.append(new)
            while True:
                node.add_peer("coordinator", given)
                with suppress(ConnectivityError):
                    assert (await node.request("coordinator", "which", timeout=PATIENCE_S)).meta == 2
                    break
    finally:
        await asyncio.gather(*(each.close() for each in found))
