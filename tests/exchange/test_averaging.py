"""Averaging every few steps against groups that are simulated one after the other."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.collectives.world import endpoints, group_of
from tests.exchange.world import Array, Data, NumpyReplica, train_worker
from zmqtrain.exchange.averaging.exchange import AveragingExchange, AveragingGroups
from zmqtrain.exchange.averaging.fragments import Fragments

pytestmark = pytest.mark.virtual_time

SIZES = (5, 1, 17, 300)


async def train(groups: int, group_size: int, every: int, data: Data, steps: range) -> list[list[Array]]:
    async with endpoints(groups * group_size) as nodes:
        world = group_of(nodes, "workers")
        rows = [group_of(nodes[g * group_size : (g + 1) * group_size], f"group/{g}") for g in range(groups)]
        columns = [group_of(nodes[position::group_size], f"column/{position}") for position in range(group_size)]
        return await asyncio.gather(
            *(
                train_worker(
                    AveragingExchange(
                        AveragingGroups(
                            world[rank],
                            rows[rank // group_size][rank % group_size],
                            columns[rank % group_size][rank // group_size],
                        ),
                        Fragments(every),
                    ),
                    NumpyReplica(SIZES, rank),
                    data,
                    rank=rank,
                    groups=groups,
                    group_size=group_size,
                    steps=steps,
                )
                for rank in range(groups * group_size)
            )
        )


def simulated(groups: int, every: int, data: Data, steps: range) -> list[list[Array]]:
    """By group and step, in one process."""
    replicas = [NumpyReplica(SIZES, 0) for _ in range(groups)]
    history: list[list[Array]] = [[] for _ in range(groups)]
    for step in steps:
        for group, replica in enumerate(replicas):
            replica.backward(*data.share(step, group, groups), data.inputs.shape[1] // groups)
            asyncio.run(replica.update())
            asyncio.run(replica.take_all())
        if (step + 1) % every == 0:
            for weights in zip(*(replica.weights for replica in replicas), strict=True):
                mean = sum(weights) / groups
                for weight in weights:
                    weight[:] = mean
        for group, replica in enumerate(replicas):
            history[group].append(replica.flat())
    return history


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("groups", "group_size"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4)])
def test_equals_groups_trained_apart_and_averaged(groups: int, group_size: int, every: int) -> None:
    data = Data(sum(SIZES), 12 * groups * group_size, 7)
    expected = simulated(groups, every, data, range(7))
    workers = asyncio.run(train(groups, group_size, every, data, range(7)))
    for rank, history in enumerate(workers):
        for step, mine in enumerate(history):
            np.testing.assert_allclose(mine, expected[rank // group_size][step], rtol=1e-12, atol=1e-12)
            assert mine.tobytes() == workers[rank - rank % group_size][step].tobytes(), "replicas of a group drift apart"
            if (step + 1) % every == 0:
                assert mine.tobytes() == workers[0][step].tobytes(), "the groups' averages differ"


async def test_synchronous_only_if_all_groups_are_equal_after_each_step() -> None:
    async with endpoints(2) as nodes:
        world = group_of(nodes, "workers")[0]
        alone = group_of(nodes[:1], "alone")[0]
        assert not AveragingExchange(AveragingGroups(world, alone, world), Fragments(2)).synchronous
        assert AveragingExchange(AveragingGroups(world, alone, world), Fragments(1)).synchronous
        assert AveragingExchange(AveragingGroups(world, world, alone), Fragments(2)).synchronous
        with pytest.raises(ValueError, match="every 0 steps"):
            Fragments(0)
