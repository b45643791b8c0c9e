"""What a forked process keeps of its parent's connections: nothing that would make its peers believe it alive."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from zmqtrain.errors import PeerLostError
from zmqtrain.net.address import split_address
from zmqtrain.net.curve import Identity
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.wire.value import ValuePayload

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the kernel does not show open files")


def ports_of(node: Node) -> list[int]:
    return [int(lane.rpartition(":")[2]) for lane in split_address(node.address)]


def open_at(ports: list[int]) -> list[str]:
    """The sockets of this process at these ports."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            each = socket.socket(fileno=int(name))
        except OSError:
            continue
        if each.family in (socket.AF_INET, socket.AF_INET6) and each.getsockname()[1] in ports:
            found.append(str(each))
        each.detach()
    return found


def in_a_child(ports: list[int]) -> int:
    """How many sockets at these ports a forked process has."""
    pid = os.fork()
    if pid == 0:
        os._exit(len(open_at(ports)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def exchange(one: Node, other: Node) -> None:
    for source, to in ((one, other), (other, one)):
        await source.send(to.peer, ("greeting",), ValuePayload("hello"))
        await to.receive(source.peer, ("greeting",))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_forked_process_has_neither_listening_nor_accepted_sockets(host: str) -> None:
    async def run() -> None:
        settings = NetSettings(token="t", host=host, advertise="127.0.0.1")
        async with await open_zeromq("a", settings=settings) as one, await open_zeromq("b", settings=settings) as other:
            one.add_peer("b", other.address)
            other.add_peer("a", one.address)
            await exchange(one, other)
            ports = ports_of(one) + ports_of(other)
            assert len(open_at(ports)) > len(ports)
            assert in_a_child(ports) == 0
            await exchange(one, other)  # the connections are what they were

        # Nothing listens there any more: what the program opens at these ports is left alone.
        with socket.socket() as later:
            later.bind(("127.0.0.1", ports[0]))
            assert in_a_child(ports) == 1

    asyncio.run(run())


def test_a_socket_of_the_program_with_the_same_port_at_another_address_stays() -> None:
    async def run() -> None:
        async with await open_zeromq("a", settings=NetSettings(host="127.0.0.1")) as node:
            with socket.socket() as own:
                own.bind(("127.0.0.2", ports_of(node)[0]))
                assert in_a_child(ports_of(node)) == 1

    asyncio.run(run())


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_killed_process_is_gone_although_one_that_it_has_forked_lives_on(encrypted: bool) -> None:
    """Known within ``gone_s``, and not when its connections have been silent for long enough."""

    def settings() -> NetSettings:
        return NetSettings(token="t", gone_s=0.05, lost_s=60.0, identity=Identity() if encrypted else None)

    async def killed(to_parent: int, from_parent: int) -> None:
        async with await open_zeromq("killed", settings=settings()) as node:
            os.write(to_parent, node.address.encode())
            node.add_peer("left", os.read(from_parent, 1000).decode())
            await node.receive("left", ("greeting",))
            forked = os.fork()
            if forked == 0:
                signal.pause()
                os._exit(0)
            os.write(to_parent, str(forked).encode())
            await node.receive("left", ("never",))

    async def left(from_child: int, to_child: int, pid: int) -> None:
        async with await open_zeromq("left", settings=settings()) as node:
            node.add_peer("killed", os.read(from_child, 1000).decode())
            os.write(to_child, node.address.encode())
            await node.send("killed", ("greeting",), ValuePayload("hello"))
            forked = int(await asyncio.to_thread(os.read, from_child, 100))
            try:
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, pid, 0)
                with pytest.raises(PeerLostError, match="its process has ended"):
                    async with asyncio.timeout(30.0):
                        await node.receive("killed", ("never",))
                os.kill(forked, 0)  # it lives
            finally:
                os.kill(forked, signal.SIGKILL)

    (from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(killed(to_parent, from_parent))
        finally:
            os._exit(1)
    asyncio.run(left(from_child, to_child, pid))
    for end in (from_child, to_parent, from_parent, to_child):
        os.close(end)
