"""Whom a late worker asks for a state."""

from __future__ import annotations

import asyncio

import pytest

from tests.collectives.world import endpoints
from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.exchange.state_source import NeighboursState, StateSource
from zmqtrain.net.endpoint import Endpoint

pytestmark = pytest.mark.virtual_time
PEERS = ("worker/0", "worker/1", "worker/2")


class LateMembers(FixedMembers):
    """All three are there; this one is late."""

    late = True


def source_of(node: Endpoint, *, late: bool = False) -> StateSource:
    kind = LateMembers if late else FixedMembers
    source = StateSource(node, timeout_s=5.0)
    source.serve(kind(node, PEERS, timeout_s=5.0))
    return source


def state_of(node: Endpoint) -> NeighboursState:
    return NeighboursState(node, LateMembers(node, PEERS, timeout_s=5.0), timeout_s=5.0)


def test_one_that_trains_is_asked_before_a_nearer_one_that_is_late_itself() -> None:
    async def run() -> None:
        async with endpoints(3) as nodes:
            trains, late = source_of(nodes[0]), source_of(nodes[1], late=True)
            state = state_of(nodes[2])
            assert await state.join() == 0
            assert state.source == "worker/0"
            assert (list(trains.wanted), list(late.wanted)) == (["worker/2"], [])

    asyncio.run(run())


def test_a_late_one_is_waited_for_if_nobody_else_trains() -> None:
    async def run() -> None:
        async with endpoints(3) as nodes:
            source_of(nodes[0]).close()
            late = source_of(nodes[1], late=True)
            state = state_of(nodes[2])
            joining = asyncio.create_task(state.join())
            await asyncio.sleep(1.0)  # virtual
            assert not joining.done()
            late.begin()
            await joining
            assert state.source == "worker/1"

    asyncio.run(run())


def test_it_is_an_error_if_the_training_has_ended_everywhere() -> None:
    async def run() -> None:
        async with endpoints(3) as nodes:
            source_of(nodes[0]).close()
            late = source_of(nodes[1], late=True)
            joining = asyncio.create_task(state_of(nodes[2]).join())
            await asyncio.sleep(1.0)  # virtual
            late.close()
            with pytest.raises(PeerLostError, match="too late to join"):
                await joining

    asyncio.run(run())
