"""Nodes come to a rendezvous, over real sockets of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from zmqtrain.errors import PeerTimeoutError, PortInUseError, ProtocolError, RunTokenError, UsageError
from zmqtrain.launcher.environment import join as join_module
from zmqtrain.launcher.environment import rendezvous as rendezvous_module
from zmqtrain.launcher.environment.join import Join, wait_for_start
from zmqtrain.launcher.environment.place import NodePlace
from zmqtrain.launcher.environment.register import Register
from zmqtrain.launcher.environment.rendezvous import Rendezvous
from zmqtrain.topology.schema import Host

TOKEN = "0123456789abcdef"


class Inn:
    """A rendezvous, and what it says."""

    def __init__(self, names: str, port: int = 0) -> None:
        self.said: list[str] = []
        self.noted = asyncio.Event()
        self.ended: list[tuple[str, int]] = []
        self.register = Register([Host(name=name) for name in names.split()], None)
        self.rendezvous = Rendezvous(
            TOKEN, self.register, say=self.say, on_ended=lambda host, code: self.ended.append((host, code)), wait_s=5.0
        )

    def say(self, text: str) -> None:
        self.said.append(text)
        self.noted.set()

    async def until(self, happens: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not happens():
                self.rendezvous.changed.clear()
                await self.rendezvous.changed.wait()

    def come(self, port: int, name: str = "", token: str = TOKEN, wait_s: float = 5.0) -> asyncio.Task[tuple[Join, Any]]:
        place = NodePlace(launcher="127.0.0.1", port=port, names=(name,) if name else ())
        return asyncio.create_task(wait_for_start(place, token, port=1, wait_s=wait_s, say=self.say))


@asynccontextmanager
async def inn(names: str) -> AsyncIterator[tuple[Inn, int]]:
    made = Inn(names)
    # At one family, so that port 0 is one port.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous_module, "has_ipv6", lambda: False)
        port = await made.rendezvous.open(0)
    try:
        yield made, port
    finally:
        await made.rendezvous.close()


async def test_nodes_wait_for_each_other_and_are_told_what_to_start() -> None:
    async with inn("alpha beta gamma") as (made, port):
        tasks = {name: made.come(port, name) for name in ("beta", "alpha", "gamma")}
        await made.until(lambda: made.register.is_complete)
        assert not any(task.done() for task in tasks.values())
        await made.rendezvous.start("alpha", {"run": "1"})
        await made.rendezvous.start("beta", {"run": "2"})
        await made.rendezvous.dismiss(["gamma"])
        joins = {name: await task for name, task in tasks.items()}
        assert {name: start for name, (_, start) in joins.items()} == {"alpha": {"run": "1"}, "beta": {"run": "2"}, "gamma": None}
        node = made.rendezvous.node("alpha")
        assert node is not None
        await node.tell(stop=3.0)
        assert await joins["alpha"][0].hear() == {"stop": 3.0}
        await joins["alpha"][0].ended(7)
        joins["alpha"][0].close()
        await asyncio.wait_for(node.gone.wait(), 5)
        assert made.ended == [("alpha", 7)]
        # Another one in its place is told to start at once.
        again, start = await made.come(port, "alpha")
        assert start == {"run": "1"}
        for join in (again, *(join for join, _ in joins.values())):
            join.close()


async def test_who_has_another_token_stays_outside() -> None:
    async with inn("alpha") as (made, port):
        with pytest.raises(RunTokenError):
            await made.come(port, "alpha", token="another token entirely")
        assert made.said == ["refused: 127.0.0.1 has another token"]
        assert made.register.here == ()


async def test_who_has_other_versions_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async with inn("alpha") as (made, port):
        monkeypatch.setattr(made.rendezvous, "_versions", {"python": "3.1", "zmqtrain": "0", "torch": "0"})
        with pytest.raises(UsageError, match=r"has Python .* but this machine has 3\.1"):
            await made.come(port, "alpha")
        assert len(made.rendezvous.refused) == 1


async def test_a_place_that_is_taken_may_be_free_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "FIRST_PAUSE_S", 0.01)
    async with inn("alpha") as (made, port):
        first = made.come(port, "alpha")
        await made.until(lambda: made.register.is_complete)
        second = made.come(port, "alpha", wait_s=60)
        await asyncio.wait_for(made.noted.wait(), 5)
        assert "alpha has joined already" in made.said[0]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await made.rendezvous.start("alpha", {"run": "1"})
        join, start = await asyncio.wait_for(second, 5)
        assert start == {"run": "1"}
        join.close()


async def test_a_launcher_that_comes_late_and_one_that_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "FIRST_PAUSE_S", 0.01)
    async with inn("alpha") as (made, port):
        waiting = made.come(port, "alpha")
        await made.until(lambda: made.register.is_complete)
    assert not waiting.done()
    other = Inn("alpha")
    monkeypatch.setattr(rendezvous_module, "has_ipv6", lambda: False)
    await other.rendezvous.open(port)
    try:
        await other.rendezvous.start("alpha", {"run": "2"})
        join, start = await asyncio.wait_for(waiting, 10)
        assert start == {"run": "2"}
        assert "the launcher disconnected before all nodes had joined" in made.said
        join.close()
    finally:
        await other.rendezvous.close()


async def test_a_launcher_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "FIRST_PAUSE_S", 0.01)
    place = NodePlace(launcher="127.0.0.1", port=9)
    with pytest.raises(PeerTimeoutError, match=r"127.0.0.1:9 .*refused.*ZMQTRAIN_COORDINATOR"):
        await wait_for_start(place, TOKEN, port=1, wait_s=0.1, say=lambda _: None)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n", b"\xff\x00\n"])
async def test_something_else_listens_there(answer: bytes) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        place = NodePlace(launcher="127.0.0.1", port=server.sockets[0].getsockname()[1])
        with pytest.raises(ProtocolError, match="not a launcher of zmqtrain"):
            await wait_for_start(place, TOKEN, port=1, wait_s=5, say=lambda _: None)


async def test_strangers_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "HANDSHAKE_S", 0.1)
    async with inn("alpha") as (made, port):
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"number": 3}\n', b'{"number": "1"}\nnonsense\n', bytes(300_000) + b"\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(words)
            async with asyncio.timeout(5):
                try:
                    while await reader.read(65536):
                        pass
                except ConnectionError:
                    pass
            writer.close()
        task = made.come(port, "alpha")
        await made.until(lambda: made.register.is_complete)
        task.cancel()


async def test_a_port_in_use() -> None:
    async with inn("alpha") as (_, port):
        with pytest.raises(PortInUseError, match=str(port)):
            await Inn("beta").rendezvous.open(port)
