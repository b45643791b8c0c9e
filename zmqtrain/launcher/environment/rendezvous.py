"""Where the nodes of a run join: the launcher's side of `zmqtrain.launcher.environment.join`.

The protocol; everything but the two numbers is sealed (`zmqtrain.launcher.environment.sealed`)::

    launcher: number                      node: number, description
    launcher: welcome (which host it is)  or refused (why; whether to try again)
    launcher: start (the agent's environment, or nothing if the host has nothing to do), when all are there
    launcher: stop, perhaps               node: ended (the agent's exit code)

The rendezvous stays open until the run has ended: a node that replaces a lost one gets its place. A connection that breaks during
the run does not matter: the agent's heartbeats tell whether a host is lost.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from zmqtrain.errors import PortInUseError, ProtocolError, RunTokenError, UsageError, ZmqTrainError
from zmqtrain.launcher.addresses import has_ipv6
from zmqtrain.launcher.environment.node_description import NodeDescription
from zmqtrain.launcher.environment.register import OccupiedError, Register
from zmqtrain.launcher.environment.sealed import MOST_BYTES, Seal
from zmqtrain.launcher.ssh.inspection import faults_of_versions, own_versions
from zmqtrain.topology.loopback import is_loopback
from zmqtrain.world import random_bits

#: Seconds that a node may take after connecting to prove that it has the token.
HANDSHAKE_S = 5.0
#: The most connections at a time; more are refused.
MOST_STRANGERS = 2048
#: A silent connection is known to be dead after about a minute.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 3))


class JoinedNode:
    """A node that was let in."""

    def __init__(self, host: str, description: NodeDescription, seal: Seal, writer: asyncio.StreamWriter) -> None:
        self.host, self.description = host, description
        self._seal, self._writer = seal, writer
        self.gone = asyncio.Event()
        """The conversation has ended."""

    def hear(self, line: bytes) -> dict[str, Any]:
        """Read a line from the node. Raises `ProtocolError` if the node did not write it."""
        return self._seal.read(line, self.host)

    async def tell(self, **values: object) -> None:
        """Send a message, if the node still listens."""
        if not self.gone.is_set():
            with suppress(OSError):
                self._writer.write(self._seal.write(**values))
                await self._writer.drain()


class Rendezvous:
    """Admits nodes between `open` and `close`; ``on_ended(host, code)`` is called when a node's agent has ended."""

    def __init__(
        self, token: str, register: Register, *, say: Callable[[str], None], on_ended: Callable[[str, int], None], wait_s: float
    ) -> None:
        """``wait_s``: the time in seconds that a node may have to wait for the others, which is sent to it."""
        self._token, self._register, self._say, self._on_ended, self._wait_s = token, register, say, on_ended, wait_s
        self._versions = own_versions()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._nodes_here: dict[str, JoinedNode] = {}
        self._starts: dict[str, Mapping[str, object]] = {}
        self._refused: dict[str, str] = {}
        self._seen: str | None = None
        self.changed = asyncio.Event()
        """Set when a node has joined or left."""

    async def open(self, port: int) -> int:
        """Listen on all addresses of this machine. Returns the port. Raises `PortInUseError`."""
        host = None if has_ipv6() else "0.0.0.0"
        try:
            self._server = await asyncio.start_server(self._receive, host, port, limit=MOST_BYTES, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"cannot listen on port {port} ({error}): choose another [job] port") from error
            raise PortInUseError(f"port {port}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop admitting nodes, and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def seen(self) -> str | None:
        """An address at which another machine has reached this one."""
        return self._seen

    @property
    def refused(self) -> tuple[str, ...]:
        """The reasons why nodes were refused, each once."""
        return tuple(self._refused.values())

    def node(self, host: str) -> JoinedNode | None:
        """The node that is this host, if it is here."""
        return self._nodes_here.get(host)

    async def start(self, host: str, start: Mapping[str, object]) -> None:
        """Tell a host what to start, now and whenever another node takes its place."""
        self._starts[host] = {"start": start}
        await self._begin(host)

    async def dismiss(self, hosts: Iterable[str]) -> None:
        """Tell hosts that there is nothing for them to do."""
        for host in hosts:
            self._starts[host] = {"start": None}
            await self._begin(host)

    async def _begin(self, host: str) -> None:
        node, start = self._nodes_here.get(host), self._starts.get(host)
        if node is not None and start is not None:
            await node.tell(**start)

    def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._converse(reader, writer), name="a join to the rendezvous")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        origin = _address(writer, "peername")
        node: JoinedNode | None = None
        try:
            node = await self._let_in(reader, writer, origin)
            if node is not None:
                await self._serve(node, reader)
        except (OSError, ValueError, TimeoutError, ProtocolError):
            pass  # it disconnected, sent nothing, or sent something that cannot be understood
        finally:
            if node is not None:
                node.gone.set()
                if self._nodes_here.get(node.host) is node:
                    del self._nodes_here[node.host]
                    self._register.leave(node.host)
                    self.changed.set()
            writer.close()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, origin: str) -> JoinedNode | None:
        if self._strangers >= MOST_STRANGERS:
            return None
        self._strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                number = f"{random_bits(128):032x}"
                writer.write(json.dumps({"zmqtrain": "rendezvous", "number": number}).encode() + b"\n")
                theirs = json.loads(await reader.readline() or b"null")
                if not isinstance(theirs, dict) or not isinstance(theirs.get("number"), str):
                    return None
                seal = Seal(self._token, number, theirs["number"], launcher=True)
                line = await reader.readline()
        finally:
            self._strangers -= 1
        try:
            description = NodeDescription.from_value(seal.read(line, origin).get("description"))
            for fault in faults_of_versions(str(description), self._versions, _packages(description)):
                raise UsageError(f"{fault.host} has {fault.what}: {fault.remedy}")
            host = self._register.enter(description)
        except ZmqTrainError as error:
            self._turn_away(origin, error)
            again = isinstance(error, OccupiedError)
            writer.write(seal.write(refused=str(error), again=again, token=isinstance(error, RunTokenError)))
            await writer.drain()
            return None
        _keep_alive(writer)
        here = _address(writer, "sockname")
        if not is_loopback(here):
            self._seen = here
        node = self._nodes_here[host] = JoinedNode(host, description, seal, writer)
        await node.tell(welcome=host, wait_s=self._wait_s)
        await self._begin(host)
        self.changed.set()
        return node

    def _turn_away(self, origin: str, error: ZmqTrainError) -> None:
        if isinstance(error, OccupiedError) and not self._starts and self._register.is_complete:
            return  # it will try again
        text = f"{origin} has another token" if isinstance(error, RunTokenError) else str(error)
        if text not in self._refused and len(self._refused) < MOST_STRANGERS:
            self._refused[text] = text
            self._say(f"refused: {text}")

    async def _serve(self, node: JoinedNode, reader: asyncio.StreamReader) -> None:
        """Read what the node sends until it disconnects."""
        while line := await reader.readline():
            code = node.hear(line).get("ended")
            if isinstance(code, int):
                self._on_ended(node.host, code)


def _packages(description: NodeDescription) -> dict[str, object]:
    versions = dict(description.versions)
    return {"python": versions.pop("python", "0"), "packages": versions}


def _address(writer: asyncio.StreamWriter, which: str) -> str:
    name = writer.get_extra_info(which)
    text = str(name[0]).partition("%")[0] if name else "an unknown address"
    try:
        mapped = getattr(ip_address(text), "ipv4_mapped", None)
    except ValueError:
        return text
    return text if mapped is None else str(mapped)


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
