"""Who is let in where connections are encrypted, by key; and what is told of those who are not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket as sockets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.net.worlds import FAST
from tests.patience import PATIENCE_S
from zmqtrain.errors import PeerTimeoutError, RunTokenError, UsageError
from zmqtrain.net.address import key_in, split_address, with_key, without_key
from zmqtrain.net.curve import ANYBODY, Identity, KeyPair
from zmqtrain.net.node import Node
from zmqtrain.net.outbox import CONTROL
from zmqtrain.net.switchboard import route_of
from zmqtrain.net.trouble import INTRUDERS_PAUSE_S, MAX_ORIGINS, USUAL_S, Intruders, Intrusion, Trouble, Troubles
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.wire.tensor import TensorPayload

TOKEN = "a token that nobody guesses"
#: Raw sockets: what somebody may do who speaks ZeroMQ.
Stranger = Callable[..., "zmq.Socket[bytes]"]


class Nodes:
    """Encrypted endpoints with one coordinator."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    async def open(self, peer: str, identity: Identity | None, **changes: object) -> Node:
        settings = replace(FAST, token=TOKEN, greet_s=2.5, identity=identity, **changes)  # type: ignore[arg-type]
        self.nodes.append(await open_zeromq(peer, settings=settings))
        return self.nodes[-1]

    async def coordinator(self) -> Node:
        return await self.open("coordinator", Identity.coordinator(TOKEN))

    async def member(self, peer: str, coordinator: Node, token: str = TOKEN) -> Node:
        key = key_in(coordinator.address)
        assert key is not None
        node = await self.open(peer, Identity.member(token, key))
        node.add_peer("coordinator", coordinator.address)
        return node


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes.nodes))


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []

    def make(address: str, key: bytes | None = None, pair: KeyPair | None = None, route: bytes = b"") -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        if key is not None:
            mine = pair or KeyPair.new()
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, mine.secret)
        if route:
            socket.setsockopt(zmq.ROUTING_ID, route)
        socket.connect(split_address(address)[CONTROL])
        return socket

    yield make
    for socket in sockets:
        socket.close()
    context.term()


def identity_of(node: Node) -> Identity:
    assert node.settings.identity is not None
    return node.settings.identity


async def answers(node: Node, caller: Node) -> None:
    """The node answers the caller's requests."""

    async def echo(_caller: str, value: int) -> int:
        return value

    node.serve("echo", echo)
    assert (await caller.request(node.peer, "echo", 7, timeout=5.0)).meta == 7


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 - what is counted tells nobody
            await asyncio.sleep(0.005)


def log_of(caplog: pytest.LogCaptureFixture, peer: str) -> str:
    return "\n".join(message for message in caplog.messages if message.startswith(peer))


# Keys -------------------------------------------------------------------------------------------------------------------------


def test_key_pairs() -> None:
    one, other = KeyPair.new(), KeyPair.new()
    assert len(one.public) == len(one.secret) == 32
    assert len({one.public, other.public, one.secret, other.secret}) == 4
    assert repr(one.secret) not in repr(one)
    assert one.secret.hex() not in repr(one)
    assert KeyPair.of_token("t") == KeyPair.of_token("t") != KeyPair.of_token("u")
    with pytest.raises(UsageError, match="needs a token"):
        KeyPair.of_token("")


def test_a_zeromq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(UsageError, match=r"lacks libsodium.*transport_encryption"):
        KeyPair.new()


@given(st.binary(min_size=32, max_size=32), st.sampled_from(["tcp://10.0.0.1:1,2", "tcp://[fe80::1%eth0]:40001,40002"]))
def test_addresses_with_keys(key: bytes, address: str) -> None:
    whole = with_key(address, key)
    assert (key_in(whole), without_key(whole), split_address(whole)) == (key, address, split_address(address))
    assert key_in(address) is None


