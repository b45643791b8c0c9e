"""Whom a late worker asks for a state."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.collectives.world import endpoints
from tests.exchange.world import NumpyReplica
from zmqtrain.errors import PeerLostError
from zmqtrain.exchange.checkpoint_part import unpack_manifest
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.exchange.state_source import NeighboursState, StateSource
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.wire.payload import Payload, Value

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


class Beside(NumpyReplica):
    """It has nothing beside its parameters."""

    async def beside(self) -> tuple[dict[str, Payload], dict[str, Value]]:
        return {}, {}


class PlannedMembers(FixedMembers):
    """The third worker is lost and replaced: its second process trains from step 4 on, its third one from step 6 on."""

    survives = True

    def incarnation(self, peer: PeerId, step: int) -> int | None:
        return 0 if peer != PEERS[2] else 2 if step >= 6 else 1 if step >= 4 else 0


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


def test_a_process_that_asks_while_another_of_its_name_is_about_to_get_a_state_gets_that_of_its_own_first_step() -> None:
    async def run() -> None:
        async with endpoints(3) as nodes:
            members = PlannedMembers(nodes[0], PEERS, timeout_s=5.0)
            source, replica = StateSource(nodes[0], timeout_s=5.0), Beside([2], seed=1)
            source.serve(members)

            async def ask(process: int) -> None:
                await nodes[2].request(PEERS[0], "exchange.state", process, False, timeout=5.0)

            async def nothing() -> None: ...

            await ask(1)
            await source.answer(4, members, replica, partial(ask, 2))  # it asks while something is under way
            assert source.wanted == {PEERS[2]: 2}
            await source.answer(6, members, replica, nothing)
            assert source.wanted == {}
            _, about = unpack_manifest(await nodes[2].receive(PEERS[0], ("exchange.state",)))
            assert (about["step"], about["to"]) == (6, 2)

    asyncio.run(run())
