"""Parameters of one moment, read from servers whose shards move or are lost meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

from zmqtrain.errors import PeerLostError
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.server_heads import Heads
from zmqtrain.exchange.server_messages import ReadMeta, kept_label, shown_tag
from zmqtrain.exchange.server_reads import ServerReads
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

LABEL = kept_label(7)
PIECES = [Piece(0, 0, 0, 2, 0, 0), Piece(1, 0, 2, 4, 0, 0)]


class Servers:
    """One shard, which ``server/1`` serves now, and which ``server/0`` had when it was told to keep it. Both are the worker's
    endpoint, too."""

    def __init__(self, *, sent: int, lost: bool = False) -> None:
        """``sent``: how many pieces server/0 has sent. ``lost``: it sends no more."""
        self.mailbox: dict[tuple[PeerId, Tag], list[float]] = {}
        for piece in PIECES[:sent]:
            self.mailbox["server/0", shown_tag(piece.index, LABEL)] = [piece.index + 0.25, piece.index + 0.75]
        self.lost = lost
        self.asked: list[tuple[PeerId, str]] = []
        self.chained, self.shards = True, range(1)

    async def ask(self, shard: int, attempt: Callable[[PeerId], Awaitable[None]]) -> None:
        await attempt("server/1")

    async def request_of(self, server: PeerId, shard: int, method: str, label: str, *, timeout: float) -> None:
        self.asked.append((server, method))
        for piece in PIECES:
            self.mailbox[server, shown_tag(piece.index, label)] = [piece.index + 0.25, piece.index + 0.75]

    @asynccontextmanager
    async def waits_for(self, server: PeerId, tag: Tag) -> AsyncIterator[None]:
        yield

    async def receive(self, source: PeerId, tag: Tag, *, into: Payload) -> Payload:
        values = self.mailbox.pop((source, tag), None)
        if values is None:
            assert self.lost
            raise PeerLostError(source, "it was killed")
        into.copy_(TensorPayload.of(np.array(values)))
        return TensorPayload.of(np.zeros(0), ReadMeta(3, 0).to_value())


async def read(servers: Servers, kept_by: PeerId) -> list[float]:
    parameters = TensorPayload.empty(4, "float64")
    bucket = Bucket(0, parameters, TensorPayload.empty(4, "float64"), 0, ("w",))
    reads = ServerReads(
        cast(Endpoint, servers),
        cast(Heads, servers),
        None,
        [(bucket, PIECES)],
        lambda _, received: ReadMeta.from_value(received.meta),
        life=1,
        request_s=1.0,
        barrier_s=1.0,
        recorder=NullRecorder(),
    )
    await reads.shown(LABEL, asked={0: kept_by})
    return cast(Any, parameters.numpy()).tolist()


@pytest.mark.parametrize(
    ("sent", "lost", "kept_by", "asked"),
    [
        (2, False, "server/0", []),
        (2, True, "server/0", []),
        (1, True, "server/0", [("server/1", "show")]),
        (0, True, "server/0", [("server/1", "show")]),
    ],
    ids=["moved", "sent and lost", "lost in the middle", "lost"],
)
async def test_what_was_kept_is_read_once_from_whoever_has_sent_it(
    sent: int, lost: bool, kept_by: PeerId, asked: list[tuple[PeerId, str]]
) -> None:
    servers = Servers(sent=sent, lost=lost)
    assert await read(servers, kept_by) == [0.25, 0.75, 1.25, 1.75]
    assert servers.asked == asked
    assert servers.mailbox == {}, "nothing is left that nobody takes"


async def test_what_the_server_of_the_shard_has_kept_is_not_asked_for_again() -> None:
    servers = Servers(sent=0)
    await servers.request_of("server/1", 0, "checkpoint", LABEL, timeout=1.0)
    assert await read(servers, "server/1") == [0.25, 0.75, 1.25, 1.75]
    assert servers.asked == [("server/1", "checkpoint")]
