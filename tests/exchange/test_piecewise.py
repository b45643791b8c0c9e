"""Large payloads are worked on in pieces, to the end, with other tasks in between."""

from __future__ import annotations

import asyncio

import pytest
import torch

from zmqtrain.exchange.piecewise import PIECE_BYTES, piece_by_piece
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

NUMEL = 5 * PIECE_BYTES // 8 + 3  # two pieces and a half


def payload(value: float) -> TensorPayload:
    return TensorPayload.of(torch.full((NUMEL,), value))


async def test_others_run_in_between_and_all_is_done() -> None:
    into, turns = payload(0.0), [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    sizes: list[int] = []

    def work(own: Payload, other: Payload) -> None:
        sizes.append(own.nbytes)
        own.copy_(other)

    await piece_by_piece(work, into, payload(2.0))
    counting.cancel()
    assert sizes == [PIECE_BYTES, PIECE_BYTES, 4 * NUMEL - 2 * PIECE_BYTES]
    assert turns[0] >= 2
    assert bool((into.tensor == 2.0).all())


async def test_what_is_cancelled_is_finished_first() -> None:
    into = payload(1.0)
    task = asyncio.create_task(piece_by_piece(lambda own, other: own.average_(other), into, payload(3.0)))
    await asyncio.sleep(0)  # it has done the first piece
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bool((into.tensor == 2.0).all())
