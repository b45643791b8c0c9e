"""Endpoints that start in any order, close, vanish and come back, whatever carries them."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.net.payloads import content, tensor
from tests.net.worlds import PacedWorld, World
from zmqtrain.errors import PeerLostError, PeerTimeoutError, ZmqTrainError
from zmqtrain.net.settings import KIB, MIB
from zmqtrain.wire.value import ValuePayload


async def test_close_delivers_what_was_sent_and_ends_all_waits(world: World) -> None:
    a, b = await world.pair()
    losses: list[tuple[str, str]] = []
    b.on_lost(lambda peer, reason: losses.append((peer, reason)))
    waits = [
        asyncio.create_task(a.receive("b", ("never",))),
        asyncio.create_task(a.request("b", "never", timeout=5)),
        asyncio.create_task(a.subscribe("never").get()),
    ]
    waiting = asyncio.create_task(b.receive("a", ("never",)))
    for n in range(50):
        await a.send("b", ("x", n), tensor(n, 20_000))
    await a.close()
    await a.close()
    for wait in waits:
        with pytest.raises(ZmqTrainError, match="closed"):
            await wait
    with pytest.raises(ZmqTrainError, match="closed"):
        await a.send("b", ("x",), tensor(1))
    with pytest.raises(PeerLostError, match="closed its endpoint"):
        await waiting
    assert [peer for peer, _ in losses] == ["a"]
    for n in range(50):
        assert content(await b.receive("a", ("x", n))) == n
    with pytest.raises(PeerLostError, match="closed its endpoint"):
        await b.receive("a", ("y",))
    with pytest.raises(PeerLostError, match="closed its endpoint"):
        await b.send("a", ("y",), tensor(1))


async def test_who_has_finished_is_no_loss(world: World) -> None:
    a, b = await world.pair()
    losses: list[str] = []
    b.on_lost(lambda peer, _: losses.append(peer))
    waiting = asyncio.create_task(b.receive("a", ("never",)))
    for n in range(5):
        await a.send("b", ("x", n), tensor(n, 20_000))
    await a.finish(timeout=5.0)
    assert a.statistics()["inflight_bytes"] == 0
    await a.close()
    with pytest.raises(PeerLostError, match="has finished"):
        await waiting  # who waits for it all the same must know
    with pytest.raises(PeerLostError, match="has finished"):
        await b.send("a", ("y",), tensor(1))
    for n in range(5):
        assert content(await b.receive("a", ("x", n))) == n
    assert losses == []


async def test_who_finishes_does_not_wait_for_one_that_has_left_although_its_farewell_was_lost(world: World) -> None:
    a, b = await world.pair()
    losses: list[str] = []
    a.on_lost(lambda peer, _: losses.append(peer))
    assert a.undelivered() == []
    await a.send("c", ("x",), tensor(1, 100))  # from whom nothing has been heard
    await a.send("b", ("x",), tensor(1, 100))
    finishing = asyncio.create_task(a.finish(timeout=60.0))
    assert content(await b.receive("a", ("x",))) == 1
    assert "c" in a.undelivered()
    assert not finishing.done()
    a.let_go("c")
    a.let_go("nobody")
    await finishing
    with pytest.raises(PeerLostError, match="has finished"):
        await a.send("c", ("x",), tensor(1, 100))
    assert losses == []


async def test_to_finish_does_not_wait_for_room(world: World) -> None:
    """Nobody asks for the message, so that it could last for ever."""
    a, b = await world.pair(window_bytes=64 * KIB, flush_s=0.05)
    await a.send("b", ("x",), tensor(1, 60_000))
    await a.send("b", ("x",), tensor(2, 1_000_000))
    await a.finish(timeout=5.0)
    assert a.statistics()["queued_bytes"] > 0
    assert content(await b.receive("a", ("x",))) == 1


async def test_what_a_peer_has_received_has_arrived_also_if_it_closes_at_once(world: World) -> None:
    a, b = await world.pair()
    handles = [await a.send("b", ("x",), tensor(n, 20_000)) for n in range(3)]
    for _ in range(3):
        await b.receive("a", ("x",))
    await b.close()
    for handle in handles:
        await handle.wait_released()
        assert handle.released


async def test_a_peer_that_vanishes_ends_every_wait_for_it(world: World) -> None:
    a, b = await world.pair(window_bytes=64 * KIB, outbox_bytes=64 * KIB)
    c = await world.open("c")
    world.introduce(a, c)
    await a.send("b", ("x",), ValuePayload(1))
    await b.receive("a", ("x",))
    losses: list[str] = []
    a.on_lost(lambda peer, reason: losses.append(peer))
    sent = await a.send("b", ("unread",), tensor(1, 10 * KIB))
    await sent.wait_released()
    waits = {
        "message ('gradient', 7)": asyncio.create_task(a.receive("b", ("gradient", 7))),
        "answer to 'status'": asyncio.create_task(a.request("b", "status", timeout=20)),
        "arrival of": asyncio.create_task((await a.send("b", ("big",), tensor(1, MIB))).wait_released()),
        "room for": asyncio.create_task(a.send("b", ("more",), tensor(1, MIB))),
    }
    await asyncio.sleep(0.05)
    await world.kill(b)
    for what, wait in waits.items():
        with pytest.raises(PeerLostError, match="lost b") as caught:
            await wait
        assert what in str(caught.value)
    assert losses == ["b"]
    await c.send("a", ("x",), ValuePayload(2))
    assert (await a.receive("c", ("x",))).meta == 2


async def test_a_process_that_has_ended_is_lost_soon_where_none_takes_its_place(world: World) -> None:
    if world.name == "simulated":
        pytest.skip("a simulated host never says that nobody listens")
    a, b = await world.pair(lost_s=20.0, gone_s=0.05)
    await b.send("a", ("x",), ValuePayload(1))
    waiting = asyncio.create_task(a.receive("b", ("never",)))
    assert (await a.receive("b", ("x",))).meta == 1
    await world.kill(b)
    with pytest.raises(PeerLostError, match=r"lost b while waiting for .*never.*: its process has ended: nobody listens any more"):
        await waiting


async def test_a_broken_connection_is_no_loss_while_somebody_listens(world: World) -> None:
    if isinstance(world, PacedWorld):
        pytest.skip("its connections are those of the network below")
    a, b = await world.fragile_pair(lost_s=20.0, gone_s=0.0)
    for n in range(20):
        receiving = asyncio.create_task(a.receive("b", ("x",)))
        await b.send("a", ("x",), ValuePayload(n))
        world.cut()
        assert (await receiving).meta == n


async def test_who_leaves_in_good_order_is_not_taken_for_one_that_has_ended(world: World) -> None:
    a, b = await world.pair(lost_s=20.0, gone_s=2.0)
    losses: list[str] = []
    a.on_lost(lambda peer, _: losses.append(peer))
    await b.send("a", ("x",), tensor(1, 100_000))
    waiting = asyncio.create_task(a.receive("b", ("never",)))
    receiving = asyncio.create_task(a.receive("b", ("x",)))
    await b.finish(timeout=5.0)
    await b.close()
    with pytest.raises(PeerLostError, match="has finished"):
        await waiting
    assert content(await receiving) == 1
    assert losses == []


async def test_forget_ends_the_waits_at_once(world: World) -> None:
    a, b = await world.pair()
    await a.send("b", ("x",), ValuePayload(1))
    await b.receive("a", ("x",))
    waiting = asyncio.create_task(a.receive("b", ("y",)))
    theirs = asyncio.create_task(b.receive("a", ("y",)))
    await asyncio.sleep(0)
    a.forget("b", "its host is gone")
    with pytest.raises(PeerLostError, match="its host is gone"):
        await waiting
    with pytest.raises(PeerLostError, match="its host is gone"):
        await a.send("b", ("x",), ValuePayload(1))
    with pytest.raises(PeerLostError, match="given up on this process"):
        await theirs


async def test_a_process_that_is_lost_does_not_take_the_next_one_of_its_name_with_it(world: World) -> None:
    """The next one has greeted before its predecessor's loss becomes known."""
    a, b = await world.pair(lost_s=20.0)
    first = b.process
    await world.kill(b)
    b = await world.open("b", lost_s=20.0)
    world.introduce(a, b)
    await b.send("a", ("new",), ValuePayload(1))
    assert (await a.receive("b", ("new",))).meta == 1
    waiting = asyncio.create_task(a.receive("b", ("x",)))
    asking = asyncio.create_task(a.request("b", "never", timeout=60))
    await asyncio.sleep(0)
    losses: list[str] = []
    a.on_lost(lambda peer, _: losses.append(peer))
    a.forget("b", "its host is gone", process=first)
    for wait in (waiting, asking):  # they may be for the one that is lost
        with pytest.raises(PeerLostError, match="its host is gone"):
            await wait
    assert losses == ["b"]
    await a.send("b", ("y",), ValuePayload(2))
    assert (await b.receive("a", ("y",))).meta == 2
    await b.send("a", ("x",), ValuePayload(3))
    assert (await a.receive("b", ("x",))).meta == 3
    a.forget("b", "it is gone, too", process=b.process)
    with pytest.raises(PeerLostError, match="it is gone, too"):
        await a.send("b", ("y",), ValuePayload(4))


