"""What every endpoint promises, whatever carries it."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from tests.net.payloads import content, tensor
from tests.net.worlds import MemoryWorld, SimulatedWorld, World
from zmqtrain.errors import CheckpointError, PeerLostError, PeerTimeoutError, ZmqTrainError
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.settings import KIB, MIB
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload


async def test_messages_are_received_in_any_order(world: World) -> None:
    a, b = await world.pair()
    endpoint: Endpoint = a
    for step in range(20):
        await endpoint.send("b", ("gradient", step), tensor(step))
    for step in random.Random(1).sample(range(20), 20):
        assert content(await b.receive("a", ("gradient", step))) == step


async def test_a_receive_that_is_posted_first_gets_its_message(world: World) -> None:
    a, b = await world.pair()
    waits = [asyncio.create_task(b.receive("a", ("x", n))) for n in range(3)]
    await asyncio.sleep(0)
    for n in (2, 0, 1):
        await a.send("b", ("x", n), ValuePayload(n))
    assert [(await wait).meta for wait in waits] == [0, 1, 2]


async def test_messages_with_one_tag_keep_their_order_whatever_they_are(world: World) -> None:
    a, b = await world.pair(chunk_bytes=4 * KIB)
    rng = random.Random(2)
    kinds = [rng.choice(["value", "large value", "tensor", "large tensor"]) for _ in range(60)]
    for n, kind in enumerate(kinds):
        if "value" in kind:
            payload: Payload = ValuePayload([n, "x" * (20_000 if "large" in kind else 0)])
        else:
            payload = TensorPayload.of(np.full(10_000 if "large" in kind else 3, n), meta=n)
        await a.send("b", ("t",), payload, priority=rng.randrange(3))
    for n, kind in enumerate(kinds):
        payload = await b.receive("a", ("t",))
        assert (payload.meta[0] if "value" in kind else payload.meta) == n  # type: ignore[index]


@pytest.mark.parametrize("numel", [0, 1, 1000, 300_000, 1_000_001])
async def test_a_tensor_arrives_in_its_place(world: World, numel: int) -> None:
    a, b = await world.pair()
    x = np.random.default_rng(0).standard_normal(numel)
    into = TensorPayload.of(np.zeros(numel))
    for known_before in (True, False):
        into.numpy()[:] = 0
        wait = asyncio.create_task(b.receive("a", ("x",), into=into))
        if known_before:
            await asyncio.sleep(0.01)
        sent = await a.send("b", ("x",), TensorPayload.of(x, meta={"step": 3}))
        assert await wait is into
        assert into.meta == {"step": 3}
        assert np.array_equal(into.numpy(), x)
        await sent.wait_released()
        assert sent.released
        await a.send("b", ("y",), TensorPayload.of(x))
        fresh = await b.receive("a", ("y",))
        assert isinstance(fresh, TensorPayload)
        assert np.array_equal(fresh.numpy(), x)


async def test_into_of_another_type_converts_and_of_another_size_raises(world: World) -> None:
    a, b = await world.pair()
    await a.send("b", ("x",), tensor(2.5, 100_000))
    into = TensorPayload.of(np.zeros(100_000, np.float64))
    await b.receive("a", ("x",), into=into)
    assert content(into) == 2.5
    await a.send("b", ("x",), tensor(2.5, 10))
    with pytest.raises(ValueError, match="fit"):
        await b.receive("a", ("x",), into=into)
    await a.send("b", ("x",), tensor(3.5, 10))
    assert content(await b.receive("a", ("x",))) == 3.5


async def test_what_is_changed_after_release_does_not_show(world: World) -> None:
    a, b = await world.pair()
    for numel in (10, 10_000, 600_000):
        buffer = tensor(1.0, numel)
        meta = {"list": [1]}
        buffer.meta = meta
        sent = await a.send("b", ("x",), buffer)
        meta["list"].append(2)
        await sent.wait_released()
        buffer.numpy()[:] = 2.0
        received = await b.receive("a", ("x",))
        assert content(received) == 1.0
        assert received.meta == {"list": [1]}


async def test_phantoms_travel_without_bytes(world: World) -> None:
    a, b = await world.pair()
    for numel in (5, 10_000_000):
        wait = asyncio.create_task(b.receive("a", ("x",)))
        await a.send("b", ("x",), PhantomPayload(numel, "float32", meta="m"))
        received = await wait
        assert isinstance(received, PhantomPayload)
        assert (received.numel, received.meta) == (numel, "m")


async def test_a_subscription_gets_a_topic_from_everybody_in_order(world: World) -> None:
    nodes = [await world.open(peer) for peer in "abcd"]
    world.introduce(*nodes)
    d = nodes[3]
    for n in range(5):
        for node in nodes[:3]:
            await node.send("d", ("push", n), tensor(n))
    await nodes[0].send("d", ("other",), ValuePayload("x"))
    assert (await d.receive("a", ("other",))).meta == "x"
    subscription = d.subscribe("push")
    for n in range(5, 10):
        for node in nodes[:3]:
            await node.send("d", ("push", n), tensor(n))
    seen: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for _ in range(30):
        peer, tag, payload = await subscription.get()
        assert tag == ("push", content(payload))
        seen[peer].append(content(payload))
    assert all(values == list(range(10)) for values in seen.values())
    with pytest.raises(ValueError, match="already"):
        d.subscribe("push")
    waiting = asyncio.create_task(subscription.get())
    await asyncio.sleep(0)
    subscription.close()
    with pytest.raises(ZmqTrainError, match="push"):
        await waiting
    d.subscribe("push").close()


async def test_a_slow_receiver_stops_a_fast_sender(world: World) -> None:
    a, b = await world.pair(window_bytes=256 * KIB, outbox_bytes=128 * KIB, chunk_bytes=32 * KIB)
    buffer = tensor(1.0, 8 * KIB)
    sent = 0

    async def produce() -> None:
        nonlocal sent
        for n in range(100):
            await a.send("b", ("x", n), buffer)
            sent += 1

    producer = asyncio.create_task(produce())
    before = -1
    while before != sent or not sent:
        before = sent
        await asyncio.sleep(0.05)
    assert 8 <= sent <= 14
    assert b.statistics()["stored_bytes"] <= (256 + 32) * KIB
    for n in range(100):
        assert content(await b.receive("a", ("x", n))) == 1.0
        assert b.statistics()["stored_bytes"] <= (256 + 32) * KIB
    await producer


async def test_what_nobody_awaits_does_not_keep_out_what_somebody_awaits(world: World) -> None:
    # The outbox has room for all of them: here the window is what may keep them out.
    a, b = await world.pair(window_bytes=256 * KIB, outbox_bytes=16 * MIB, chunk_bytes=32 * KIB)
    subscription = b.subscribe("push")
    await a.send("b", ("unasked",), tensor(1.0, MIB))
    await a.send("b", ("asked",), tensor(2.0, MIB))
    await a.send("b", ("push", 1), tensor(3.0, MIB))
    await a.send("b", ("asked",), ValuePayload(4))
    assert content(await b.receive("a", ("asked",))) == 2.0
    assert content((await subscription.get())[2]) == 3.0
    assert (await b.receive("a", ("asked",))).meta == 4
    assert content(await b.receive("a", ("unasked",))) == 1.0


async def test_urgent_messages_overtake(world: World) -> None:
    a, b = await world.pair(chunk_bytes=32 * KIB, inflight_bytes=64 * KIB)
    subscription = b.subscribe("p")
    for n in range(10):
        await a.send("b", ("p", n), tensor(n, 32 * KIB), priority=n)
    order = [(await subscription.get())[1][1] for _ in range(10)]
    assert order == list(range(9, -1, -1))
    for n in range(10):
        await a.send("b", ("p", n), tensor(n, 128 * KIB))
    first = (await subscription.get())[1][1]
    await a.send("b", ("p", 99), tensor(0, 10), priority=5)
    order = [first, *[(await subscription.get())[1][1] for _ in range(10)]]
    assert order.index(99) < 8
    assert [n for n in order if n != 99] == list(range(10))


async def test_the_control_lane_is_not_behind_hundreds_of_megabytes_of_tensors(world: World) -> None:
    a, b = await world.pair(outbox_bytes=500 * MIB)
    buffer = tensor(1.0, 25_000_000 // 4)
    into = tensor(0.0, 25_000_000 // 4)

    async def drain() -> None:
        for n in range(12):
            await b.receive("a", ("x", n), into=into)

    async def echo(caller: str, value: int) -> int:
        return value

    b.serve("echo", echo)
    draining = asyncio.create_task(drain())
    for n in range(12):
        await a.send("b", ("x", n), buffer)
    for n in range(3):
        assert (await a.request("b", "echo", n, timeout=30)).meta == n
    await a.send("b", ("small",), ValuePayload(1))
    await b.receive("a", ("small",))
    assert b.statistics()["bytes_received"] < 270_000_000
    await draining


async def test_requests_are_answered_by_values_tensors_and_errors(world: World) -> None:
    a, b = await world.pair()

    async def add(caller: str, x: int, y: int) -> int:
        return x + y

    async def fetch(caller: str, numel: int) -> Payload:
        return tensor(7.0, numel)

    async def refuse(caller: str) -> None:
        raise PeerLostError("c", f"asked by {caller}")

    async def refuse_plainly(caller: str) -> None:
        raise CheckpointError("nothing there")

    a.serve("add", add)
    a.serve("fetch", fetch)
    a.serve("refuse", refuse)
    a.serve("refuse_plainly", refuse_plainly)
    assert (await b.request("a", "add", 1, 2, timeout=5)).meta == 3
    answers = await asyncio.gather(*(b.request("a", "add", n, 1, timeout=5) for n in range(200)))
    assert [answer.meta for answer in answers] == [n + 1 for n in range(200)]
    assert content(await b.request("a", "fetch", 1_000_000, timeout=5)) == 7.0
    assert (await b.request("a", "add", "x" * 100_000, "y", timeout=5)).meta == "x" * 100_000 + "y"
    with pytest.raises(PeerLostError, match="asked by b") as caught:
        await b.request("a", "refuse", timeout=5)
    assert caught.value.peer == "c"
    with pytest.raises(CheckpointError, match="nothing there"):
        await b.request("a", "refuse_plainly", timeout=5)


async def test_a_handler_that_fails_tells_both_sides(world: World) -> None:
    a, b = await world.pair()
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report))

    async def divide(caller: str, x: int) -> float:
        return 1 / x

    a.serve("divide", divide)
    with pytest.raises(ZmqTrainError, match="ZeroDivisionError"):
        await b.request("a", "divide", 0, timeout=5)
    assert isinstance(reports[0]["exception"], ZeroDivisionError)
    assert (await b.request("a", "divide", 2, timeout=5)).meta == 0.5


async def test_a_request_waits_for_its_method_and_times_out(world: World) -> None:
    a, b = await world.pair()
    early = asyncio.create_task(b.request("a", "late", 1, timeout=5))
    with pytest.raises(PeerTimeoutError, match="'never'") as caught:
        await b.request("a", "never", timeout=0.05)
    assert caught.value.peer == "a"

    async def late(caller: str, x: int) -> int:
        return x

    a.serve("late", late)
    assert (await early).meta == 1


async def test_cancelled_waits_leave_the_endpoint_usable(world: World) -> None:
    a, b = await world.pair(window_bytes=256 * KIB, outbox_bytes=64 * KIB, chunk_bytes=32 * KIB)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await b.receive("a", ("x",))
    await a.send("b", ("x",), ValuePayload(1))
    assert (await b.receive("a", ("x",))).meta == 1

    waiting = asyncio.create_task(b.receive("a", ("y",), into=tensor(0, MIB)))
    await asyncio.sleep(0)
    sending = asyncio.create_task(a.send("b", ("y",), tensor(5.0, MIB)))
    while not b.statistics()["bytes_received"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert content(await b.receive("a", ("y",))) == 5.0
    await sending

    blocked = [asyncio.create_task(a.send("b", ("z", n), tensor(n, 32 * KIB))) for n in range(8)]
    await asyncio.sleep(0.05)
    assert not all(task.done() for task in blocked)
    dropped = [n for n, task in enumerate(blocked) if not task.done() and task.cancel()]
    assert dropped
    results = await asyncio.gather(*blocked, return_exceptions=True)
    for n, result in enumerate(results):
        if not isinstance(result, asyncio.CancelledError):
            assert content(await b.receive("a", ("z", n))) == n
    await a.send("b", ("z", 99), tensor(99))
    assert content(await b.receive("a", ("z", 99))) == 99

    subscription = b.subscribe("s")
    getting = asyncio.create_task(subscription.get())
    await asyncio.sleep(0)
    getting.cancel()
    await a.send("b", ("s",), ValuePayload(1))
    assert (await subscription.get())[2].meta == 1

    async def slow(caller: str) -> int:
        await asyncio.sleep(0.03)
        return 1

    b.serve("slow", slow)
    asking = asyncio.create_task(a.request("b", "slow", timeout=5))
    await asyncio.sleep(0.01)
    asking.cancel()
    assert (await a.request("b", "slow", timeout=5)).meta == 1


async def test_a_message_that_is_there_when_its_receive_is_cancelled_is_kept(world: World) -> None:
    a, b = await world.pair()
    for n in range(20):
        waiting = asyncio.create_task(b.receive("a", ("x",)))
        await asyncio.sleep(0)
        await a.send("b", ("x",), ValuePayload(n))
        for _ in range(n):
            await asyncio.sleep(0.0002)
        waiting.cancel()
        try:
            assert (await waiting).meta == n
        except asyncio.CancelledError:
            assert (await b.receive("a", ("x",))).meta == n


async def test_traffic_is_counted_by_peer(world: World) -> None:
    a, b = await world.pair()
    await a.send("b", ("x",), tensor(1, 5000))
    await b.receive("a", ("x",))
    sent, _ = a.traffic()["b"]
    _, received = b.traffic()["a"]
    assert sent >= 5000
    assert received == sent
    assert a.statistics()["bytes_sent"] == sum(out for out, _ in a.traffic().values())
    assert b.statistics()["bytes_received"] == sum(into for _, into in b.traffic().values())


@pytest.mark.parametrize("seed", range(3))
async def test_dropped_connections_lose_and_repeat_nothing(world: World, seed: int) -> None:
    rng = random.Random(seed)
    random.seed(seed)
    a, b = await world.fragile_pair(chunk_bytes=8 * KIB, inflight_bytes=64 * KIB, window_bytes=256 * KIB, lost_s=20.0)
    count = 150 if isinstance(world, MemoryWorld | SimulatedWorld) else 60  # connecting anew is what takes long over sockets
    received: dict[str, list[object]] = {"a": [], "b": []}

    async def produce(node: Endpoint, to: str) -> None:
        for n in range(count):
            payload = ValuePayload(n) if n % 3 else TensorPayload.of(np.full(rng.randrange(1, 20_000), n), meta=n)
            await node.send(to, ("t", n % 2), payload, priority=n % 2)
            await asyncio.sleep(0)

    async def consume(node: Endpoint, source: str) -> None:
        for n in range(count):
            payload = await node.receive(source, ("t", n % 2))
            if isinstance(payload, TensorPayload):
                assert content(payload) == payload.meta
            received[node.peer].append(payload.meta)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(rng.random() * 0.02)
            world.cut()

    disturbing = asyncio.create_task(disturb())
    await asyncio.gather(produce(a, "b"), produce(b, "a"), consume(a, "b"), consume(b, "a"))
    disturbing.cancel()
    assert received == {"a": list(range(count)), "b": list(range(count))}
    await asyncio.sleep(0.01)
    assert (await _echo(a, b)) == "still here"


async def _echo(a: Endpoint, b: Endpoint) -> object:
    async def echo(caller: str, text: str) -> str:
        return text

    b.serve("echo", echo)
    return (await a.request("b", "echo", "still here", timeout=10)).meta
