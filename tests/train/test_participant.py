"""A worker's part in what all do together at the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.collectives.world import endpoints
from tests.exchange.world import NumpyReplica
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.exchange.base import Exchange, RunModel
from zmqtrain.exchange.members import FixedMembers, group_of
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.train.participant import Participant

pytestmark = pytest.mark.virtual_time


class Means:
    """An exchange whose run's model is the mean of all."""

    averaged, synchronous, model = True, False, RunModel.MEAN

    def weight(self, group: Group) -> float | None:
        return 0.5

    async def require_alike(self, group: Group, tag: str) -> None:
        return None


def participant(node: Endpoint, replica: NumpyReplica) -> Participant:
    async def quiet() -> None:
        return None

    context = SimpleNamespace(
        endpoint=node,
        role=SimpleNamespace(peer=node.peer, group=0, position=0),
        placement=SimpleNamespace(group_members=lambda _: (node.peer,)),
        timeouts=Timeouts.of(5.0),
        membership=SimpleNamespace(alone_s=0.0),
        generation="",
    )
    members = FixedMembers(node, ("worker/0", "worker/1"), timeout_s=10)
    return Participant(cast(Any, context), cast(Exchange, Means()), members, replica, step=lambda: 3, quiet=quiet)


async def test_one_that_is_cancelled_while_its_model_becomes_the_mean_keeps_its_own() -> None:
    """Not some of its parameters, and some of the mean."""
    async with endpoints(2) as (node, other):
        replica, theirs = NumpyReplica((5, 3), 0), NumpyReplica((5, 3), 1)
        before = replica.flat().copy()
        becoming = asyncio.ensure_future(participant(node, replica).become_run_model("finish"))
        group = group_of(other, ("worker/0", "worker/1"), "members", 10)
        await all_reduce(group, theirs.buckets[0].parameters, ("finish", "mean", 0))
        await asyncio.sleep(0.1)
        assert not np.array_equal(replica.flat(), before), "the first bucket is the mean"
        becoming.cancel()
        await asyncio.wait({becoming})
        assert becoming.cancelled()
        assert np.array_equal(replica.flat(), before)