async def test_a_restarted_peer_is_another_one(world: World) -> None:
    a, b = await world.pair(lost_s=20.0)
    await b.send("a", ("old",), ValuePayload(1))
    await b.send("a", ("stale",), ValuePayload(1))
    assert (await a.receive("b", ("old",))).meta == 1
    waiting = asyncio.create_task(a.receive("b", ("x",)))
    await asyncio.sleep(0)
    await world.kill(b)
    b = await world.open("b", lost_s=20.0)
    world.introduce(a, b)
    await b.send("a", ("new",), ValuePayload(2))
    with pytest.raises(PeerLostError, match="restarted"):
        await waiting
    assert (await a.receive("b", ("new",))).meta == 2
    await a.send("b", ("back",), ValuePayload(3))
    assert (await b.receive("a", ("back",))).meta == 3
    fresh = asyncio.create_task(a.receive("b", ("stale",)))
    await b.send("a", ("stale",), ValuePayload(5))
    assert (await fresh).meta == 5


async def test_both_find_each_other_again_after_each_gave_the_other_up(world: World) -> None:
    a, b = await world.pair()
    await a.send("b", ("x",), ValuePayload(1))
    await b.receive("a", ("x",))
    a.forget("b", "a test")
    b.forget("a", "a test")
    world.introduce(a, b)
    await a.send("b", ("x",), ValuePayload(2))
    assert (await b.receive("a", ("x",))).meta == 2


