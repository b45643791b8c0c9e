"""When a change of the members takes effect, for one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tests.collectives.world import endpoints
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.elastic import ElasticMembers
from zmqtrain.membership.client import Membership, ViewCallback
from zmqtrain.membership.view import Member, View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.timeouts import Timeouts

pytestmark = pytest.mark.virtual_time

WORKERS = ("worker/0", "worker/1")


class Alone:
    """A membership in which the others always say the same."""

    late = False

    def __init__(self) -> None:
        members = {peer: Member(peer, "", "h", "worker", rank) for rank, peer in enumerate(WORKERS)}
        self.view = View(1, complete=True, members=members, lost={})
        self._callbacks: list[ViewCallback] = []

    def on_view(self, callback: ViewCallback) -> None:
        self._callbacks.append(callback)

    async def agree(self, name: str, value: int, among: tuple[PeerId, ...], *, version: int) -> int:
        return value

    def lose(self, peer: PeerId) -> None:
        left = {name: member for name, member in self.view.members.items() if name != peer}
        self.view = View(self.view.version + 1, complete=True, members=left, lost={peer: "killed"}, changes=self.view.changes + 1)
        for callback in self._callbacks:
            callback(self.view)


async def test_a_change_waits_for_the_exchange_of_a_worker_that_has_not_begun() -> None:
    """It would miss it otherwise, and train other batches than those that the others know of."""
    prepared: list[tuple[int, dict[PeerId, int], int]] = []

    async def prepare(step: int, living: Mapping[PeerId, int], version: int) -> int:
        prepared.append((step, dict(living), version))
        return step + 3

    async with endpoints(2) as (node, _):
        membership = Alone()
        timeouts = Timeouts.of(60.0)
        given = node, cast(Membership, membership), WORKERS, timeouts
        members = ElasticMembers(*given, recorder=NullRecorder(), prepares=True)
        membership.lose("worker/1")
        settled = asyncio.create_task(cast(Any, members.settled()))
        await asyncio.sleep(timeouts.barrier_s)
        assert not settled.done()
        assert members.at(4) == WORKERS
        members.before_change(prepare)
        await settled
        assert prepared == [(1, {"worker/0": 0}, 2)]
        assert (members.at(3), members.at(4)) == (WORKERS, ("worker/0",))
        membership.lose("worker/0")
        await members.stop()


async def test_one_that_ends_before_its_exchange_has_started_waits_for_nothing() -> None:
    async with endpoints(2) as (node, _):
        membership = Alone()
        given = node, cast(Membership, membership), WORKERS, Timeouts.of(60.0)
        members = ElasticMembers(*given, recorder=NullRecorder(), prepares=True)
        membership.lose("worker/1")
        await asyncio.sleep(1.0)
        await members.stop()
        members.before_change(cast(Any, None))  # an exchange that starts even so
