"""Samples that travel round the ring between peers, against the schedule, with losses and late comers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.collectives.world import endpoints
from tests.pairwise import pairwise
from zmqtrain.data.background import AtOnce
from zmqtrain.data.blocks import PhantomContents, TensorContents
from zmqtrain.data.partition import Indices
from zmqtrain.data.ring import Ring
from zmqtrain.data.ring_loader import RingLoader
from zmqtrain.data.ring_plan import RingPlan
from zmqtrain.errors import PeerLostError, PeerTimeoutError, TaskError
from zmqtrain.events import NullRecorder
from zmqtrain.net.endpoint import Endpoint

pytestmark = pytest.mark.virtual_time


class Dataset:
    """Counts how often each sample was read. ``part``: all that this host has."""

    def __init__(self, samples: int, part: Indices | None = None) -> None:
        self.reads = np.zeros(samples, np.int64)
        self.part = part

    def __call__(self, ids: Indices) -> Any:
        if self.part is not None and not np.isin(ids, self.part).all():
            raise TaskError("these samples are elsewhere")
        self.reads[ids] += 1
        return [torch.from_numpy(np.stack([ids, ids + 1000], 1)), {"label": torch.from_numpy(ids * 2)}]


def loader(node: Endpoint, members: Sequence[str], ring: Ring, read: Callable[[Indices], Any], **how: Any) -> RingLoader:
    contents = how.pop("contents", None) or TensorContents(read)
    plan = RingPlan(ring, members)
    return RingLoader(plan, contents, node, thread=AtOnce(), timeout_s=how.pop("timeout_s", 5.0), recorder=NullRecorder(), **how)


def right(block: Any) -> list[int]:
    """The ids of a block whose content is theirs."""
    rows, labels = block.content
    assert rows.tolist() == [[i, i + 1000] for i in block.ids.tolist()]
    assert labels["label"].tolist() == [2 * i for i in block.ids.tolist()]
    return list(block.ids.tolist())


async def train(loaders: Sequence[RingLoader], steps: range) -> list[list[list[int]]]:
    """What each peer trained on at each step."""

    async def one(each: RingLoader) -> list[list[int]]:
        seen = []
        for step in steps:
            seen.append(right(await each.block(step)))
            each.used(step)
            await asyncio.sleep(0)
        return seen

    return await asyncio.gather(*(one(each) for each in loaders))


async def close(loaders: Sequence[RingLoader]) -> None:
    for each in loaders:
        await each.close(1)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(("peers", "samples", "batch"), [(1, 7, 3), (2, 10, 3), (3, 20, 4), (4, 21, 2)])
async def test_peers_train_as_scheduled_and_read_their_own_part_once(peers: int, samples: int, batch: int) -> None:
    ring = Ring.of(samples, peers, batch, seed=3)
    async with endpoints(peers) as nodes:
        members = [node.peer for node in nodes]
        data = [Dataset(samples) for _ in nodes]
        loaders = [loader(node, members, ring, read) for node, read in zip(nodes, data, strict=True)]
        seen = await train(loaders, range((peers + 1) * ring.steps))
        for peer, steps in enumerate(seen):
            assert steps == [ring.indices(step, peer).tolist() for step in range((peers + 1) * ring.steps)]
        for part, read in zip(ring.parts, data, strict=True):
            assert sorted(part.tolist()) == np.flatnonzero(read.reads).tolist()
            # Once more, to see how samples are made, where nothing had to be put together: never.
            assert read.reads.max() == 1
        await close(loaders)


async def test_nothing_travels_where_all_can_read() -> None:
    ring = Ring.of(20, 3, 4, seed=3)
    async with endpoints(3) as nodes:
        members = [node.peer for node in nodes]
        loaders = [loader(node, members, ring, Dataset(20), travel=False) for node in nodes]
        seen = await train(loaders, range(9))
        assert seen == [[ring.indices(step, peer).tolist() for step in range(9)] for peer in range(3)]
        assert all(node.statistics()["bytes_sent"] == 0 for node in nodes)
        await close(loaders)


async def test_a_group_s_workers_divide_its_batches() -> None:
    ring = Ring.of(26, 2, 5, seed=3)
    async with endpoints(4) as nodes:
        peers = [node.peer for node in nodes]
        loaders = [
            loader(node, peers[rank % 2 :: 2], ring, Dataset(26), share=lambda _, rank=rank: (rank % 2, 2))
            for rank, node in enumerate(nodes)
        ]
        seen = await train(loaders, range(3 * ring.steps))
        for step in range(3 * ring.steps):
            for group in range(2):
                assert seen[2 * group][step] + seen[2 * group + 1][step] == ring.indices(step, group).tolist()
                assert loaders[2 * group].group_samples(step, mean=False) == len(ring.indices(step, group))
        assert loaders[0].group_samples(0, mean=True) == ring.samples_at(0) / 2
        await close(loaders)


async def test_resumed_in_the_middle_of_a_lap_it_goes_on() -> None:
    ring = Ring.of(20, 2, 3, seed=3)
    async with endpoints(2) as nodes:
        members = [node.peer for node in nodes]
        loaders = [loader(node, members, ring, Dataset(20)) for node in nodes]
        seen = await train(loaders, range(6, 20))
        assert seen == [[ring.indices(step, peer).tolist() for step in range(6, 20)] for peer in range(2)]
        await close(loaders)


@pairwise({"victim": [0, 1, 2, 3], "died": [2, 5, 9], "whole": [False, True]})
async def test_the_samples_of_a_lost_peer_are_taken_over_from_its_neighbours(victim: int, died: int, whole: bool) -> None:
    ring = Ring.of(41, 4, 3, seed=3)
    async with endpoints(4) as nodes:
        members = tuple(node.peer for node in nodes)
        parts = [None if whole else np.append(part, 0) for part in ring.parts]
        loaders = [loader(node, members, ring, Dataset(41, part), survives=True) for node, part in zip(nodes, parts, strict=True)]
        await train(loaders, range(died))
        await loaders[victim].close(1)
        left = [each for rank, each in enumerate(loaders) if rank != victim]
        for node in nodes:
            if node.peer != members[victim]:
                node.forget(members[victim], "killed")
        await train(left, range(died, died + 2))
        after = tuple(peer for rank, peer in enumerate(members) if rank != victim)
        for each in left:
            each.change(died + 2, after)
        lap = left[0]._plan.at(died + 2)[0].steps
        seen = await train(left, range(died + 2, died + 2 + 3 * lap))
        lost = sorted(sample for each in left for sample in each.ledger.lost)
        for start in range(0, 3 * lap, lap):
            used = sorted(sample for peer in seen for step in peer[start : start + lap] for sample in step)
            assert len(used) == len(set(used))
            assert sorted({*used, *lost}) == list(range(41))
        # In the first lap nobody has a copy of what the lost one had not used; later, only of what was on its way from it, or
        # should have been sent in the two steps until all knew. Whoever can read the data loses nothing.
        unused = len(ring.parts[victim]) if died < ring.steps else 0
        assert len(lost) <= (0 if whole else 3 * 3 + unused)
        assert sum(each.ledger.recovered + each.ledger.read_again for each in left) > 0
        await close(left)


async def test_a_late_peer_gets_an_even_share() -> None:
    ring = Ring.of(30, 2, 4, seed=3)
    async with endpoints(3) as nodes:
        members = tuple(node.peer for node in nodes)
        old = [loader(node, members[:2], ring, Dataset(30), survives=True) for node in nodes[:2]]
        await train(old, range(6))
        late = loader(nodes[2], members, Ring.of(30, 3, 4, 3), Dataset(30), survives=True, late=True)
        for each in (*old, late):
            each.change(6, members)
        seen = await train([*old, late], range(6, 15))
        for start in (0, 3, 6):
            used = sorted(sample for peer in seen for step in peer[start : start + 3] for sample in step)
            assert used == list(range(30))
        assert late.ledger.recovered == 10
        assert not any(each.ledger.lost for each in (*old, late))
        await close([*old, late])


async def test_where_losses_end_the_run_the_neighbour_is_named() -> None:
    ring = Ring.of(20, 2, 5, seed=3)
    async with endpoints(2) as nodes:
        members = [node.peer for node in nodes]
        loaders = [loader(node, members, ring, Dataset(20), timeout_s=0.02) for node in nodes]
        await train(loaders[:1], range(2))
        with pytest.raises(PeerTimeoutError, match=r"worker/1.*the samples of step 2"):
            await loaders[0].block(2)
        nodes[0].forget("worker/1", "killed")
        with pytest.raises(PeerLostError, match="worker/1"):
            await loaders[0].block(2)
        await close(loaders)


async def test_phantoms_travel_by_their_size() -> None:
    ring = Ring.of(20, 2, 5, seed=3)
    async with endpoints(2) as nodes:
        members = [node.peer for node in nodes]
        loaders = [loader(node, members, ring, Dataset(20), contents=PhantomContents(3000)) for node in nodes]

        async def one(each: RingLoader) -> None:
            for step in range(8):
                await each.block(step)
                each.used(step)
                await asyncio.sleep(0)

        await asyncio.gather(*(one(each) for each in loaders))
        assert all(node.statistics()["bytes_sent"] > 6 * 5 * 8 for node in nodes)
        assert all(each.ledger.received >= 20 for each in loaders)
        await close(loaders)


def test_what_cannot_travel_is_said() -> None:
    with pytest.raises(TaskError, match=r"a batch holds a str.*indices"):
        TensorContents(lambda ids: [torch.zeros(len(ids)), "text"]).read(np.arange(3))
    with pytest.raises(TaskError, match=r"shape \[2\], whose first dimension does not count"):
        TensorContents(lambda ids: [torch.zeros(2)]).read(np.arange(3))
