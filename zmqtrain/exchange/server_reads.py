"""Reads of a worker's whole part of the model from servers: the initial values, those for the first step of a worker that comes
late, and those of one moment.

If shards are kept twice and a server is lost meanwhile, the next one of the shard is asked to send all of the shard again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_gather
from zmqtrain.errors import PeerLostError
from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.server_heads import AGAIN, Heads
from zmqtrain.exchange.server_messages import ReadMeta, entered_tag, initial_tag, shown_tag
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.waiting import in_time, together
from zmqtrain.wire.payload import Payload


class ServerReads:
    """Call one method, once."""

    def __init__(
        self,
        endpoint: Endpoint,
        heads: Heads,
        group: Group | None,
        parts: Sequence[tuple[Bucket, Sequence[Piece]]],
        note: Callable[[Piece, Payload], ReadMeta],
        *,
        life: int | None,
        request_s: float,
        barrier_s: float,
        recorder: Recorder,
    ) -> None:
        """
        Args:
            group: those who gather what each has read; ``None``: this worker reads all pieces itself.
            parts: all buckets, each with the pieces of it that this worker reads.
            note: called with what has arrived.
            life: which of the worker's processes this is, or of its teams, if workers may be lost.
        """
        self._endpoint, self._heads, self._group, self._parts, self._note = endpoint, heads, group, parts, note
        self._life, self._request_s, self._barrier_s, self._recorder = life, request_s, barrier_s, recorder

    async def initial(self) -> None:
        """The initial values, which servers send to everybody."""

        # The sender may still be sending from this very memory, but what comes back are the same bytes.
        async def read(shard: int, server: PeerId) -> None:
            if server != self._heads.first(shard):
                await self._again(shard, server, "initial")
            await self._receive(shard, server, initial_tag, "the initial parameters")

        await self._all("initial", read)

    async def entered(self) -> None:
        """The values for this worker's first step, after it has come late."""
        life = self._life
        assert life is not None

        async def read(shard: int, server: PeerId) -> None:
            if self._heads.chained:  # another server may have been told first that this worker takes part
                await self._again(shard, server, "entered")
            await self._receive(shard, server, lambda piece: entered_tag(piece, life), "the parameters for its first step")

        await self._all("entered", read)

    async def shown(
        self, label: str, *, asks: bool = False, asked: Mapping[int, PeerId] | None = None, together: bool = False
    ) -> None:
        """Those of one moment. ``asks``: this worker asks servers to show them, if workers may be lost only to it, unless its group
        reads them ``together``; otherwise another one asks, or has ``asked`` these to keep them for a checkpoint."""
        keepers, arguments = dict(asked or {}), (label, True) if together else (label,)

        async def take(shard: int, server: PeerId) -> None:
            received = await self._receive(shard, server, lambda piece: shown_tag(piece, label), f"the parameters ({label})")
            for piece, version in received:
                self._recorder.audit("shown", piece=piece.index, label=label, version=version)

        async def read(shard: int, server: PeerId) -> None:
            keeper = keepers.pop(shard, None)
            if keeper is not None and keeper != server:
                try:  # it sends them although another server has the shard by now, and nobody else would take them
                    return await take(shard, keeper)
                except PeerLostError as error:
                    if error.peer != keeper:
                        raise
            if asks or (asked and keeper != server):
                await self._heads.request_of(server, shard, "show", *arguments, timeout=self._request_s)
            return await take(shard, server)

        await self._all(label, read)

    async def _again(self, shard: int, server: PeerId, what: str) -> None:
        await self._heads.request_of(server, shard, AGAIN, self._life, what, timeout=self._request_s)

    async def _all(self, name: str, read: Callable[[int, PeerId], Awaitable[None]]) -> None:
        async def of(shard: int) -> None:
            await self._heads.ask(shard, lambda server: read(shard, server))

        await together(*map(of, self._heads.shards))
        if self._group is None:
            return
        gathers = [
            all_gather(bucket.sharers(self._group), bucket.parameters, (name, bucket.index), priority=bucket.index)
            for bucket, _ in self._parts
        ]
        await together(*gathers)

    async def _receive(self, shard: int, server: PeerId, tag: Callable[[int], Tag], what: str) -> list[tuple[Piece, int]]:
        """All pieces of a shard, with their versions."""
        found: list[tuple[Piece, int]] = []

        async def receive(bucket: Bucket, piece: Piece) -> None:
            into = bucket.parameters.part(piece.start, piece.stop)
            async with self._heads.waits_for(server, tag(piece.index)), in_time(server, what, self._barrier_s):
                received = await self._endpoint.receive(server, tag(piece.index), into=into)
            found.append((piece, self._note(piece, received).version))

        mine = [(bucket, piece) for bucket, pieces in self._parts for piece in pieces if piece.server == shard]
        await together(*(receive(bucket, piece) for bucket, piece in mine))
        return found
