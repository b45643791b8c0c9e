"""What a server tells waits for its backup, unless nobody needs one any more."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.test_replication import joined
from zmqtrain.server.chain_head import HeadGate

pytestmark = pytest.mark.virtual_time


async def test_it_waits_for_the_backup() -> None:
    replication = joined()
    gate = HeadGate(replication, asyncio.Event())
    number = replication.log()
    waiting = asyncio.ensure_future(gate.passed(gate.ticket()))
    await asyncio.sleep(1)
    assert not waiting.done()
    replication.acknowledge("b", number)
    gate.look()
    await waiting


async def test_a_backup_that_has_ended_with_the_run_is_not_waited_for() -> None:
    """It ends when all workers have left, perhaps before it has acknowledged the last operation."""
    replication = joined()
    finished = asyncio.Event()
    gate = HeadGate(replication, finished)
    replication.log()
    waiting = asyncio.ensure_future(gate.passed(gate.ticket()))
    await asyncio.sleep(1)
    finished.set()
    gate.look()
    await waiting
    replication.log()
    await gate.passed(gate.ticket())
