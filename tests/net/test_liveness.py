"""Whatever is sent in whatever order, and received in whatever other order, arrives; also through tiny windows."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.tensor import TensorPayload

WINDOW = 1024
Sizes = st.lists(st.sampled_from([0, 1, 100, 255, 256, 257, 1000, 5000]), min_size=1, max_size=8)


@given(Sizes, st.randoms(use_true_random=False), st.integers(1, 3), st.integers(200, 20_000))
def test_everything_arrives(sizes: list[int], chance: object, tags: int, outbox_bytes: int) -> None:
    asyncio.run(scenario(sizes, chance, tags, outbox_bytes))


async def scenario(sizes: list[int], chance: object, tags: int, outbox_bytes: int) -> None:
    settings = NetSettings(window_bytes=WINDOW, chunk_bytes=256, outbox_bytes=outbox_bytes, inflight_bytes=512, probe_s=5.0)
    network = MemoryNetwork()
    a, b = network.endpoint("a", settings), network.endpoint("b", settings)
    a.add_peer("b", b.address)
    b.add_peer("a", a.address)
    by_tag: dict[int, list[int]] = {}
    for number, _ in enumerate(sizes):
        by_tag.setdefault(number % tags, []).append(number)
    receives = [tag for tag, numbers in by_tag.items() for _ in numbers]
    chance.shuffle(receives)  # type: ignore[attr-defined]
    got: dict[int, list[int]] = {}
    async with asyncio.timeout(5.0):
        async with asyncio.TaskGroup() as group:
            for number, size in enumerate(sizes):
                payload = TensorPayload.of(np.full(size, number, np.int32), [number])
                group.create_task(a.send("b", ("t", number % tags), payload))
            for tag in receives:
                payload = await b.receive("a", ("t", tag))
                number = payload.meta[0]  # type: ignore[index]
                assert isinstance(payload, TensorPayload)
                assert payload.numel == sizes[number]
                assert set(payload.numpy().tolist()) <= {number}
                got.setdefault(tag, []).append(number)
                assert b.statistics()["stored_bytes"] < WINDOW + 2 * 256 + max(sizes) * 4 * len(by_tag)
        await a.close()
        await b.close()
    assert got == by_tag


async def test_a_grant_of_credit_that_is_lost_with_the_connection_comes_again() -> None:
    """Everything was acknowledged before, so the sender has nothing to ask by."""
    settings = NetSettings(window_bytes=WINDOW, chunk_bytes=256, inflight_bytes=4096)
    network = MemoryNetwork()
    a, b = network.endpoint("a", settings), network.endpoint("b", settings)
    a.add_peer("b", b.address)
    b.add_peer("a", a.address)
    async with asyncio.timeout(5.0):
        first = await a.send("b", ("first",), TensorPayload.of(np.zeros(WINDOW, np.uint8)))
        await first.wait_released()
        await a.send("b", ("second",), TensorPayload.of(np.ones(WINDOW, np.uint8)))  # has no credit
        await b.receive("a", ("first",))
        network.drop_link("a", "b")
        assert (await b.receive("a", ("second",))).nbytes == WINDOW
        await a.close()
        await b.close()
