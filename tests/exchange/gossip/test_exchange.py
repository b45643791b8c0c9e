"""Gossip between workers against models that are updated and mixed one after the other, in one process."""

from __future__ import annotations

import asyncio
from typing import Literal

import numpy as np
import pytest

from tests.collectives.world import endpoints, group_of
from tests.exchange.world import Array, Data, NumpyReplica, train_alone, train_worker
from tests.pairwise import pairwise
from zmqtrain.exchange.gossip.exchange import GossipExchange, GossipSettings
from zmqtrain.exchange.gossip.schedule import Schedule, Shape
from zmqtrain.exchange.members import FixedMembers
from zmqtrain.exchange.sums import NetworkSums
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.wire.phantom import PhantomPayload

SIZES = (5, 1, 17, 300)
Exchanged = Literal["weights", "gradients"]


def exchanges(nodes: list[Endpoint], group_size: int, settings: GossipSettings) -> list[GossipExchange]:
    peers = tuple(node.peer for node in nodes)
    result = []
    for rank, node in enumerate(nodes):
        group, position = divmod(rank, group_size)
        own = group_of(nodes[group * group_size : (group + 1) * group_size], f"group/{group}")[position]
        members = FixedMembers(node, peers, timeout_s=10)
        column = frozenset(peers[position::group_size])
        result.append(GossipExchange(node, members, NetworkSums(own), column, settings))
    return result


async def train(groups: int, group_size: int, data: Data, settings: GossipSettings) -> list[list[Array]]:
    """The weights after each step, by worker."""
    steps = range(data.inputs.shape[0])
    async with endpoints(groups * group_size) as nodes:
        return await asyncio.gather(
            *(
                train_worker(
                    exchange, NumpyReplica(SIZES, rank), data, rank=rank, groups=groups, group_size=group_size, steps=steps
                )
                for rank, exchange in enumerate(exchanges(nodes, group_size, settings))
            )
        )


