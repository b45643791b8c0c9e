"""Who is not let in, what is not listened to, and that everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time

import numpy as np
import pytest
import zmq

from tests.net.worlds import FAST, World, ZeroMQWorld, opened
from tests.patience import PATIENCE_S
from zmqtrain.errors import ProtocolError, RunTokenError, VersionMismatchError, WireError
from zmqtrain.net.address import split_address
from zmqtrain.net.greeting import Hello, decode_greeting, encode_greeting
from zmqtrain.net.node import Node
from zmqtrain.net.outbox import CONTROL
from zmqtrain.net.password import Password
from zmqtrain.net.switchboard import route_of
from zmqtrain.wire.message import WIRE_VERSION, Header, encode_header
from zmqtrain.wire.tensor import TensorPayload


def tensor(value: float, numel: int = 1000) -> TensorPayload:
    return TensorPayload.of(np.full(numel, value, np.float32))


async def served(*nodes: Node) -> None:
    """The nodes still serve each other."""
    a, b = nodes
    await a.send(b.peer, ("good",), tensor(1.0))
    await b.receive(a.peer, ("good",))


async def test_another_run_s_token(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a = await world.open("a")
    b = await world.open("b", token="another")
    world.introduce(a, b)
    with pytest.raises(RunTokenError, match="another run token") as raised:
        await b.request("a", "anything", timeout=5.0)
    assert "another run" in str(raised.value)
    assert "secret" not in str(raised.value)  # the token is not told
    assert a.statistics()["refused"] + a.statistics()["intruders"] >= 1  # over sockets in the handshake already
    assert any("a refuses b" in message or "b is not admitted by a" in message for message in caplog.messages)
    assert "secret" not in caplog.text


async def test_a_greeting_that_names_no_address_is_ignored(world: World) -> None:
    a, c = await world.open("a"), await world.open("c")
    world.introduce(a, c)
    transport, _ = await world.stranger("b")
    session = 12345
    transport.connect("a", a.address, route_of("b", session))
    hello = Hello("b", "a", "smmulated://b", FAST.token, 7, session, 0, False, 1 << 20, 1 << 20)
    async with asyncio.timeout(PATIENCE_S):
        while not a.statistics()["garbage"] + a.statistics()["refused"]:
            transport.send("a", CONTROL, encode_greeting(hello), 0)
            await asyncio.sleep(0.01)
    await served(c, a)
    await transport.close()


async def test_another_wire_version(world: World) -> None:
    """The peer is of a future release: what it hears from us is a refusal that names both versions, and we know it as well."""
    a = await world.open("a")
    transport, recorder = await world.stranger("b")
    a.add_peer("b", transport.address)
    session = 12345
    transport.connect("a", a.address, route_of("b", session))
    hello = Hello("b", "a", transport.address, FAST.token, 7, session, 0, False, 1 << 20, 1 << 20, version=WIRE_VERSION + 1)
    waiting = asyncio.create_task(a.receive("b", ("x",)))
    async with asyncio.timeout(5.0):
        while not waiting.done():
            transport.send("a", CONTROL, encode_greeting(hello), 0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.shield(asyncio.wait([waiting]))
        with pytest.raises(VersionMismatchError, match=rf"wire version {WIRE_VERSION + 1}, this process speaks {WIRE_VERSION}"):
            await waiting
        while True:
            _, _, frames = await recorder.messages.get()
            told = decode_greeting(frames)
            if not isinstance(told, Hello):
                break
    assert told.code == "version"
    assert told.reason.startswith(f"wire version {WIRE_VERSION + 1} meets {WIRE_VERSION}")


@contextlib.asynccontextmanager
async def pair() -> object:
    async with opened(ZeroMQWorld) as world:
        yield await world.pair()


def ports(node: Node) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in split_address(node.address)]


async def test_garbage_bytes_on_both_ports() -> None:
    chance = random.Random(1)
    async with pair() as (a, b):
        await served(a, b)
        for port in ports(b):
            for size in (1, 10, 64, 5000):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(ConnectionError):
                    writer.write(chance.randbytes(size))
                    await writer.drain()
                writer.transport.abort()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await served(a, b)
            writer.transport.abort()
        await served(a, b)
        await served(b, a)


async def test_garbage_in_messages_of_strangers(caplog: pytest.LogCaptureFixture) -> None:
    huge = Header("tensor", ("x",), dtype="float32", shape=(1,), nbytes=4)
    declared = encode_header(huge).replace(b"\x04\x00\x90", b"\xcf" + (1 << 60).to_bytes(8) + b"\x00\x90")
    junk = [[b""], [b"junk"], [os.urandom(100)] * 5, [b"x" * 100_000, b"y"], [declared, b""], [encode_header(huge)[:-3], b"1234"]]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with pair() as (a, b):
        await served(a, b)
        before = b.statistics()["garbage"]
        sockets = []
        for port in ports(b):
            for frames in junk:
                socket = context.socket(zmq.DEALER)
                sockets.append(socket)
                socket.setsockopt(zmq.LINGER, 0)
                Password(FAST.token).arm(socket)
                socket.connect(f"tcp://127.0.0.1:{port}")
                for _ in range(3):
                    socket.send_multipart(frames)
        async with asyncio.timeout(10.0):
            while b.statistics()["garbage"] < before + len(junk):
                await served(a, b)
        await served(b, a)
        for socket in sockets:
            socket.close()
    context.term()
    assert sum("none of zmqtrain's" in message for message in caplog.messages) == 1, "one line about all"


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN"])
async def test_a_stranger_without_the_token_gets_no_further_than_the_handshake(
    mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a message that it never ends is kept, on any lane; what it costs is one line."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with pair() as (a, b):
        await served(a, b)
        before = b.statistics()
        sockets: list[zmq.Socket[bytes]] = []

        def call(port: int, number: int) -> None:
            socket = context.socket(zmq.DEALER)
            sockets.append(socket)
            socket.setsockopt(zmq.LINGER, 0)
            if mechanism == "PLAIN":
                Password(f"another token {number}").arm(socket)
            socket.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):  # it has been refused already
                for _ in range(1000):  # the parts of a message that has no end
                    socket.send(bytes(1000), zmq.NOBLOCK | zmq.SNDMORE)

        for port in ports(b):
            for number in range(3):
                call(port, number)
        # A caller with another mechanism sees that itself, too. One that hangs up before it was read is no intruder.
        least = len(sockets) if mechanism == "PLAIN" else 1
        again = time.monotonic() + 1.0
        async with asyncio.timeout(PATIENCE_S):
            while b.statistics()["intruders"] < before["intruders"] + least:
                await served(a, b)
                if mechanism == "NULL" and time.monotonic() > again:
                    call(ports(b)[0], len(sockets))
                    again += 1.0
        await served(b, a)
        after = b.statistics()
        assert (after["garbage"], after["stray"]) == (before["garbage"], before["stray"])
        for socket in sockets:
            socket.close()
    context.term()
    assert sum("without the run's token" in message for message in caplog.messages) == 1


async def test_a_known_peer_that_sends_a_bad_message(world: World) -> None:
    """Its link is closed with the reason, on both sides; the other links live."""
    a, b = await world.pair()
    c = await world.open("c")
    world.introduce(a, b, c)
    await served(a, b)
    await served(c, b)
    waiting = asyncio.create_task(b.receive("a", ("never",)))
    told = asyncio.create_task(a.receive("b", ("never",)))
    await asyncio.sleep(0)
    a._transport.send("b", CONTROL, [b"no header at all"], 0)
    async with asyncio.timeout(5.0):
        with pytest.raises(WireError, match="closed"):
            await waiting
        with pytest.raises(WireError, match="b reports"):
            await told
    await served(c, b)
    await served(b, c)


async def test_nothing_is_left_open() -> None:
    import psutil

    process = psutil.Process()
    async with opened(ZeroMQWorld) as world:  # the shared context and its threads
        await served(*await world.pair())
    before = process.num_fds()
    for _ in range(10):
        async with opened(ZeroMQWorld) as world:
            a, _b = await world.pair(flush_s=0.05)
            pending = asyncio.create_task(a.receive("b", ("never",)))
            await a.send("b", ("unread",), tensor(1.0, 1_000_000))
        with pytest.raises(Exception, match="closed"):
            await pending
    assert process.num_fds() <= before + 1
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


async def test_a_request_with_other_arguments_is_refused_in_a_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a, b = await world.pair()

    async def twice(_caller: str, number: int) -> int:
        return 2 * number

    b.serve("twice", twice)
    assert (await a.request("b", "twice", 2, timeout=5.0)).meta == 4
    for wrong in ((), (1, 2), (1, 2, 3)):
        with pytest.raises(ProtocolError, match=f"'twice' does not take {len(wrong)} arguments"):
            await a.request("b", "twice", *wrong, timeout=5.0)
    assert (await a.request("b", "twice", 2, timeout=5.0)).meta == 4
    await b.close()
    assert [message for message in caplog.messages if "not taken" in message] == [
        "b: 3 messages from a not taken: 3 requests with other arguments than the method takes. The run is not affected"
    ]
