"""Acknowledgements that travel with messages, whatever carries them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.net.payloads import content, tensor
from tests.net.worlds import World
from zmqtrain.net.link import ACK
from zmqtrain.net.node import Node
from zmqtrain.net.settings import KIB
from zmqtrain.wire.message import Header, decode_header
from zmqtrain.wire.tensor import TensorPayload

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
