"""Tensors between endpoints that share memory: what the socket carries, and what becomes of the memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from zmqtrain.arena import Arena, Region, shared_memory_missing
from zmqtrain.errors import PeerLostError, WireError
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shared import LEAST_BYTES, SharedBodies
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
MIB = 1 << 20
SETTINGS = NetSettings(greet_s=10.0, lost_s=2.0, flush_s=2.0)


@pytest.fixture
def region() -> Iterator[Region]:
    made = Arena.create(3, 64 * MIB)
    yield made
    made.close()


@asynccontextmanager
async def pair(*arenas: Arena | None) -> AsyncIterator[tuple[Node, Node]]:
    async with AsyncExitStack() as stack:
        nodes = []
        for name, arena in zip("ab", arenas, strict=True):
            nodes.append(await stack.enter_async_context(await open_zeromq(name, settings=replace(SETTINGS, arena=arena))))
        for node, other in (nodes, nodes[::-1]):
            node.add_peer(other.peer, other.address)
        yield nodes[0], nodes[1]


def payload(numel: int, arena: Arena | None = None) -> TensorPayload:
    numbers = np.arange(numel, dtype=np.float32)
    if arena is None:
        return TensorPayload.of(numbers)
    memory = np.frombuffer(arena.allocate(4 * numel).memory, np.float32)
    memory[:] = numbers
    return TensorPayload.of(memory)


@pytest.mark.parametrize("there", [True, False], ids=["in the arena", "elsewhere"])
@pytest.mark.parametrize("numel", [10, LEAST_BYTES // 4, 300_000, 3_000_001])
async def test_sockets_carry_descriptors(numel: int, there: bool, region: Region) -> None:
    arenas = [Arena(region, slot) for slot in range(2)]
    async with pair(*arenas) as (one, other):
        before = arenas[0].taken_bytes
        sent = payload(numel, arenas[0] if there else None)
        into = TensorPayload.of(np.zeros(numel, np.float32))
        waiting = asyncio.create_task(other.receive("a", ("early",), into=into))
        first = await one.send("b", ("early",), sent)
        second = await one.send("b", ("late",), sent)
        await waiting
        late = await other.receive("a", ("late",))
        await first.wait_released()
        await second.wait_released()
        wanted = sent.numpy().copy()
        sent.numpy()[:] = -1  # it is the sender's again
        assert np.array_equal(into.numpy(), wanted)
        assert isinstance(late, TensorPayload)
        assert np.array_equal(late.numpy(), wanted)
        assert arenas[0].taken_bytes - before == (4 * numel + 63) // 64 * 64 * there
        if 4 * numel >= LEAST_BYTES:
            assert one.statistics()["bytes_sent"] < 20_000
            assert other.statistics()["bytes_received"] < 20_000


@pytest.mark.parametrize("numel", [LEAST_BYTES // 4, 3_000_001])
async def test_what_lasts_is_read_where_it_lies(numel: int, region: Region) -> None:
    arenas = [Arena(region, slot) for slot in range(2)]
    async with pair(*arenas) as (one, other):
        sent = payload(numel, arenas[0])
        await one.send("b", ("x",), sent, lasting=True)
        received = await other.receive("a", ("x",))
        assert isinstance(received, TensorPayload)
        assert not received.writable
        assert np.array_equal(received.numpy(), sent.numpy())
        sent.numpy()[7] = -1  # the very same memory: the receiver must have answered before anybody does this
        assert received.numpy()[7] == -1
        into = TensorPayload.of(np.zeros(numel, np.float32))
        waiting = asyncio.create_task(other.receive("a", ("y",), into=into))
        await (await one.send("b", ("y",), sent, lasting=True)).wait_released()
        await waiting
        assert np.array_equal(into.numpy(), sent.numpy())
        # What lies elsewhere is copied, and with others it travels.
        await (await one.send("b", ("z",), payload(numel), lasting=True)).wait_released()
        copied = await other.receive("a", ("z",))
        assert isinstance(copied, TensorPayload)
        assert np.array_equal(copied.numpy(), payload(numel).numpy())


async def test_only_those_with_the_same_region_share_it(region: Region) -> None:
    with_another = Arena.create(1, 8 * MIB)
    for arena in (None, Arena(with_another, 0)):
        async with pair(Arena(region, 0), arena) as (one, other):
            sent = payload(100_000)
            await one.send("b", ("x",), sent)
            received = await other.receive("a", ("x",))
            assert isinstance(received, TensorPayload)
            assert np.array_equal(received.numpy(), sent.numpy())
            assert one.statistics()["bytes_sent"] > 400_000
    with_another.close()


async def test_without_room_tensors_travel_as_they_are(region: Region) -> None:
    arenas = [Arena(region, slot) for slot in range(2)]
    while True:
        try:
            arenas[0].allocate(MIB // 64)
        except Exception:  # noqa: BLE001 - full
            break
    async with pair(*arenas) as (one, other):
        sent = payload(100_000)
        await one.send("b", ("x",), sent)
        received = await other.receive("a", ("x",))
        assert isinstance(received, TensorPayload)
        assert np.array_equal(received.numpy(), sent.numpy())


async def test_what_was_lent_to_a_lost_peer_is_free_again(region: Region) -> None:
    arenas = [Arena(region, slot) for slot in range(2)]
    async with pair(*arenas) as (one, other):
        await one.send("b", ("x",), payload(10))
        await other.receive("a", ("x",))
        before = arenas[0].taken_bytes
        sent = [await one.send("b", ("y",), payload(200_000)) for _ in range(3)]
        one.forget("b", "for a test")
        for each in sent:
            if not each.released:
                with pytest.raises(PeerLostError):
                    await each.wait_released()
        assert arenas[0].taken_bytes == before


def test_descriptors_of_what_is_not_shared_are_refused(region: Region) -> None:
    bodies = SharedBodies(Arena(region, 0))
    lent = bodies.lend(memoryview(bytes(LEAST_BYTES)))
    assert lent is not None
    assert bytes(bodies.borrow(lent.descriptor)) == bytes(LEAST_BYTES)
    for descriptor in (b"", b"x" * 12, b"\0" * 12, lent.descriptor[:8] + b"\xff" * 4):
        with pytest.raises(WireError, match="a descriptor "):
            bodies.borrow(descriptor)
    assert bodies.lend(memoryview(b"short")) is None


def test_regions_have_numbers_of_their_own(region: Region) -> None:
    other = Arena.create(1, MIB)
    assert Region.open(region.path).identity == region.identity != other.identity
    assert region.identity > 0
    other.close()
