"""Acknowledgements that travel with messages, whatever carries them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tests.net.payloads import content, tensor
from tests.net.worlds import World
from zmqtrain.net.link import ACK
from zmqtrain.net.node import Node
from zmqtrain.net.settings import KIB
from zmqtrain.wire.message import Header, decode_header
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

#: Nobody waits for so long.
NEVER_S = 1000.0
PAIR: dict[str, Any] = {"ack_with_bytes": 64 * KIB, "ack_s": NEVER_S, "probe_s": NEVER_S, "flush_s": 0.05}


def alone(node: Node, found: list[Header]) -> None:
    """From now on, write down the acknowledgements that the node sends alone."""
    send = node._transport.send

    def sends(peer: str, lane: int, frames: Any, nbytes: int, header: Header | None = None) -> bool:
        read = decode_header(frames[0])
        if read.kind == ACK:
            found.append(read)
        return send(peer, lane, frames, nbytes, header)

    node._transport.send = sends  # type: ignore[method-assign]


async def to_and_fro(a: Node, b: Node, first: int, rounds: int = 30) -> None:
    for n in range(first, first + rounds):
        await a.send("b", ("x", n), tensor(n))
        assert content(await b.receive("a", ("x", n))) == n
        await b.send("a", ("y", n), tensor(-n))
        assert content(await a.receive("b", ("y", n))) == -n


async def test_what_answers_a_message_acknowledges_it(world: World) -> None:
    a, b = await world.pair(**PAIR)
    await to_and_fro(a, b, 0)
    found: list[Header] = []
    alone(a, found)
    alone(b, found)
    await to_and_fro(a, b, 30)
    assert not found
    assert a.statistics()["inflight_bytes"] == 0  # b's last answer has told
    assert b.statistics()["inflight_bytes"] > 0


async def test_a_long_message_is_acknowledged_at_once(world: World) -> None:
    a, b = await world.pair(**PAIR)
    await to_and_fro(a, b, 0, 1)
    sent = await a.send("b", ("long",), TensorPayload.of(np.ones(20_000)))
    await b.receive("a", ("long",))
    await sent.wait_released()


async def test_acknowledgements_that_are_lost_with_their_message_come_again_with_it(world: World) -> None:
    a, b = await world.fragile_pair(ack_with_bytes=64 * KIB)
    for n in range(3):
        await to_and_fro(a, b, 30 * n)
        world.cut()
    await to_and_fro(a, b, 90)
    await a.finish(timeout=10.0)
    await b.finish(timeout=10.0)


async def test_requests_and_answers_are_acknowledged_by_what_follows(world: World) -> None:
    a, b = await world.pair(probe_s=NEVER_S, probe_later_s=NEVER_S, ack_s=0.0)
    b.serve("add", _add)
    assert (await a.request("b", "add", 1, timeout=10.0)).meta == 2
    found: list[Header] = []
    alone(a, found)
    alone(b, found)
    for n in range(30):
        assert (await a.request("b", "add", n, timeout=10.0)).meta == n + 1
    assert not found
    assert a.statistics()["inflight_bytes"] == 0  # the answer has told
    assert b.statistics()["inflight_bytes"] > 0  # no request has followed the last answer
    await b.finish(timeout=10.0)  # which asks
    assert b.statistics()["inflight_bytes"] == 0


async def test_what_is_sent_between_requests_is_acknowledged_as_ever(world: World) -> None:
    a, b = await world.pair(probe_s=NEVER_S, probe_later_s=NEVER_S)
    b.serve("add", _add)
    await a.request("b", "add", 1, timeout=10.0)
    sent = await a.send("b", ("x",), tensor(1))
    await sent.wait_released()
    value = await b.send("a", ("y",), ValuePayload(1))  # on the lane on which an answer is not acknowledged yet
    await value.wait_released()


async def test_requests_that_are_lost_come_again(world: World) -> None:
    a, b = await world.fragile_pair(probe_later_s=NEVER_S)
    b.serve("add", _add)
    for n in range(3):
        assert (await a.request("b", "add", n, timeout=10.0)).meta == n + 1
        asking = asyncio.ensure_future(a.request("b", "add", n, timeout=10.0))
        await asyncio.sleep(0)
        world.cut()
        assert (await asking).meta == n + 1
    await a.finish(timeout=10.0)
    await b.finish(timeout=10.0)


async def test_a_process_shows_that_it_is_there(world: World) -> None:
    a, b = await world.pair(probe_s=NEVER_S)
    assert b.heard_at("a") is None
    a.show("b")  # in vain: there is no link
    b.serve("add", _add)
    await a.request("b", "add", 1, timeout=10.0)
    before, received = b.heard_at("a"), b.statistics()["messages_received"]
    assert before is not None
    while b.heard_at("a") == before:
        a.show("b")
        await asyncio.sleep(0.001)
    assert b.statistics()["messages_received"] == received


async def test_small_messages_may_be_taken_in_portions(world: World) -> None:
    a = await world.open("a")
    b = await world.open("b", pause_s=0.005)
    world.introduce(a, b)
    b.serve("add", _add)
    for n in range(3):
        assert (await a.request("b", "add", n, timeout=10.0)).meta == n + 1
    answers = await asyncio.gather(*(a.request("b", "add", n, timeout=10.0) for n in range(200)))
    assert [answer.meta for answer in answers] == list(range(1, 201))


async def _add(_caller: str, number: int) -> int:
    return number + 1