def reference(groups: int, data: Data, settings: GossipSettings) -> list[list[Array]]:
    """The weights after each step, by group."""
    replicas = [NumpyReplica(SIZES, 0) for _ in range(groups)]
    schedule = Schedule(groups, settings.seed, settings.shape, settings.rotation, settings.balanced)
    history: list[list[Array]] = [[] for _ in range(groups)]
    for step in range(data.inputs.shape[0]):
        for group, replica in enumerate(replicas):
            replica.backward(*data.share(step, group, groups), data.inputs.shape[1] // groups)
        if settings.exchange == "gradients":
            mix([replica.gradients for replica in replicas], schedule, step)
        for replica in replicas:
            asyncio.run(replica.update())
            asyncio.run(replica.take_all())
        if settings.exchange == "weights":
            mix([replica.weights for replica in replicas], schedule, step)
        for group, replica in enumerate(replicas):
            history[group].append(replica.flat())
    return history


def mix(values: list[list[Array]], schedule: Schedule, step: int) -> None:
    before = [[each.copy() for each in buckets] for buckets in values]
    for rank, buckets in enumerate(values):
        partners = schedule.partners(step, rank)
        if partners is None:
            continue
        for index, bucket in enumerate(buckets):
            bucket[:] = (before[rank][index] + sum(before[source][index] for source in partners.sources)) / (
                1 + len(partners.sources)
            )


def check(groups: int, group_size: int, by_bucket: bool, exchange: Exchanged) -> None:
    """Every worker has, after each step, the parameters of one process that does the same."""
    data = Data(sum(SIZES), 12 * groups * group_size, 9)
    settings = GossipSettings(seed=4, exchange=exchange, by_bucket=by_bucket)
    expected = reference(groups, data, settings)
    workers = asyncio.run(train(groups, group_size, data, settings))
    for rank, history in enumerate(workers):
        np.testing.assert_allclose(history, expected[rank // group_size], rtol=1e-12, atol=1e-12)
        for mine, first in zip(history, workers[rank - rank % group_size], strict=True):
            assert mine.tobytes() == first.tobytes(), "replicas of a group drift apart"


@pairwise(
    {
        "groups, group_size": [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (3, 3), (1, 2)],
        "by_bucket": [True, False],
        "exchange": ["weights", "gradients"],
    }
)
def test_equals_models_updated_and_mixed_in_one_process(groups: int, group_size: int, by_bucket: bool, exchange: Exchanged) -> None:
    check(groups, group_size, by_bucket, exchange)


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
@pytest.mark.parametrize("by_bucket", [True, False])
def test_groups_of_two_equal_models_in_one_process_in_each_way(by_bucket: bool, exchange: Exchanged) -> None:
    """When a group adds up its gradients depends on all three: on its size, on what is exchanged, and when."""
    check(2, 2, by_bucket, exchange)


@pytest.mark.parametrize(
    ("shape", "rotation", "balanced"),
    [
        ("hypercube", True, True),
        ("ring", False, True),
        ("random", True, True),
        ("random", True, False),
        ("dissemination", False, True),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_every_topology(shape: Shape, rotation: bool, balanced: bool, overlap: bool) -> None:
    data = Data(sum(SIZES), 48, 9)
    settings = GossipSettings(4, shape, rotation, balanced, overlap=overlap)
    for mine, theirs in zip(asyncio.run(train(4, 1, data, settings)), reference(4, data, settings), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
@pytest.mark.parametrize(("groups", "group_size", "shape"), [(4, 1, "dissemination"), (3, 2, "dissemination"), (5, 1, "random")])
def test_large_buckets_travel_in_slices(
    groups: int, group_size: int, shape: Shape, exchange: Exchanged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each becomes the mean as soon as it is there."""
    monkeypatch.setattr("zmqtrain.exchange.gossip.exchange.SLICE_BYTES", 500)
    data = Data(sum(SIZES), 12 * groups * group_size, 9)
    settings = GossipSettings(4, shape, balanced=shape != "random", exchange=exchange)
    expected = reference(groups, data, settings)
    for rank, history in enumerate(asyncio.run(train(groups, group_size, data, settings))):
        np.testing.assert_allclose(history, expected[rank // group_size], rtol=1e-12, atol=1e-12)


def test_one_group_is_plain_sgd() -> None:
    data = Data(sum(SIZES), 12, 6)
    alone = train_alone(SIZES, 0, data, range(6))
    for by_bucket in (True, False):
        (history,) = asyncio.run(train(1, 1, data, GossipSettings(1, by_bucket=by_bucket)))
        assert [each.tobytes() for each in history] == [each.tobytes() for each in alone]


@pytest.mark.parametrize("groups", [2, 3, 4, 7, 16])
def test_a_step_of_all_keeps_the_mean_and_a_period_spreads_it(groups: int) -> None:
    async def run() -> None:
        settings = GossipSettings(seed=2)
        async with endpoints(groups) as nodes:
            made, replicas = exchanges(nodes, 1, settings), [NumpyReplica(SIZES, rank) for rank in range(groups)]
            # As after being restored, each begins with weights of its own; nobody computes, so only the exchange changes them.
            await asyncio.gather(*(each.start(replica, restored=True) for each, replica in zip(made, replicas, strict=True)))
            mean = np.mean([replica.flat() for replica in replicas], axis=0)
            spread = np.abs(np.array([replica.flat() for replica in replicas]) - mean).max()
            for step in range(3 * (groups - 1).bit_length()):
                for each, replica in zip(made, replicas, strict=True):
                    each.begin_step(step)
                    for bucket in replica.buckets:
                        replica.hand_over(each, bucket.index)
                await asyncio.gather(*(each.end_step() for each in made))
                await asyncio.gather(*(replica.take_all() for replica in replicas))
                now = np.mean([replica.flat() for replica in replicas], axis=0)
                np.testing.assert_allclose(now, mean, rtol=1e-6)
            after = np.abs(np.array([replica.flat() for replica in replicas]) - mean).max()
            assert after < spread / 7 + 1e-12 if groups in (3, 7) else after < 1e-12
            await asyncio.gather(*(each.stop() for each in made))

    asyncio.run(run())


def test_the_next_forward_begins_while_buckets_are_under_way() -> None:
    async def run() -> None:
        async with endpoints(2) as nodes:
            made, replicas = exchanges(nodes, 1, GossipSettings(seed=2)), [NumpyReplica(SIZES, rank) for rank in range(2)]
            await asyncio.gather(*(each.start(replica) for each, replica in zip(made, replicas, strict=True)))
            first, replica = made[0], replicas[0]
            replica.ready.clear()
            first.begin_step(0)
            for bucket in replica.buckets:
                replica.hand_over(first, bucket.index)
            await first.end_step()
            assert replica.ready == []
            made[1].begin_step(0)
            for bucket in replicas[1].buckets:
                replicas[1].hand_over(made[1], bucket.index)
            await asyncio.gather(first.settle(), made[1].settle())
            assert sorted(replica.ready) == [0, 1, 2, 3]
            await asyncio.gather(*(each.stop() for each in made))
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_partner_that_says_nothing_is_named() -> None:
    async def run() -> None:
        async with endpoints(2) as nodes:
            settings = GossipSettings(seed=2, timeout_s=0.02)
            (first, second), replicas = exchanges(nodes, 1, settings), [NumpyReplica(SIZES, rank) for rank in range(2)]
            await asyncio.gather(first.start(replicas[0]), second.start(replicas[1]))
            first.begin_step(0)
            for bucket in replicas[0].buckets:
                replicas[0].hand_over(first, bucket.index)
            with pytest.raises(TimeoutError, match=r"worker/1.*bucket \d of step 0"):
                await first.settle()
            assert replicas[0].aborted is not None
            await asyncio.gather(first.stop(), second.stop())

    asyncio.run(run())


def test_phantoms_gossip_as_tensors_do() -> None:
    async def run() -> None:
        async with endpoints(3) as nodes:
            made = exchanges(nodes, 1, GossipSettings(seed=2))
            replicas = [NumpyReplica(SIZES, rank) for rank in range(3)]
            for replica in replicas:
                for index, bucket in enumerate(replica.buckets):
                    object.__setattr__(bucket, "parameters", PhantomPayload(SIZES[index], "float64"))
            await asyncio.gather(*(each.start(replica) for each, replica in zip(made, replicas, strict=True)))
            for step in range(12):
                for each, replica in zip(made, replicas, strict=True):
                    each.begin_step(step)
                    for bucket in replica.buckets:
                        replica.hand_over(each, bucket.index)
                await asyncio.gather(*(each.end_step() for each in made))
                await asyncio.gather(*(replica.take_all() for replica in replicas))
            await asyncio.gather(*(each.stop() for each in made))

    asyncio.run(run())
