"""The model servers that serve the shards now, as a worker knows them.

If shards are kept twice or may move, another server may serve a shard from one moment to the next, since the one before was lost
or has handed it over. Whatever a worker has asked of that one, and has not got, it then asks of the other: servers tell what is new
to them from what they have got by way of the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.server_messages import MOVED, moved_version
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Value

T = TypeVar("T")

#: The request for what a worker may have missed because a server was lost.
AGAIN = "again"


class ShardMovedError(Exception):
    """Another server has the shard since the view of this version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"another server has the shard since the view of version {version}")
        self.version = version


class ChainHeads:
    """The server that serves each shard at present, as views of the members say."""

    def __init__(self, servers: Sequence[PeerId], *, membership: Membership | None = None) -> None:
        """``servers``: those that begin with a shard each. ``membership``: given if others may come to serve
        them."""
        self._servers = tuple(servers)
        self._news = None if membership is None else News(membership)

    def of(self, shard: int) -> PeerId:
        """The server of the shard now."""
        if self._news is None:
            return self._servers[shard]
        chain = self._news.view.chains[shard]
        return chain[0] if chain else self._servers[shard]  # nobody has it, and the run ends

    async def ask(self, shard: int, attempt: Callable[[PeerId], Awaitable[T]]) -> T:
        """``attempt(server)``; once more with the next server if this one is lost, or has handed the shard over. Raises what it
        raises otherwise."""
        while True:
            server = self.of(shard)
            try:
                return await attempt(server)
            except ShardMovedError as moved:
                assert self._news is not None
                unknown = PeerLostError(server, "it has handed over what it had", waiting_for="the next server of its shard")
                await self._news.until(lambda view, since=moved.version: view.version >= since, unknown)  # type: ignore[misc]
            except PeerLostError as error:
                if self._news is None or error.peer != server:
                    raise
                await self._news.until(lambda _, lost=server: self.of(shard) != lost, error)  # type: ignore[misc]


class Heads(ChainHeads):
    """The same for model servers, which may hand shards over."""

    def __init__(self, endpoint: Endpoint, servers: Sequence[PeerId], *, membership: Membership | None = None) -> None:
        super().__init__(servers, membership=membership)
        self._endpoint = endpoint
        self._waits: dict[tuple[PeerId, Tag], asyncio.Timeout] = {}  # what a server is to send
        self._moved: dict[tuple[PeerId, Tag], int] = {}  # of these: what it will not send, since the view of this version
        if membership is not None:
            endpoint.serve(MOVED, self._on_moved)

    @property
    def chained(self) -> bool:
        """Whether other servers may come to serve the shards."""
        return self._news is not None

    @property
    def shards(self) -> range:
        """The numbers of all shards."""
        return range(len(self._servers))

    def first(self, shard: int) -> PeerId:
        """The server with which the shard begins."""
        return self._servers[shard]

    async def request(self, shard: int, method: str, *values: Value, timeout: float) -> Value:
        """A request to the server of the shard. Servers must take it again if they have taken it already."""

        async def attempt(server: PeerId) -> Value:
            return await self.request_of(server, shard, method, *values, timeout=timeout)

        return await self.ask(shard, attempt)

    async def request_of(self, server: PeerId, shard: int, method: str, *values: Value, timeout: float) -> Value:
        """A request about the shard to this very server. Raises `ShardMovedError`."""
        arguments = (shard, *values) if self.chained else values
        answer = (await self._endpoint.request(server, method, *arguments, timeout=timeout)).meta
        if self.chained and (version := moved_version(answer)) is not None:
            raise ShardMovedError(version)
        return answer

    @asynccontextmanager
    async def waits_for(self, server: PeerId, tag: Tag) -> AsyncIterator[None]:
        """Within it the message with this tag is asked of the server, and awaited. Raises `ShardMovedError` once the server says
        that another one will send it."""
        if self._news is None:
            yield
            return
        try:
            async with asyncio.timeout(None) as wait:
                self._waits[server, tag] = wait
                yield
        except TimeoutError:
            if wait.expired():
                raise ShardMovedError(self._moved[server, tag]) from None
            raise
        finally:
            del self._waits[server, tag]
            self._moved.pop((server, tag), None)

    async def _on_moved(self, caller: PeerId, shard: Value, version: int, tags: Value) -> Value:
        for tag in tags if isinstance(tags, list) else ():
            key = caller, tuple(tag) if isinstance(tag, list) else ()
            wait = self._waits.get(key)
            if wait is not None and key not in self._moved:
                self._moved[key] = version
                wait.reschedule(asyncio.get_running_loop().time())
        return None

    async def request_all(self, method: str, *values: Value, timeout: float) -> list[Value]:
        """A request to the servers of all shards. Returns their answers, by shard."""
        answers: dict[int, Value] = {}

        async def request(shard: int) -> None:
            answers[shard] = await self.request(shard, method, *values, timeout=timeout)

        await together(*map(request, self.shards))
        return [answers[shard] for shard in self.shards]


class FcHeads:
    """The FC server that workers ask at present."""

    def __init__(self, server: PeerId, number: int | None, membership: Membership | None) -> None:
        """``server``: with which the run begins. ``number``: of its layers among the shards, if another FC server has a copy of
        them; then ``membership`` is given."""
        self._number = number or 0
        self._chains = ChainHeads([server] * (self._number + 1), membership=None if number is None else membership)

    @property
    def now(self) -> PeerId:
        """Its name."""
        return self._chains.of(self._number)

    async def ask(self, attempt: Callable[[PeerId], Awaitable[T]]) -> T:
        """Ask this shard's head, and the next one if it is lost: see `ChainHeads.ask`."""
        return await self._chains.ask(self._number, attempt)