@pytest.mark.parametrize("bad", ["tcp://a:1,2#", "tcp://a:1,2#00", "tcp://a:1,2#" + "g" * 64, "tcp://a:1,2#" + "0" * 66])
def test_addresses_with_bad_keys(bad: str) -> None:
    with pytest.raises(ValueError, match="an invalid key"):
        key_in(bad)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 3)))),
    st.booleans(),
)
def test_the_list_is_what_was_said_last(said: list[tuple[str, int | None]], central: bool) -> None:
    """By any sequence of admissions and dismissals: a key opens to one name at most, and a name has one key at most."""
    keys = [bytes([number]) * 32 for number in range(4)]
    identity = Identity.coordinator("t") if central else Identity()
    expected: dict[str, bytes] = {}
    for peer, number in said:
        expected.pop(peer, None)
        if number is None:
            identity.dismiss(peer)
        else:
            identity.admit(peer, with_key("tcp://10.0.0.1:1,2", keys[number]))
            if keys[number] not in expected.values():
                expected[peer] = keys[number]
    for key in keys:
        names = [peer for peer, one in expected.items() if one == key]
        assert identity.name_of(key) == (names[0] if names else None)
    for peer in "abc":
        for key in keys:
            stated = with_key("tcp://10.0.0.2:3,4", key)
            is_known = expected.get(peer) == key
            assert identity.believes(peer, stated) == (is_known or (central and key not in expected.values()))
    assert identity.name_of(KeyPair.of_token("t").public) == (ANYBODY if central else None)


def test_whose_word_is_not_taken() -> None:
    identity = Identity.coordinator("t")
    own = with_key("tcp://10.0.0.1:1,2", KeyPair.new().public)
    assert identity.believes("a", own)
    assert not identity.believes("a", without_key(own))
    assert not identity.believes("a", own[:-1])
    assert not identity.believes("a", own.replace("tcp", "udp"))
    assert not identity.believes("a", with_key("tcp://10.0.0.1:1,2", KeyPair.of_token("t").public))  # would shut out all others
    with pytest.raises(ValueError, match="does not encrypt"):
        identity.admit("a", without_key(own))
    assert identity.may_be("a", route_of("a", 3))
    assert identity.may_be(ANYBODY, route_of("a", 3))
    assert identity.may_be("a", b"\0abcd")
    assert not identity.may_be("a", route_of("b", 3))
    assert not identity.may_be("a", b"a")


# Joining ----------------------------------------------------------------------------------------------------------------------


async def test_the_token_lets_in_at_the_coordinator_alone() -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        a, b = await nodes.member("a", centre), await nodes.member("b", centre)
        for member in (a, b):
            await answers(centre, member)
            await answers(member, centre)  # which calls them on their word, once they have come
        a.add_peer("b", b.address)
        b.add_peer("a", a.address)
        await answers(a, b)
        await answers(b, a)
        whole = TensorPayload.of(np.arange(500_000, dtype=np.float32))
        await a.send("b", ("tensor",), whole)
        assert (await b.receive("a", ("tensor",))).frames() == whole.frames()
        assert [node.statistics()["intruders"] for node in nodes.nodes] == [0, 0, 0]


