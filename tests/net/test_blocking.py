"""Sockets of a thread that waits, beside an event loop that only admits callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq

from zmqtrain.net.address import key_in, split_address, with_key, with_port
from zmqtrain.net.blocking import BlockingSockets
from zmqtrain.net.curve import Identity
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import ZeroMQTransport

WAIT_S = 0.05
Opened = tuple[ZeroMQTransport, BlockingSockets]


@asynccontextmanager
async def opened(*names: str, settings: Sequence[NetSettings]) -> AsyncIterator[list[Opened]]:
    """One process's sockets for each name."""
    transports = [ZeroMQTransport(each) for each in settings]
    found = [(each, each.blocking(name, WAIT_S)) for name, each in zip(names, transports, strict=True)]
    try:
        yield found
    finally:
        for transport in transports:
            await transport.close()


def connect(one: Opened, name: str, other: Opened) -> None:
    one[1].connect(name, with_port(other[0].address, other[1].port))


async def message(sockets: BlockingSockets) -> object:
    while (found := await asyncio.to_thread(sockets.receive)) is None:
        pass
    peer, head, body = found
    return peer, head, None if body is None else body.bytes


@pytest.mark.parametrize("encrypted", [False, True])
async def test_messages_of_those_who_are_admitted_come_and_no_others(encrypted: bool) -> None:
    if encrypted:
        identities = [Identity() for _ in range(3)]
        settings = [NetSettings(identity=identity) for identity in identities]
    else:
        settings = [NetSettings(token=token) for token in ("ours", "ours", "theirs")]
    async with opened("a", "b", "b", settings=settings) as (one, other, stranger):
        if encrypted:
            identities[0].admit("b", other[0].address)
            identities[1].admit("a", one[0].address)
            identities[2].admit("a", one[0].address)
        connect(one, "b", other)
        connect(other, "a", one)
        connect(stranger, "a", one)
        stranger[1].send("a", b"theirs")
        for number in range(3):
            other[1].send("a", b"ours", zmq.Frame(bytes([number])))
        for number in range(3):
            assert await message(one[1]) == ("b", b"ours", bytes([number]))
        one[1].send("b", b"answer")
        assert await message(other[1]) == ("a", b"answer", None)
        assert await asyncio.to_thread(one[1].receive) is None


async def test_a_member_cannot_use_the_name_of_another() -> None:
    identities = [Identity() for _ in range(3)]
    async with opened("a", "b", "b", settings=[NetSettings(identity=identity) for identity in identities]) as (one, other, false):
        identities[0].admit("b", other[0].address)
        identities[0].admit("c", false[0].address)
        identities[1].admit("a", one[0].address)
        identities[2].admit("a", one[0].address)
        connect(one, "b", other)
        connect(false, "a", one)
        false[1].send("a", b"false")
        assert await asyncio.to_thread(one[1].receive) is None
        connect(other, "a", one)
        other[1].send("a", b"true")
        assert await message(one[1]) == ("b", b"true", None)


@pytest.mark.parametrize("where", ["10.0.0.1", "[fd00::1]", "node03"])
def test_the_same_process_at_another_port(where: str) -> None:
    key = bytes(range(32))
    moved = with_port(with_key(f"tcp://{where}:400,401", key), 402)
    assert split_address(moved) == (f"tcp://{where}:402", f"tcp://{where}:402")
    assert key_in(moved) == key
    assert with_port(f"tcp://{where}:400,401", 402) == f"tcp://{where}:402,402"
    with pytest.raises(ValueError, match="not an address"):
        with_port(where, 402)


async def test_who_waits_returns_when_the_transport_is_closed() -> None:
    async with opened("a", settings=[NetSettings()]) as [(transport, sockets)]:
        _, *found = await asyncio.gather(
            asyncio.to_thread(transport._shut), *(asyncio.to_thread(sockets.receive) for _ in range(3))
        )
        assert found == [None] * 3
        assert sockets.receive() is None
        sockets.send("b", b"nobody")
