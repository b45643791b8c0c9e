"""Sums over a group that loses workers: a step counts on all who are left, or on none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

from tests.collectives.world import endpoints, group_of
from tests.exchange.world import NumpyReplica
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.elastic import Decision, ElasticMembers
from zmqtrain.exchange.elastic_sums import GroupSums, Mixture
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Payload

pytestmark = pytest.mark.virtual_time
SIZES = (5, 3)


class Group3:
    """Members of one group of three: what `GroupSums` asks `ElasticMembers`."""

    begins = 0

    def __init__(self) -> None:
        self.there: tuple[PeerId, ...] = tuple(f"worker/{rank}" for rank in range(3))
        self.others: tuple[PeerId, ...] = ("worker/7",)  # of another group

    def commit_with(self, commits: object) -> None:
        return None

    def present(self, step: int, among: Collection[PeerId] | None = None) -> tuple[PeerId, ...]:
        return self.there if among is None else tuple(peer for peer in among if peer in self.there + self.others)

    def era(self, step: int) -> str:
        return "0"

    def took_part(self, step: int) -> bool:
        return True


class World:
    """Three workers and their sums."""

    def __init__(self, nodes: list[Endpoint]) -> None:
        self.members = Group3()
        self.nodes = nodes
        self.counted: list[tuple[int, int]] = []  # worker and step, as mixtures count
        self.replicas = [NumpyReplica(SIZES, rank) for rank in range(3)]
        self.sums = [
            GroupSums(node, cast(ElasticMembers, self.members), group, timeouts=Timeouts.of(5.0), recorder=NullRecorder())
            for node, group in zip(nodes, group_of(nodes, "group/0"), strict=True)
        ]
        for rank in range(3):
            self.fill(rank)

    def fill(self, rank: int) -> None:
        for bucket in self.replicas[rank].buckets:
            cast(Any, bucket.gradients).numpy()[:] = 10.0**rank

    def hand_over(self, rank: int, step: int) -> list[asyncio.Task[None]]:
        sums = self.sums[rank]
        return [
            asyncio.ensure_future(sums.sum(bucket, ("gradients", step, bucket.index))) for bucket in self.replicas[rank].buckets
        ]

    def lose(self, rank: int) -> None:
        self.members.there = tuple(peer for peer in self.members.there if peer != f"worker/{rank}")
        for node in self.nodes:
            if node is not self.nodes[rank]:
                node.forget(f"worker/{rank}", "killed")

    def decide(self, newest: int, holder: int, *, lack: bool, of: tuple[int, ...], version: int = 7) -> None:
        living = dict.fromkeys(self.members.there, 0)
        for rank in of:
            self.sums[rank].decide(Decision(version, living, newest, f"worker/{holder}", lack=lack))

    def mix(self, rank: int, step: int, came: asyncio.Event | None = None) -> asyncio.Task[bool]:
        """With 1000 from worker/7, and a part of each of the group: once it has ``came`` to all of them, if that is given."""

        async def take(group: Group, bucket: Bucket, work: Payload) -> None:
            cast(Any, work).numpy()[:] = 1000.0 if group.rank == 0 else 0.0
            await all_reduce(group, work, ("mix", step, bucket.index))
            if came is not None:
                await came.wait()

        def add(bucket: Bucket, work: Payload) -> None:
            bucket.gradients.add_(work)

        needed = ("worker/0", "worker/1", "worker/2", "worker/7")
        mixture = Mixture(needed, take, add, lambda: self.counted.append((rank, step)))
        return asyncio.ensure_future(self.sums[rank].mix(step, self.replicas[rank].buckets, mixture))

    def gradients(self, rank: int) -> list[float]:
        return [float(value) for bucket in self.replicas[rank].buckets for value in cast(Any, bucket.gradients).numpy()]


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with endpoints(3) as nodes:
        made = World(nodes)
        for sums, replica in zip(made.sums, made.replicas, strict=True):
            await sums.start(replica)
            sums.begin(0)
        try:
            yield made
        finally:
            await asyncio.gather(*(sums.stop() for sums in made.sums))


async def test_a_sum_is_over_all_who_are_there() -> None:
    async with world() as made:
        await asyncio.gather(*(task for rank in range(3) for task in made.hand_over(rank, 0)))
        assert all(made.gradients(rank) == [111.0] * 8 for rank in range(3))
        assert not any(sums.given_up for sums in made.sums)


async def test_a_step_that_nobody_has_completed_is_given_up_by_all_and_done_again_by_those_who_are_left() -> None:
    async with world() as made:
        tasks = made.hand_over(0, 0)  # the other one has all buckets still to come
        await asyncio.sleep(0.1)
        made.lose(2)
        assert [made.sums[rank].hold() for rank in range(2)] == [-1, -1]
        made.decide(-1, 0, lack=False, of=(0, 1))
        await asyncio.gather(*tasks)
        assert all(made.sums[rank].given_up for rank in range(2))
        await asyncio.gather(*made.hand_over(1, 0))  # what is still handed over belongs to nothing
        assert made.gradients(0) == [1.0] * 8
        for rank in range(2):
            made.sums[rank].begin(0)
            assert not made.sums[rank].given_up
        await asyncio.gather(*(task for rank in range(2) for task in made.hand_over(rank, 0)))
        assert made.gradients(0) == made.gradients(1) == [11.0] * 8


async def test_a_step_that_was_only_begun_is_given_up_too() -> None:
    """Its batch was divided among others."""
    async with world() as made:
        made.lose(2)
        for rank in range(2):
            made.sums[rank].hold()
        made.decide(-1, 0, lack=False, of=(0, 1))
        await asyncio.sleep(0.1)
        assert all(made.sums[rank].given_up for rank in range(2))


async def test_one_that_has_completed_the_step_gives_its_sums_to_one_that_has_not() -> None:
    async with world() as made:
        made.sums[1].hold()  # it completes nothing more
        tasks = {rank: made.hand_over(rank, 0) for rank in range(3)}
        await asyncio.gather(*tasks[0])
        made.sums[0].begin(1)
        made.fill(0)
        made.lose(2)
        assert [made.sums[rank].hold() for rank in range(2)] == [0, -1]
        made.decide(0, 0, lack=True, of=(0, 1))
        await asyncio.gather(*tasks[1])
        await asyncio.sleep(0.1)
        assert made.gradients(1) == [111.0] * 8
        assert not made.sums[1].given_up
        assert made.sums[0].given_up
        made.sums[0].begin(1)
        made.sums[1].begin(1)
        made.fill(1)
        await asyncio.gather(*(task for rank in range(2) for task in made.hand_over(rank, 1)))
        assert np.allclose(made.gradients(0), 11.0)
        assert made.gradients(0) == made.gradients(1)


async def test_sums_are_not_waited_for_that_another_one_does_not_give_since_all_decide_again() -> None:
    """The holder may have said what it has for the next decision before it has carried out this one."""
    async with world() as made:
        made.sums[1].hold()
        tasks = {rank: made.hand_over(rank, 0) for rank in range(3)}
        await asyncio.gather(*tasks[0])
        made.lose(2)
        assert [made.sums[rank].hold() for rank in range(2)] == [0, -1]
        made.decide(0, 0, lack=True, of=(1,))
        await asyncio.sleep(1)
        assert [made.sums[rank].hold() for rank in range(2)] == [0, -1]  # another one has come, and all decide again
        made.decide(0, 0, lack=True, of=(0, 1), version=8)
        async with asyncio.timeout(1):
            await asyncio.gather(*tasks[1])
        assert made.gradients(1) == [111.0] * 8


async def summed(made: World) -> None:
    await asyncio.gather(*(task for rank in range(3) for task in made.hand_over(rank, 0)))


async def test_a_mixture_counts_on_all_of_the_group() -> None:
    async with world() as made:
        await summed(made)
        assert await asyncio.gather(*(made.mix(rank, 0) for rank in range(3))) == [True] * 3
        assert all(made.gradients(rank) == [1111.0] * 8 for rank in range(3))
        assert sorted(made.counted) == [(0, 0), (1, 0), (2, 0)]
        for rank in range(3):
            assert made.sums[rank].hold() == 1  # the second result of step 0
            assert made.sums[rank].step_of(1) == 0


async def test_a_mixture_of_what_a_lost_worker_had_is_given_up_by_all() -> None:
    """Also by one that comes to it when all know of the loss."""
    async with world() as made:
        await summed(made)
        tasks = [made.mix(rank, 0, asyncio.Event()) for rank in range(2)]
        await asyncio.sleep(0.1)
        made.members.others = ()
        assert [made.sums[rank].hold() for rank in range(3)] == [0, 0, 0]
        made.decide(0, 0, lack=False, of=(0, 1, 2))
        assert await asyncio.gather(*tasks, made.mix(2, 0)) == [False] * 3
        assert made.counted == []
        assert all(made.gradients(rank) == [111.0] * 8 for rank in range(3))
        for rank in range(3):
            made.sums[rank].begin(1)
            made.fill(rank)
        await asyncio.gather(*(task for rank in range(3) for task in made.hand_over(rank, 1)))
        assert all(made.gradients(rank) == [111.0] * 8 for rank in range(3))


async def test_a_step_may_have_a_mixture_and_no_sums() -> None:
    """In which a group has nothing to train."""
    async with world() as made:
        await summed(made)
        lost = [made.mix(rank, 0, asyncio.Event()) for rank in range(3)]
        await asyncio.sleep(0.1)
        made.members.others = ()
        assert [made.sums[rank].hold() for rank in range(3)] == [0, 0, 0]
        made.decide(0, 0, lack=False, of=(0, 1, 2))
        assert await asyncio.gather(*lost) == [False] * 3
        made.members.others = ("worker/7",)
        assert await asyncio.gather(*(made.mix(rank, 1) for rank in range(3))) == [True] * 3
        assert all(made.gradients(rank) == [1111.0] * 8 for rank in range(3))
        assert [made.sums[rank].hold() for rank in range(3)] == [3, 3, 3]
        assert sorted(made.counted) == [(0, 1), (1, 1), (2, 1)]


async def test_one_that_has_a_mixture_gives_it_to_those_that_lack_it() -> None:
    async with world() as made:
        await summed(made)
        never, at_once = asyncio.Event(), asyncio.Event()
        at_once.set()
        tasks = [made.mix(0, 0, at_once), made.mix(1, 0, never), made.mix(2, 0, never)]
        assert await tasks[0]
        made.members.others = ()  # it has come from there, nevertheless
        made.sums[0].begin(1)
        made.lose(2)
        assert [made.sums[rank].hold() for rank in range(2)] == [1, 0]
        assert made.counted == [(0, 0)]
        made.decide(1, 0, lack=True, of=(0, 1))
        assert await tasks[1]
        assert made.counted == [(0, 0), (1, 0)]
        await asyncio.sleep(0.1)
        assert made.gradients(0) == made.gradients(1) == [1111.0] * 8
        assert made.sums[0].given_up, "the step that it had begun, whose batch was divided among others"