async def test_another_run_s_token(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        member = await nodes.member("a", centre, token="another token")
        before = asyncio.get_running_loop().time()
        with pytest.raises(RunTokenError, match="another run token"):
            await member.request("coordinator", "anything", timeout=5.0)
        assert asyncio.get_running_loop().time() < before + 1.0  # at once, not when time is up
        await until(lambda: centre.statistics()["intruders"] == 1)
        await answers(centre, await nodes.member("b", centre))
    assert "1 connection from 127.0.0.1 not admitted: 1 with a key that is not on the list" in log_of(caplog, "coordinator")
    assert "has another run token" in log_of(caplog, "a ")


async def test_a_wrong_key_for_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        wrong = KeyPair.new().public
        member = await nodes.open("a", Identity.member(TOKEN, wrong))
        member.add_peer("coordinator", with_key(without_key(centre.address), wrong))
        with pytest.raises(PeerTimeoutError, match=r"aborts the handshake.*ZMQTRAIN_COORDINATOR"):
            await member.request("coordinator", "anything", timeout=5.0)
    assert "for a process with another key" in log_of(caplog, "coordinator")
    assert "keeps trying: it aborts the handshake" in log_of(caplog, "a ")
    assert caplog.text.count("keeps trying") == 1  # of many attempts


async def test_in_plain_text(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        member = await nodes.open("a", None)
        member.add_peer("coordinator", without_key(centre.address))
        with pytest.raises(PeerTimeoutError, match="accepts only encrypted connections"):
            await member.request("coordinator", "anything", timeout=5.0)
        assert centre.statistics()["intruders"] >= 3
        assert centre.statistics()["messages_received"] == 0
        async with asyncio.timeout(PATIENCE_S):
            while "accepts only encrypted connections" not in log_of(caplog, "a "):  # noqa: ASYNC110 - logs have no event
                await asyncio.sleep(0.01)
    assert "in plain text" in log_of(caplog, "coordinator")


async def test_who_must_encrypt_says_nothing_in_plain_text(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        plain = await nodes.open("coordinator", None)
        key = KeyPair.new().public
        member = await nodes.open("a", Identity.member(TOKEN, key))
        member.add_peer("coordinator", with_key(plain.address, key))
        # Either end may find that their mechanisms differ. If the other one does first, all that is seen is that it closes.
        said = "uses plain text, but this run is encrypted|aborts the handshake: another process is at its address"
        with pytest.raises(PeerTimeoutError, match=said):
            await member.request("coordinator", "anything", timeout=5.0)
        assert plain.statistics()["garbage"] == plain.statistics()["refused"] == 0
        with pytest.raises(ValueError, match="has no key"):
            member.add_peer("b", plain.address)
        plain.add_peer("a", member.address)
        with pytest.raises(ValueError, match="encrypts, but this one does not"):
            await plain.request("a", "anything", timeout=1.0)


async def test_a_member_that_is_not_on_the_list_yet(caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator has told one before the other: its link comes about as soon as the other hears, without a word."""
    async with opened() as nodes:
        centre = await nodes.coordinator()
        a, b = await nodes.member("a", centre), await nodes.member("b", centre)
        a.add_peer("b", b.address)
        asked = asyncio.create_task(answers(b, a))
        await asyncio.sleep(0.15)
        assert not asked.done()
        b.add_peer("a", a.address)
        await asked
        assert not caplog.messages


async def test_a_member_that_is_dismissed(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        a, b = await nodes.member("a", centre), await nodes.member("b", centre)
        a.add_peer("b", b.address)
        b.add_peer("a", a.address)
        await answers(b, a)
        b.forget("a", "the coordinator says so")
        a.forget("b", "to begin anew")
        a.add_peer("b", b.address)
        with pytest.raises(PeerTimeoutError, match="this process's key is not on its list"):
            await a.request("b", "echo", 1, timeout=5.0)
        assert b.statistics()["intruders"] >= 1
        b.add_peer("a", a.address)
        a.add_peer("b", with_key("tcp://127.0.0.1:1,1", identity_of(b).public))  # so that the next is news
        a.add_peer("b", b.address)
        await answers(b, a)
    assert "with a key that is not on the list" in log_of(caplog, "b")


@pytest.mark.parametrize("seed", range(8))
async def test_joining_in_any_order(seed: int) -> None:
    """Members come, and hear of each other, in any order and at any time, while all want something of each other at once."""
    chance = random.Random(seed)
    names = ["a", "b", "c", "d"]
    async with opened() as nodes:
        centre = await nodes.coordinator()
        members = [await nodes.member(name, centre) for name in chance.sample(names, len(names))]

        async def hears(one: Node, other: Node) -> None:
            await asyncio.sleep(chance.random() * 0.2)
            one.add_peer(other.peer, other.address)

        async def works(one: Node) -> None:
            await asyncio.sleep(chance.random() * 0.1)
            others = [other.peer for other in members if other is not one]
            await asyncio.gather(*(one.send(other, ("hello",), TensorPayload.of(np.ones(3, np.float32))) for other in others))
            await asyncio.gather(*(one.receive(other, ("hello",)) for other in others))
            await answers(centre, one)

        async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
            for one in members:
                group.create_task(works(one))
                for other in members:
                    if other is not one:
                        group.create_task(hears(one, other))


# Strangers --------------------------------------------------------------------------------------------------------------------


async def test_a_listed_key_under_another_s_name(stranger: Stranger, caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        b = await nodes.member("b", centre)
        pair = KeyPair.new()
        b.add_peer("a", with_key("tcp://127.0.0.1:1,1", pair.public))
        false, true = route_of("c", 5), route_of("a", 6)
        for route in (false, true):
            stranger(b.address, identity_of(b).public, pair, route).send(b"whatever")
        await until(lambda: b.statistics()["intruders"] == 1 and b.statistics()["garbage"] == 1)
    assert "1 under another member's name" in log_of(caplog, "b")


async def test_strangers_of_all_kinds(stranger: Stranger, caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as nodes:
        centre = await nodes.coordinator()
        a = await nodes.member("a", centre)
        await answers(centre, a)
        ports = [int(part.rpartition(":")[2]) for part in split_address(centre.address)]
        public = identity_of(centre).public
        for _ in range(5):
            stranger(centre.address).send(b"in plain text")
            stranger(centre.address, KeyPair.new().public).send(b"for somebody else")
            stranger(centre.address, public).send(b"unknown")
            stranger(centre.address, public, KeyPair.of_token("guessed")).send(b"unknown")
            for port in ports:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                writer.transport.abort()
            await answers(centre, a)
        await until(lambda: centre.statistics()["intruders"] >= 25)
        assert centre.statistics()["garbage"] == centre.statistics()["stray"] == 0  # nobody got as far as a message
        await answers(centre, await nodes.member("b", centre))
    assert caplog.text.count("not admitted") == 1
    assert "connections from 127.0.0.1 not admitted" in caplog.text


async def test_strangers_do_not_stop_a_busy_process() -> None:
    """While Python is busy nobody reads what ZeroMQ tells of callers; it must go on all the same, and heartbeats with it."""
    async with opened() as nodes:
        centre = await nodes.coordinator()
        a = await nodes.member("a", centre)
        await answers(centre, a)
        host, _, port = split_address(centre.address)[0].removeprefix("tcp://").rpartition(":")
        for _ in range(1500):  # three events each; with the usual marks 2000 would be too many
            sockets.create_connection((host, int(port)), 5.0).close()
        with sockets.create_connection((host, int(port)), 5.0) as late:
            late.settimeout(5.0)
            assert late.recv(1) == b"\xff"  # ZeroMQ's signature: it still listens
        await answers(centre, a)
        await until(lambda: centre.statistics()["intruders"] >= 1500)


def threads_of_zeromq() -> int:
    return sum(path.read_text().startswith("ZMQ") for path in Path("/proc/self/task").glob("*/comm"))


async def test_endings_among_strangers(stranger: Stranger) -> None:
    """Endpoints open and close while strangers hammer at them: nothing breaks, nothing stays."""
    counts: list[int] = []
    for _ in range(6):
        async with opened() as nodes:
            centre = await nodes.coordinator()
            await nodes.member("a", centre)
            for _ in range(10):
                stranger(centre.address, identity_of(centre).public)
            _, silent = await asyncio.open_connection("127.0.0.1", int(split_address(centre.address)[0].rpartition(":")[2]))
        silent.transport.abort()
        if counts:  # the kernel may show one that has ended for a moment
            await until(lambda: threads_of_zeromq() <= counts[0])
        counts.append(threads_of_zeromq())


# When to tell -----------------------------------------------------------------------------------------------------------------


def test_troubles_are_told_when_they_last() -> None:
    troubles = Troubles()
    told = [now for now in range(40) if troubles.note("a", Trouble.PLAIN, float(now) * USUAL_S)]
    assert told == [1, 11, 21, 31]
    assert troubles.why("a") == Trouble.PLAIN.value
    troubles.over("a")
    assert troubles.why("a") == ""
    assert not troubles.note("a", Trouble.UNLISTED, 100.0)


def test_intruders_are_counted() -> None:
    intruders = Intruders()
    assert intruders.tell(0.0) is None
    intruders.note(Intrusion.NO_KEY, "10.0.0.9")
    assert intruders.due(5.0) == 5.0 + USUAL_S
    first = intruders.tell(6.0)
    assert first is not None
    assert first.startswith("1 connection from 10.0.0.9 not admitted: 1 in plain text")
    for number in range(2 * MAX_ORIGINS):
        intruders.note(Intrusion.WRONG_KEY, f"10.0.1.{number}")
    intruders.note(Intrusion.UNLISTED, "")
    assert intruders.due(7.0) == 6.0 + INTRUDERS_PAUSE_S
    assert intruders.due(70.0) == 70.0 + USUAL_S
    later = intruders.tell(17.0)
    assert later is not None
    named = f"10.0.1.0, 10.0.1.1, 10.0.1.2 and {MAX_ORIGINS - 3} more"
    assert later.startswith(f"{2 * MAX_ORIGINS + 1} connections from {named} not admitted: ")
    assert "512 for a process with another key, 1 with a key that is not on the list" in later
    assert intruders.tell(18.0) is None