@pytest.mark.parametrize("seed", range(3))
async def test_nodes_may_start_in_any_order(world: World, seed: int) -> None:
    rng = random.Random(seed)
    peers = [f"worker/{n}" for n in range(5)]
    delays = {peer: rng.random() * 0.1 for peer in peers}
    addresses: dict[str, asyncio.Future[str]] = {peer: asyncio.get_running_loop().create_future() for peer in peers}

    async def role(peer: str) -> int:
        await asyncio.sleep(delays[peer])
        node = await world.open(peer)
        addresses[peer].set_result(node.address)
        others = [other for other in peers if other != peer]
        for other in others:
            node.add_peer(other, await addresses[other])
            await node.send(other, ("hello",), ValuePayload(peer))
        return len([await node.receive(other, ("hello",)) for other in others])

    assert await asyncio.gather(*(role(peer) for peer in peers)) == [4] * 5


async def test_only_one_side_needs_to_know_the_other(world: World) -> None:
    a, b = await world.open("a"), await world.open("b")
    waiting = asyncio.create_task(b.receive("a", ("x",)))
    early = asyncio.create_task(b.send("a", ("y",), ValuePayload(2)))
    await asyncio.sleep(0)
    a.add_peer("b", b.address)
    await a.send("b", ("x",), ValuePayload(1))
    assert (await waiting).meta == 1
    assert (await a.receive("b", ("y",))).meta == 2
    await early


async def test_a_peer_that_never_comes(world: World) -> None:
    a = await world.open("a", greet_s=0.1, flush_s=0.1)
    if world.name == "zeromq":
        a.add_peer("b", "tcp://127.0.0.1:1,1")
    waits = [asyncio.create_task(a.receive("b", ("x",))), asyncio.create_task(a.request("b", "x", timeout=5))]
    for wait in waits:
        with pytest.raises(PeerTimeoutError, match=r"b \(.*timeout"):
            await wait
    with pytest.raises(PeerTimeoutError):
        await a.send("b", ("x",), ValuePayload(1))


async def test_a_request_to_a_peer_that_was_never_connected_says_so(world: World) -> None:
    a, b = await world.pair()
    with pytest.raises(PeerTimeoutError, match=r"^c did not .* 'x': no connection to it was made \((at|whose)") as caught:
        await a.request("c", "x", timeout=0.05)
    assert caught.value.peer == "c"
    b.serve("known", lambda caller: asyncio.sleep(0))
    await a.request("b", "known", timeout=5)
    with pytest.raises(PeerTimeoutError) as caught:
        await a.request("b", "x", timeout=0.05)
    assert "no connection" not in str(caught.value)
