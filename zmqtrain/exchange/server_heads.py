"""The model servers that serve the shards now, as a worker knows them.

If shards are kept twice, another server may serve a shard from one moment to the next. Whatever a worker has asked of the one that
was lost it then asks of the other: servers tell what is new to them from what they have got by way of the lost one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from zmqtrain.errors import PeerLostError
from zmqtrain.membership.client import Membership
from zmqtrain.membership.news import News
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Value

T = TypeVar("T")

#: The request for what a worker may have missed because a server was lost.
AGAIN = "again"


class Heads:
    """The server that serves each shard at present, as workers know it."""

    def __init__(self, endpoint: Endpoint, servers: Sequence[PeerId], *, membership: Membership | None = None) -> None:
        """``servers``: those that begin with a shard each. ``membership``: given if shards are kept twice."""
        self._endpoint, self._servers = endpoint, tuple(servers)
        self._news = None if membership is None else News(membership)

    @property
    def replicated(self) -> bool:
        """Whether shards are kept twice."""
        return self._news is not None

    @property
    def shards(self) -> range:
        """The numbers of all shards."""
        return range(len(self._servers))

    def first(self, shard: int) -> PeerId:
        """The server with which the shard begins."""
        return self._servers[shard]

    def of(self, shard: int) -> PeerId:
        """The server of the shard now."""
        if self._news is None:
            return self._servers[shard]
        chain = self._news.view.chains[shard]
        return chain[0] if chain else self._servers[shard]  # nobody has it, and the run ends

    async def ask(self, shard: int, attempt: Callable[[PeerId], Awaitable[T]]) -> T:
        """``attempt(server)``; once more with the next server if this one is lost. Raises what it raises otherwise."""
        while True:
            server = self.of(shard)
            try:
                return await attempt(server)
            except PeerLostError as error:
                if self._news is None or error.peer != server:
                    raise
                await self._news.until(lambda _, lost=server: self.of(shard) != lost, error)  # type: ignore[misc]

    async def request(self, shard: int, method: str, *values: Value, timeout: float) -> Value:
        """A request to the server of the shard. Servers must take it again if they have taken it already."""

        async def attempt(server: PeerId) -> Value:
            return await self.request_of(server, shard, method, *values, timeout=timeout)

        return await self.ask(shard, attempt)

    async def request_of(self, server: PeerId, shard: int, method: str, *values: Value, timeout: float) -> Value:
        """A request about the shard to this very server."""
        arguments = (shard, *values) if self.replicated else values
        return (await self._endpoint.request(server, method, *arguments, timeout=timeout)).meta

    async def request_all(self, method: str, *values: Value, timeout: float) -> list[Value]:
        """A request to the servers of all shards. Returns their answers, by shard."""
        answers: dict[int, Value] = {}

        async def request(shard: int) -> None:
            answers[shard] = await self.request(shard, method, *values, timeout=timeout)

        await together(*map(request, self.shards))
        return [answers[shard] for shard in self.shards]
